/* The promise: latencies against the SLOs, attainment and goodput, each with a line of the last 15 minutes. */

function drawPromise(s) {
  const {promise: p, history: h} = s;
  const {slo} = p;
  const tiles = [
    latencyTile(s, {title: "TTFT", name: "time to first token", quantiles: p.ttft_s, limit_s: slo.ttft_s,
      points: h.ttft_p90_s, shown: "p90"}),
    latencyTile(s, {title: "TPOT", name: "time per output token", quantiles: p.tpot_s, limit_s: slo.tpot_s,
      points: h.tpot_p90_s, shown: "p90"}),
    latencyTile(s, {title: "ITL", name: "inter-token latency", quantiles: p.itl_s, points: h.itl_p99_s, shown: "p99"}),
    attainmentTile(s),
    goodputTile(s),
  ];
  patch($("promise"), tiles.join(""));
}

function tile({title, name, mark, isUnknown, missed, big, small, more, line, wide}) {
  const classes = `card tile ${missed ? "miss" : ""} ${wide ? "wide" : ""}`;
  return `<li class="${classes}"><div class="t"><h2 title="${esc(name ?? title)}">${title}</h2>
    <span class="mark ${isUnknown ? "q" : ""}">${mark}</span></div>
    <div class="big">${big} <small>${small}</small></div><div class="s m nw">${more}</div>${line}</li>`;
}

function latencyTile(s, {title, name, quantiles, limit_s, points, shown}) {
  const value = quantiles?.[shown];
  const missed = value > limit_s;
  const kept = missed ? `✕ over ${time(limit_s)}` : `✓ within ${time(limit_s)}`;
  const wanted = isKnown(value) ? kept : `SLO ${time(limit_s)}`;
  const other = shown === "p99" ? "p90" : "p99";
  return tile({
    title, name, missed,
    mark: isKnown(limit_s) ? wanted : "no SLO",
    isUnknown: !isKnown(limit_s) || !isKnown(value),
    big: time(value),
    small: isKnown(value) ? shown : "",
    more: quantiles ? `p50${NB}${time(quantiles.p50)} · ${other}${NB}${time(quantiles[other])}` : "no requests yet",
    line: sparkline(points, {limit: limit_s, events: s.history.events, step_s: s.history.step_s}),
  });
}

function attainmentTile({promise: p, history: h}) {
  const goal = p.slo.goal_ratio;
  const hasSlo = isKnown(p.slo.ttft_s) || isKnown(p.slo.tpot_s) || isKnown(p.attainment_ratio);
  const missed = p.attainment_ratio < goal;
  const sign = !isKnown(p.attainment_ratio) ? "" : missed ? "✕ " : "✓ ";
  return tile({
    title: "SLO attainment", missed,
    mark: hasSlo ? `${sign}goal ${pct(goal)}` : "no SLO",
    isUnknown: !isKnown(p.attainment_ratio),
    big: pct(p.attainment_ratio),
    small: p.refused_per_s ? "of those not refused" : "",
    more: isKnown(p.attainment_ratio) ? `TTFT ${pct(p.ttft_attainment_ratio)} · TPOT ${pct(p.tpot_attainment_ratio)}`
      : hasSlo ? "no requests yet" : "set router.slo",
    line: sparkline(h.attainment_ratio, {
      limit: hasSlo ? goal : undefined, max: 1.02, events: h.events, step_s: h.step_s,
    }),
  });
}

function goodputTile({promise: p, history: h, flow}) {
  const [refused] = Object.entries(p.refused_by).sort((a, b) => b[1] - a[1]);
  const arrivals = (h.arrivals_per_s ?? []).filter(isKnown);
  const out = `${num(flow.output_tokens_per_s)} tokens/s out`;
  return tile({
    title: "Goodput", name: "requests within their SLOs", wide: true,
    missed: p.attainment_ratio < p.slo.goal_ratio,
    mark: `${num(p.failed_per_s)} failed/s`,
    isUnknown: true,
    big: num(p.goodput_per_s),
    small: `of ${num(p.sequences / p.window_s)} requests/s ended`,
    more: refused ? `<b>${num(refused[1])}/s refused (${esc(refused[0])})</b>` : out,
    line: sparkline(h.goodput_per_s, {
      max: Math.max(...arrivals, 0.001) * 1.15, beside: h.arrivals_per_s, events: h.events, step_s: h.step_s,
    }),
  });
}

/* A line of points, oldest first, with a dashed limit, a dotted line beside it, and a mark for each event. */
function sparkline(points = [], {limit, max, beside = [], events = [], step_s}) {
  const [width, height] = [300, 40];
  const values = points.filter(isKnown);
  const top = max ?? Math.max(...values, (limit ?? 0) * 1.25) * 1.06;
  const y = value => height - 3 - (value / (top || 1)) * (height - 7);
  const x = i => (i / Math.max(1, points.length - 1)) * width;
  const stroke = (path, style) => `<path d="${path}" fill="none" vector-effect="non-scaling-stroke" ${style}/>`;
  const dashes = (colour, pattern) => `stroke="var(${colour})" stroke-width="1.2" stroke-dasharray="${pattern}"`;
  const dot = 'stroke="var(--ink)" stroke-width="6" stroke-linecap="round"';
  const base = `<path d="M0 ${height - 0.5}H${width}" stroke="var(--line)"/>`;
  const last = points[points.length - 1];
  const drawn = !values.length ? [] : [
    isKnown(limit) ? stroke(`M0 ${y(limit)}H${width}`, dashes("--ink", "5 4")) : "",
    stroke(pathOf(beside, x, y), dashes("--muted", "2 2.5")),
    stroke(pathOf(points, x, y), 'stroke="var(--fill)" stroke-width="1.8"'),
    ...events.filter(each => each.s_ago <= (points.length - 1) * step_s).map(each =>
      stroke(`M${x(points.length - 1 - each.s_ago / step_s).toFixed(1)} 0V${height}`,
        `stroke="var(--short)" stroke-width="2" data-tip="${esc(each.text)} ${span(each.s_ago)} ago"`)),
    isKnown(last) ? stroke(`M${width} ${y(last)}h.01`, dot) : "",
  ];
  return `<svg class="spark" viewBox="0 0 ${width} ${height}" preserveAspectRatio="none" aria-hidden="true">
    ${base}${drawn.join("")}</svg>`;
}

/* The pen is lifted over points that are not known. */
function pathOf(points, x, y) {
  const drawn = points.map((value, i) =>
    (isKnown(value) ? `${isKnown(points[i - 1]) ? "L" : "M"}${x(i).toFixed(1)} ${y(value).toFixed(1)}` : ""));
  return drawn.join("") || "M0 0";
}
