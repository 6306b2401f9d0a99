/* The pools, and each of their workers: how busy, how full, and who is lost. */

const DENSE_FROM = 9; // workers of a pool that are drawn as two small bars each
const COLUMNS = [1, 1, 2, 3, 2, 3, 3, 4, 4]; // of cells, by the number of workers: rows of equal length

function drawPools(s) {
  const isDense = s.pools.some(each => each.workers.length >= DENSE_FROM);
  const note = `<p class="s m">Left bar: busy (prefill), step against TPOT (others). Right bar, striped: KV blocks in
    use. Point at a worker for its figures, or use Tab and the arrow keys.</p>`;
  patch($("pools"), s.pools.map(each => pool(each, s)).join("") + (isDense ? note : ""));
}

function pool(p, s) {
  const cells = p.workers.length >= DENSE_FROM
    ? `<div class="dense" role="list">${p.workers.map((each, i) => dot(each, p, s, i)).join("")}</div>`
    : `<div class="cells" data-style="grid-template-columns:repeat(${COLUMNS[p.workers.length]},minmax(0,1fr))">`
      + `${p.workers.map(each => cell(each, p, s)).join("")}</div>`;
  const missing = p.workers_ready < p.workers_wanted ? ` of ${num(p.workers_wanted)}` : "";
  const hardware = p.hardware ? ` × ${esc(p.hardware)}` : plural(p.workers_ready, " worker", " workers");
  const facts = poolFacts(p, s).map(each => `<span>${each}</span>`).join("");
  return `<section class="pool" aria-label="${esc(p.pool)} pool"><div class="h">
    <h2>${glyph(p.pool)}${esc(capital(p.pool))} pool</h2>
    <span class="m s">${num(p.workers_ready)}${missing}${hardware}</span>
    <span class="s m">${boundOf(p)}</span></div><div class="facts">${facts}</div>${cells}</section>`;
}

function boundOf(p) {
  if (p.bound === "compute") return `compute binds, ${pct(p.mfu_ratio)} of peak FLOP/s`;
  if (p.bound === "memory") return `memory bandwidth binds, ${pct(p.mbu_ratio)} of peak`;
  return p.bound === "neither" ? "neither compute nor bandwidth binds" : "";
}

/* Those that are known, of what counts in this kind of pool. A figure that is short is marked. */
function poolFacts(p, s) {
  const hot = (on, text) => (on ? `<b class="hot">▲${NB}${text}</b>` : `<b>${text}</b>`);
  const fact = (figure, html) => (isKnown(figure) ? [html] : []);
  const serving = p.workers.filter(each => !isLost(each));
  const kv = meanOf(serving, each => each.kv_used_ratio);
  const hits = fact(p.prefix_hit_ratio, `<b>${pct(p.prefix_hit_ratio)}</b> from prefix cache`);
  const wait = p.waiting_prompts && isKnown(p.wait_s) ? ` ${time(p.wait_s)}` : "";
  const queue = hot(isShort(s, "prefill"), num(p.waiting_prompts))
    + ` ${plural(p.waiting_prompts, "prompt waits", "prompts wait")}${wait}`;
  if (p.pool === "prefill") {
    return [
      ...fact(p.busy_ratio, `${hot(isShort(s, "prefill"), pct(p.busy_ratio))} busy`),
      ...fact(p.waiting_prompts, queue),
      ...fact(p.tokens_per_s, `<b>${num(p.tokens_per_s)}</b> prompt tokens/s`),
      ...hits,
    ];
  }
  const tokens = fact(p.tokens_per_s, `<b>${num(p.tokens_per_s)}</b> tokens/s`);
  const blocks = fact(kv, `${hot(isShort(s, "kv"), pct(kv))} of KV blocks`);
  if (doesBoth(p)) {
    const step = `step ${hot(isShort(s, "bandwidth"), time(p.mixed_step_s))} with prompts, `
      + `<b>${time(p.decode_step_s)}</b> without`;
    return [
      ...fact(p.prompt_busy_ratio, `<b>${pct(p.prompt_busy_ratio)}</b> of time on prompts`),
      ...fact(p.mixed_step_s ?? p.decode_step_s, step),
      ...blocks, ...tokens, ...fact(p.waiting_prompts || undefined, queue), ...hits,
    ];
  }
  const waiting = serving.reduce((sum, each) => sum + (each.waiting ?? 0), 0);
  const blocked = `${hot(waiting && isShort(s, "kv"), num(waiting))} ${plural(waiting, "waits", "wait")} for blocks`;
  const limit = isKnown(s.promise.slo.tpot_s) ? ` of ${time(s.promise.slo.tpot_s)}` : "";
  return [
    ...fact(p.decode_step_s, `step ${hot(isShort(s, "bandwidth"), time(p.decode_step_s))}${limit}`),
    ...blocks,
    ...fact(meanOf(serving, each => each.waiting), blocked),
    ...tokens,
  ];
}

