/* The stream of states, the operator's key, and what a stranger sees. EventSource sends no header, so that the stream
   is read by fetch. Addresses are relative: a proxy may serve this page under a prefix. */

const KEY = "ridgeline.key"; // in sessionStorage: gone with the tab
const FIRST_WAIT_S = 1;
const LONGEST_WAIT_S = 10; // between two tries to connect
const SILENT_PERIODS = 3; // without an event, after which figures are called old
const DEAD_PERIODS = 10; // after which the connection is given up: a proxy may hold one whose other end has gone
const READY_EVERY_S = 15; // GET /ready may cost a health probe

const stream = {
  connection: null, // AbortController of the present one
  opened_ms: 0, // when the reader opened it or came back
  tried_ms: 0,
  wait_s: FIRST_WAIT_S,
  silent_s: 0,
  refusal: "", // the latest answer that was no stream
  failed: false, // the latest try to connect
  denied: false,
  asked_ms: -Infinity, // when /ready was asked
};

class Refused extends Error {} // with the server's own words
class Denied extends Refused {} // until there is a key, or another one

function authorization() {
  const key = sessionStorage.getItem(KEY);
  return key ? {authorization: `Bearer ${key}`} : {};
}

/* The server's own words, whichever layer of it speaks. */
async function refusalOf(reply) {
  const text = await reply.text();
  try {
    const {error, detail} = JSON.parse(text);
    const message = error?.message ?? detail;
    return typeof message === "string" ? message : JSON.stringify(message);
  } catch {
    return `HTTP ${reply.status} ${reply.statusText} ${text.slice(0, 200)}`.trim();
  }
}

/* Follows the stream until the tab is hidden or the server denies it; connects again after each end. */
async function connect(opened_ms = Date.now()) {
  const connection = new AbortController();
  stream.connection?.abort();
  Object.assign(stream, {connection, opened_ms, tried_ms: Date.now(), wait_s: FIRST_WAIT_S, denied: false});
  while (!connection.signal.aborted) {
    try {
      await follow(connection.signal);
    } catch (error) {
      if (connection.signal.aborted) return;
      if (error instanceof Denied) return deny(error.message);
      Object.assign(stream, {refusal: error instanceof Refused ? error.message : "", failed: true});
      drawStranger();
    }
    await new Promise(resolve => setTimeout(resolve, stream.wait_s * 1e3));
    stream.wait_s = Math.min(LONGEST_WAIT_S, stream.wait_s * 2);
  }
}

function disconnect() {
  stream.connection?.abort();
  stream.connection = null;
}

async function follow(signal) {
  const reply = await fetch("ridgeline/state/stream", {headers: authorization(), cache: "no-store", signal});
  if (reply.status === 401 || reply.status === 403) throw new Denied(await refusalOf(reply));
  if (!reply.ok) throw new Refused(await refusalOf(reply));
  if (!reply.headers.get("content-type")?.startsWith("text/event-stream")) {
    throw new Refused("something between this page and the router answered in its place");
  }
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = "", first = true; ;) {
    const {done, value} = await reader.read();
    if (done) return;
    const events = (rest + value).split(/\r?\n\r?\n/);
    rest = events.pop();
    for (const data of events.map(dataOf).filter(Boolean)) {
      if (signal.aborted) return;
      arrived(JSON.parse(data), first);
      first = false;
    }
  }
}

/* The data of an event; a comment, which keeps the connection open, has none. */
function dataOf(event) {
  const lines = event.split(/\r?\n/).filter(each => each.startsWith("data:"));
  return lines.map(each => each.slice("data:".length).trimStart()).join("\n");
}

/* Drawn by the browser's next frame, and not within the stream: an error in drawing is no end of the stream. */
function arrived(event, first) {
  const isFirst = view.now === null;
  view.now = stateAfter(event, first);
  view.at = Date.now();
  Object.assign(stream, {wait_s: FIRST_WAIT_S, refusal: "", failed: false});
  if (!view.hold || isFirst) requestAnimationFrame(draw);
}

/* Each second: whether the router is silent, and whether it is time to ask if it is ready. */
function watchSilence() {
  if (stream.denied) askReady();
  if (!stream.connection || stream.denied || !view.now || view.hold) return;
  const period_ms = (view.now.period_s ?? 2) * 1e3;
  const isSilent = Date.now() - Math.max(view.at, stream.opened_ms) > SILENT_PERIODS * period_ms;
  if (Date.now() - Math.max(view.at, stream.tried_ms) > DEAD_PERIODS * period_ms) connect(stream.opened_ms);
  const was = stream.silent_s;
  stream.silent_s = isSilent ? Math.round((Date.now() - view.at) / 1e3) : 0;
  if (isSilent || was) drawSilence();
}

function deny(message) {
  disconnect();
  sessionStorage.removeItem(KEY); // one that is refused is of no use
  Object.assign(stream, {denied: true, refusal: message, silent_s: 0});
  view.now = view.shown = view.said = null;
  drawStranger();
  drawTop();
  askReady();
}

function drawStranger() {
  const isStranger = view.now === null;
  $("page").hidden = isStranger;
  $("strange").hidden = !isStranger;
  $("fnote").hidden = $("hold").hidden = isStranger;
  $("forget").hidden = !sessionStorage.getItem(KEY);
  if (!isStranger) return;
  document.body.classList.remove("old");
  $("serves").textContent = `${FACTS.name} serves ${FACTS.model}.`;
  const waiting = stream.failed ? "The router does not answer; trying again…" : "Asking the router for its state…";
  $("trouble").textContent = stream.refusal || waiting;
  $("keyform").hidden = !stream.denied;
  document.title = `${FACTS.name} · Ridgeline`;
}

async function askReady() {
  if (document.hidden || Date.now() - stream.asked_ms < READY_EVERY_S * 1e3) return;
  stream.asked_ms = Date.now();
  try {
    const reply = await fetch("ready", {cache: "no-store"});
    $("readiness").textContent = readiness(await reply.json());
  } catch (error) {
    $("readiness").textContent = `The router does not answer (${error.message}).`;
  }
}

function readiness({ready, why, pools = {}}) {
  if (ready) return "It is ready.";
  const reasons = Object.entries(pools).filter(([, each]) => !each.ready)
    .map(([pool, each]) => (each.why ? `${pool}: ${each.why}` : pool));
  return `It is not ready: ${why ?? (reasons.join("; ") || "it does not say why")}.`;
}

function takeKey(event) {
  event.preventDefault(); // the key goes in a header, never in an address
  const key = $("key").value.trim();
  $("key").value = "";
  if (/[^\x21-\x7e]/.test(key)) { // a header cannot have it
    stream.refusal = "This key has a character that no key can have.";
    return drawStranger();
  }
  if (key) sessionStorage.setItem(KEY, key);
  Object.assign(stream, {refusal: "", failed: false});
  connect();
  drawStranger();
}

function forgetKey() {
  disconnect();
  deny("The key is forgotten.");
}
