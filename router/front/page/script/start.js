/* Draws each state, and connects what the reader does with what happens. */

const FACTS = JSON.parse($("facts").textContent); // name, model and version, which everybody may know

function draw() {
  const s = view.shown = view.now;
  if (!s) return;
  stream.silent_s = 0;
  document.body.classList.remove("old");
  drawStranger();
  drawTop();
  drawVerdict(s);
  drawPromise(s);
  drawPools(s);
  drawRoofline(s);
  drawFlow(s);
  drawRequests(s);
  drawControls(s);
  patch($("fnote"), `Figures of the last ${span(s.window_s)}; latencies and attainment of the last
    ${span(s.promise.window_s)}. Tick on a bar: from here it counts as short if something waits or an SLO is missed.${whose(s)}`);
  const [clause] = s.verdict.sentence.split(/[:;,.]/);
  const loud = LOUD.includes(s.verdict.severity) ? "▲ " : "";
  document.title = `${loud}${s.deployment.name ?? FACTS.name}: ${clause} · Ridgeline`;
}

/* Of several routers, each sees its own requests only; workers and queues are those of all. */
function whose(s) {
  return s.requests_of ? ` Requests, latencies, SLOs and hand-offs are those of ${esc(s.requests_of)}.` : "";
}

const ACTIONS = {
  verdict: () => askAdvised(view.shown.verdict.action),
  mode: askMode,
  scale: askScale,
  less: pool => countWanted(pool, -1),
  more: pool => countWanted(pool, 1),
  drain: () => askDrain($("which").value),
  restart: askRestart,
  cancel: askCancel,
  axis: chooseAxis,
  newest: closeRequest,
  hold: toggleHold,
  theme: () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"),
  forget: forgetKey,
};
const WITHOUT_STATE = ["theme", "forget"];

function clicked({target}) {
  const button = target.closest("[data-act],[data-req]");
  if (!button) return;
  const {act, arg, req} = button.dataset;
  if (!view.shown && !WITHOUT_STATE.includes(act)) return;
  if (req !== undefined) openOrClose(req);
  else ACTIONS[act](arg);
}

function openOrClose(id) {
  if (view.open === id) return closeRequest();
  view.open = id;
  return drawRequests(view.shown);
}

function closeRequest() {
  view.open = view.kept = null;
  drawRequests(view.shown);
}

function chooseAxis(axis) {
  view.axis = axis;
  for (const button of document.querySelectorAll('[data-act="axis"]')) {
    button.setAttribute("aria-pressed", button.dataset.arg === axis);
  }
  drawRequests(view.shown);
}

function toggleHold() {
  view.hold = !view.hold;
  $("hold").textContent = view.hold ? "Go on" : "Hold";
  $("hold").setAttribute("aria-pressed", view.hold);
  if (view.hold) drawTop();
  else draw();
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  $("theme").textContent = theme === "dark" ? "Light" : "Dark";
}

/* Many workers are one Tab stop; the arrow keys go from one to the next. */
function moveAmongDots(event) {
  const dot = event.target.closest?.(".dot");
  const step = {ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling"}[event.key];
  if (!dot?.[step]) return;
  event.preventDefault();
  dot[step].focus();
}

function showTip({target}) {
  const owner = target.closest?.("[data-tip]");
  if (!owner) return;
  const [tip, box] = [$("tip"), owner.getBoundingClientRect()];
  tip.textContent = owner.dataset.tip;
  tip.hidden = false;
  tip.style.left = `${Math.max(4, Math.min(innerWidth - tip.offsetWidth - 8, box.left))}px`;
  tip.style.top = `${Math.max(4, box.top - tip.offsetHeight - 6)}px`;
}

function hideTip({target}) {
  if (target.closest?.("[data-tip]")) $("tip").hidden = true;
}

/* A hidden tab costs the router nothing. */
function followVisibility() {
  if (document.hidden) disconnect();
  else if (!stream.denied) connect();
}

function start() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  setTheme(dark.matches ? "dark" : "light");
  dark.addEventListener("change", ({matches}) => setTheme(matches ? "dark" : "light"));
  document.addEventListener("click", clicked);
  document.addEventListener("keydown", moveAmongDots);
  for (const name of ["pointerover", "focusin"]) document.addEventListener(name, showTip);
  for (const name of ["pointerout", "focusout"]) document.addEventListener(name, hideTip);
  document.addEventListener("visibilitychange", followVisibility);
  $("keyform").addEventListener("submit", takeKey);
  const redraw = () => view.shown && drawRoofline(view.shown);
  new ResizeObserver(redraw).observe($("plot"));
  $("rooftable").parentElement.addEventListener("toggle", redraw);
  $("version").textContent = FACTS.version ? `· Ridgeline ${FACTS.version}` : "";
  setInterval(watchSilence, 1000);
  drawStranger();
  drawTop();
  if (!document.hidden) connect();
}

start();