/* What a worker's first bar shows: its busy time, or its steps against TPOT; without an SLO, nothing. */
function paceOf(worker, p, s) {
  return p.pool === "prefill" ? worker.busy_ratio : worker.decode_step_s / s.promise.slo.tpot_s;
}

const isLost = worker => worker.state === "lost" || worker.state === "away";

function dot(w, p, s, i) {
  const pace = p.pool === "prefill" ? `${pct(w.busy_ratio)} busy` : `step ${time(w.decode_step_s)}`;
  const figures = isLost(w) ? w.state : `${pace}, KV ${pct(w.kv_used_ratio)}, queue ${num(w.waiting)}`;
  const tip = `${w.id} on ${w.host ?? UNKNOWN}: ${figures}, batch ${num(w.running)}`;
  const height = ratio => `data-style="height:${(100 * Math.min(1, isKnown(ratio) ? ratio : 0)).toFixed(0)}%"`;
  return `<div role="listitem" tabindex="${i ? -1 : 0}" class="dot ${isLost(w) ? "lost" : ""}" `
    + `data-tip="${esc(tip)}" aria-label="${esc(`${w.id}: ${figures}`)}">${isLost(w) ? "▲" : ""}`
    + `${esc(shortId(w.id))}<span class="v2"><span><i ${height(paceOf(w, p, s))}></i></span>`
    + `<span><i ${height(w.kv_used_ratio)}></i></span></span></div>`;
}

/* worker-17 is 17 where many stand side by side. */
const shortId = id => id.match(/\d+$/)?.[0] ?? id.slice(0, 4);

function cell(w, p, s) {
  const where = [w.host, w.device].filter(Boolean).map(esc).join(", ");
  if (isLost(w)) return lostCell(w, where);
  const isPrefill = p.pool === "prefill";
  const pace = paceOf(w, p, s);
  const [busyFrom, fullFrom] = [shortFrom(s, "prefill"), shortFrom(s, "kv")];
  const row = (name, drawn, text) => `<span class="m">${name}</span>${drawn}<span>${text}</span>`;
  const rows = [
    doesBoth(p) ? row("prompts", bar(w.prompt_busy_ratio), pct(w.prompt_busy_ratio)) : "",
    isPrefill ? row("busy", bar(pace, {tick: busyFrom, hot: pace >= busyFrom && isShort(s, "prefill")}), pct(pace))
      : row("step", bar(pace, {tick: 1, hot: pace > 1}), time(w.decode_step_s)),
    row("KV", bar(w.kv_used_ratio, {
      tick: fullFrom, hot: w.kv_used_ratio >= fullFrom && !isPrefill, pinned: w.kv_pinned_ratio > 0.3,
    }), pct(w.kv_used_ratio)),
    isPrefill ? "" : row("batch", bar(w.running / w.max_running), `${num(w.running)}${NB}of${NB}${num(w.max_running)}`),
  ];
  const empty = isKnown(w.waiting) ? '<span class="m">queue empty</span>' : "";
  const queue = w.waiting ? `<b>${num(w.waiting)}</b> queued` : empty;
  const batch = isPrefill && isKnown(w.running) ? `<span class="m">batch ${num(w.running)} · </span>` : "";
  const pinned = w.kv_pinned_ratio > 0.1 ? `<span><b>${pct(w.kv_pinned_ratio)}</b> pinned by hand-offs</span>` : "";
  const away = w.state === "ready" ? "" : `, ${esc(w.state)}`;
  return `<div class="cell"><div class="n"><b>${esc(w.id)}${away}</b>
    <span class="m">${where}</span></div><div class="g">${rows.join("")}</div>
    <div class="n s"><span>${batch}${queue}</span>${pinned}</div></div>`;
}

function lostCell(w, where) {
  const restarts = w.restarts ? `started again ${w.restarts === 1 ? "once" : `${num(w.restarts)} times`}` : "";
  return `<div class="cell lost"><div class="n"><b>▲ ${esc(w.id)}</b><span class="m">${where}</span></div>
    <p class="s">lost ${span(w.state_since_s)} ago: ${esc(w.why)}</p>
    <p class="s m">${restarts}</p></div>`;
}
