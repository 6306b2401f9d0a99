/* The way of a request through the deployment, with the rate along each arrow. */

function drawFlow(s) {
  const {flow: f, promise: p} = s;
  const prefill = prefillPool(s) ?? {};
  const decode = decodePool(s) ?? {};
  const isSplit = prefill !== decode;
  const most = Math.max(p.arrivals_per_s ?? 0, ...(s.history.arrivals_per_s ?? []).filter(isKnown));
  const arriving = thickness(p.arrivals_per_s / most);
  const tokens = p.arrivals_per_s === 0 ? "no traffic" : `${num(f.prompt_tokens_per_s)} tokens/s`;
  const lag = isKnown(s.router.loop_lag_s) ? ` · lag ${time(s.router.loop_lag_s)}` : "";
  patch($("flow"), [
    node("clients", `${num(p.refused_per_s)} refused/s`, ""),
    edge(`${num(p.arrivals_per_s)} requests/s`, tokens, arriving),
    node("router", `${pct(s.router.cpu_ratio)} CPU${lag}`, `${num(s.router.in_flight)} in flight`,
      isShort(s, "router")),
    edge(`${num(prefill.waiting_prompts)} wait`, isKnown(prefill.wait_s) ? `${time(prefill.wait_s)} queue` : "", arriving, isShort(s, "prefill")),
    ...(isSplit ? twoPools(s, prefill, decode) : [onePool(s, decode)]),
  ].join(""));
  $("flow").classList.toggle("whole", !isSplit);
  const perEvent = isKnown(s.router.tokens_per_event) ? ` ${s.router.tokens_per_event.toFixed(1)} per event,` : "";
  const line = '<i aria-hidden="true"></i>';
  patch($("back"), `${line}<span>back to clients: <b>${num(f.output_tokens_per_s)} tokens/s</b>,${perEvent} `
    + `${num(p.finished_per_s)} answers/s</span>${line}`);
  patch($("linknote"), s.links.length ? s.links.map(linkNote).join("<br>") : "No KV moves between workers.");
}

function node(name, first, second, isHot) {
  return `<div class="node ${isHot ? "short" : ""}"><b>${name}</b><span class="s">${first}</span>`
    + `<span class="s m">${second}</span></div>`;
}

function edge(above, below, wide, isHot) {
  return `<div class="edge ${isHot ? "short" : ""}"><span><b>${above}</b></span>`
    + `<div class="arrow" data-style="--w:${wide}"></div><span class="m">${below}</span></div>`;
}

function thickness(ratio) {
  return `${ratio > 0 ? (1.5 + 5 * Math.min(1, ratio)).toFixed(1) : 1}px`;
}

const workers = count => `${num(count)} ${plural(count, "worker", "workers")}`;

function twoPools(s, prefill, decode) {
  return [
    node("prefill", `${pct(prefill.busy_ratio)} busy`, workers(prefill.workers_ready), isShort(s, "prefill")),
    handoffs(s),
    node("decode", isKnown(decode.decode_step_s) ? `step ${time(decode.decode_step_s)}` : "no step",
      workers(decode.workers_ready), isShort(s, "kv") || isShort(s, "bandwidth")),
  ];
}

function onePool(s, p) {
  const isHot = ["prefill", "kv", "bandwidth"].some(each => isShort(s, each));
  const how = {colocated: ", whole requests", adaptive: `, ${pct(s.flow.split_ratio)} of requests split`}[p.pool] ?? "";
  return node("prefill and decode",
    `${pct(p.prompt_busy_ratio)} of time on prompts · step ${time(p.decode_step_s)}`,
    workers(p.workers_ready) + how, isHot);
}

/* The busiest transport; the note below names all. */
function handoffs(s) {
  const [link] = [...s.links].sort((a, b) => (b.bytes_per_s ?? 0) - (a.bytes_per_s ?? 0));
  if (!link) return edge("no KV moves", "", thickness(0), isShort(s, "link"));
  const use = isKnown(link.use_ratio) ? ` · ${pct(link.use_ratio)} of link` : "";
  const waiting = link.waiting > 3 ? `${num(link.waiting)} wait ${time(link.mean_wait_s)}` : "";
  const overlapped = link.overlapped_ratio ? `${pct(link.overlapped_ratio)} overlapped` : "";
  const more = [esc(link.transport), `${num(link.handoffs_per_s)} hand-offs/s`, waiting || overlapped];
  return edge(`${si(s.flow.kv_bytes_per_s, "B/s")}${use}`, more.filter(Boolean).join(" · "),
    thickness(link.use_ratio), isShort(s, "link"));
}

function linkNote(link) {
  const use = isKnown(link.use_ratio) ? `, ${pct(link.use_ratio)} of the link` : "";
  const fastest = isKnown(link.fastest_bytes_per_s)
    ? ` The fastest hand-off so far had ${si(link.fastest_bytes_per_s, "B/s")}.` : "";
  const why = link.why ? ` Why ${esc(link.transport)}: ${esc(link.why)}.` : "";
  return `By ${esc(link.transport)}: ${si(link.bytes_per_s, "B/s")}${use}.${fastest}${why} Failed `
    + `${num(link.failed_per_s)}/s, leases expired ${num(link.expired_per_s)}/s.`;
}
