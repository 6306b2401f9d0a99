/* The sentence that names the bottleneck, the five bars that prove it, and the line at the top. */

const TAGS = {
  short: "▲ short", fault: "▲ lost", watch: "▲ 1 slow", full: "nearly full", ok: "ok", unused: "unused",
};
const IDLE_TAGS = {router: "plenty", link: "plenty", kv: "plenty", prefill: "idle", bandwidth: "idle"};
const LOUD = ["short", "fault", "watch"];

function drawTop() {
  const s = view.now;
  const d = s?.deployment ?? {};
  const pools = (s?.pools ?? []).map(workersOf).join(" + ");
  const why = d.mode_is_for ? ` (${esc(d.mode_is_for)})` : ""; // what a comparison runs at present
  const mode = d.mode ? `<span class="m">${esc(d.mode)}${why}: ${pools}</span>` : "";
  const up = isKnown(d.uptime_s) ? `<span class="m s">up ${span(d.uptime_s)}</span>` : "";
  const name = esc(d.name ?? FACTS.name);
  const model = esc(d.model ?? FACTS.model);
  patch($("who"), `<span class="name">Ridgeline</span><span>${name}</span><span class="m">${model}</span>${mode}${up}`
    + `<span class="s">${liveness()}</span>`);
}

function workersOf(pool) {
  const missing = pool.workers_ready < pool.workers_wanted;
  return `${num(pool.workers_ready)}${missing ? `${NB}of${NB}${num(pool.workers_wanted)}` : ""} ${esc(pool.pool)}`;
}

function liveness() {
  if (!view.now) return "";
  if (stream.silent_s) return `<b class="tag short">▲ no answer for ${span(stream.silent_s)}</b>`;
  return view.hold ? "❚❚ held" : "● live";
}

/* A sentence of the same kind is spoken once: its figures change, its meaning does not. */
function drawVerdict(s) {
  const v = s.verdict;
  const isNew = view.said?.kind !== v.kind || view.said?.resource !== v.resource || view.said?.worker !== v.worker;
  view.said = {kind: v.kind, resource: v.resource, worker: v.worker};
  $("verdict").className = `card verdict ${v.severity}`;
  $("sentence").textContent = v.sentence;
  $("advice").textContent = v.advice ?? "";
  if (isNew) speak(`${v.sentence} ${v.advice ?? ""}`);
  const lasts = LOUD.includes(v.severity) ? "since" : "for";
  const button = v.action ? `<button class="k main" data-act="verdict">${esc(v.action.label)}</button>` : "";
  const since = isKnown(v.since_s) ? `<p class="since s m">${lasts} ${span(v.since_s)}</p>` : "";
  patch($("act"), button + since);
  patch($("res"), s.resources.map(each => resource(each, s)).join(""));
}

function speak(text) {
  $("spoken").textContent = text;
}

function resource(r, s) {
  const v = s.verdict;
  const blamed = v.resource === r.id && LOUD.includes(v.severity);
  const state = blamed ? v.severity : r.state;
  const tag = state === "idle" ? IDLE_TAGS[r.id] : TAGS[state];
  const look = esc(state ?? "unused");
  return `<li class="${look}">
    <div class="t"><span>${esc(r.name)}</span><span class="tag ${look}">${esc(tag ?? state)}</span></div>
    <div class="t"><span class="v">${pct(r.use_ratio)}</span><span class="s m">${useOf(r, s)}</span></div>
    ${bar(r.use_ratio ?? 0, {tick: r.short_from_ratio})}<div class="s">${esc(r.detail ?? "")}</div></li>`;
}

/* Of what the ratio is a part. */
function useOf(r, s) {
  if (r.state === "unused" || !isKnown(r.use_ratio)) return "";
  const prefill = doesBoth(prefillPool(s)) ? "of engine time" : "busy";
  const decode = decodePool(s), tpot = s.promise.slo.tpot_s;
  const slow = tpot && decode?.decode_step_s > tpot;
  const bandwidth = slow ? "of the TPOT SLO" : decode?.slo_point ? "of the batch for TPOT" : "of its batch";
  return {router: "busy", prefill, link: "busy", kv: "of blocks used", bandwidth}[r.id] ?? "";
}

/* Old figures must not look like present ones: the page itself says that the router is silent. */
function drawSilence() {
  document.body.classList.toggle("old", stream.silent_s > 0);
  if (!view.now) return;
  drawTop();
  if (!stream.silent_s) return;
  const isNew = view.said !== null;
  view.said = null; // whatever comes next is new
  $("verdict").className = "card verdict fault";
  $("sentence").textContent =
    `No answer from the router for ${span(stream.silent_s)}: the figures below are that old.`;
  $("advice").textContent = stream.refusal ? `Its last answer: ${stream.refusal}`
    : "It may be restarting, or stuck. GET /health says whether its process answers; ridgeline status and ridgeline "
      + "logs say why.";
  patch($("act"), "");
  if (isNew) speak($("sentence").textContent);
}
