/* The state of the deployment as the router's events tell it, and what the reader has chosen to see. */

const KEPT_HISTORY_S = 900; // as much as the first event of a stream has

const view = {
  now: null, // the latest state
  shown: null, // the one that is drawn, which a reader may hold
  at: 0, // when it came, ms
  hold: false,
  axis: "arrival", // of the requests: from arrival, or on one clock
  open: null, // the id of the request that is open
  kept: null, // the requests listed when it was opened
  said: null, // what the sentence is about: it is spoken only when that changes
  wanted: {}, // workers by pool, where the reader has changed the number
  done: null, // what the reader has done last
};

/* Leaves out what is not known, so that it reads as undefined, of whatever object. A list keeps its unknown points. */
function known(value) {
  if (Array.isArray(value)) return value.map(known);
  if (value === null || typeof value !== "object") return value;
  const entries = Object.entries(value).filter(([, each]) => each !== null);
  return Object.fromEntries(entries.map(([key, each]) => [key, known(each)]));
}

/* Returns an event with every object and list that drawing reads, empty if they are not known. */
function filled(event) {
  const s = known(event);
  const worker = each => ({...each, id: each.id ?? UNKNOWN, state: each.state ?? "ready", steps: each.steps ?? []});
  const pool = each => ({...each, pool: each.pool ?? UNKNOWN, workers: (each.workers ?? []).map(worker)});
  return {
    ...s,
    deployment: {modes: [], ...s.deployment},
    verdict: {severity: "idle", sentence: "It is not known which resource is short.", ...s.verdict},
    resources: s.resources ?? [],
    promise: {refused_by: {}, ...s.promise, slo: s.promise?.slo ?? {}},
    pools: (s.pools ?? []).map(pool),
    links: s.links ?? [],
    router: s.router ?? {},
    flow: s.flow ?? {},
    operations: s.operations ?? [],
    requests: s.requests?.map(each => ({...each, id: each.id ?? UNKNOWN, stages: each.stages ?? []})),
  };
}

/* Returns the state after an event. The first of a stream is whole; later ones leave out requests and history, or give
   one point of it. */
function stateAfter(event, first) {
  const s = filled(event);
  const old = first ? null : view.now;
  const passed_s = s.time_unix_s - old?.time_unix_s;
  const older = ago => (isKnown(ago) && isKnown(passed_s) ? ago + passed_s : ago);
  s.requests ??= (old?.requests ?? []).map(each =>
    ({...each, arrived_s_ago: older(each.arrived_s_ago), ended_s_ago: older(each.ended_s_ago)}));
  s.history = old ? historyAfter(old.history, s.history, older) : {events: [], ...s.history};
  return s;
}

/* A point comes with all events, or with none: those that were told before then grow older. */
function historyAfter(old, point, older) {
  const told = point?.events?.length ? point.events : old.events.map(each => ({...each, s_ago: older(each.s_ago)}));
  const history = {...old, ...point, events: told};
  const most = KEPT_HISTORY_S / (history.step_s || 5);
  for (const [name, points] of Object.entries(point ?? {})) {
    if (Array.isArray(points) && name !== "events") history[name] = [...(old[name] ?? []), ...points].slice(-most);
  }
  return history;
}

const prefillPool = s => s.pools.find(each => each.pool === "prefill") ?? s.pools[0];
const decodePool = s => s.pools.find(each => each.pool === "decode") ?? s.pools[s.pools.length - 1];

/* Whether the workers of a pool do both phases. */
const doesBoth = pool => pool?.pool === "colocated" || pool?.pool === "adaptive";

const resourceOf = (s, id) => s.resources.find(each => each.id === id);

const isShort = (s, id) => resourceOf(s, id)?.state === "short";

const shortFrom = (s, id) => resourceOf(s, id)?.short_from_ratio;

function meanOf(items, figure) {
  const figures = items.map(figure).filter(isKnown);
  return figures.length ? figures.reduce((sum, each) => sum + each, 0) / figures.length : undefined;
}
