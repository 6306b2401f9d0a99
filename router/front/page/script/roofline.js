/* The roofline of one worker: measured roof and ridge, a point for each worker and kind of step with its trail of
   minutes, and a tick where decode would meet its TPOT SLO exactly. Both axes are logarithmic. */

const BINDS_FROM = 0.5; // of a peak: from here on a resource binds

function drawRoofline(s) {
  const box = $("plot");
  if (!box.clientWidth || !box.clientHeight) return;
  const peak = {
    flops: Math.max(0, ...s.pools.map(each => each.peak_flops_per_s).filter(isKnown)),
    bytes: Math.max(0, ...s.pools.map(each => each.peak_bytes_per_s).filter(isKnown)),
  };
  if (!peak.flops || !peak.bytes) {
    patch(box, `<p class="m">The peaks of this hardware are not known: <code>ridgeline roofline</code> measures
      them.</p>`);
    return;
  }
  const points = pointsOf(s);
  const plot = new Plot(box, peak, points);
  const label = `Roofline: a roof of ${si(peak.flops, "FLOP/s")} and ${si(peak.bytes, "B/s")}; the table below has `
    + "each worker's point";
  const drawn = seriesOf(s, points).map(each => series(plot, each));
  const parts = [grid(plot), roof(plot, sourceOf(s.pools)), ...drawn];
  const labels = plot.late.map(draw => draw()).join("");
  const idle = points.length ? "" : plot.text("no steps lately", plot.x(plot.ridge), plot.bottom - 2.2 * plot.rem,
    'class="i" text-anchor="middle"');
  patch(box, `<svg width="${plot.width}" height="${plot.height}" viewBox="0 0 ${plot.width} ${plot.height}" role="img" `
    + `aria-label="${esc(label)}">${parts.join("")}${labels}${idle}</svg>`);
  if ($("rooftable").parentElement.open) drawRooflineTable(points);
}

/* Those that logarithms can show. */
function pointsOf(s) {
  const isDrawn = steps => steps.intensity > 0 && steps.flops_per_s > 0;
  return s.pools.flatMap(pool => pool.workers.flatMap(worker => worker.steps.filter(isDrawn).map(steps =>
    ({pool, worker, steps: {...steps, trail: (steps.trail ?? []).filter(([x, y]) => x > 0 && y > 0)}}))));
}

/* One series for each pool and kind of step. */
function seriesOf(s, points) {
  return s.pools.flatMap(pool => {
    const own = points.filter(each => each.pool === pool);
    const kinds = [...new Set(own.map(each => each.steps.step))];
    return kinds.map(step => ({pool, step, points: own.filter(each => each.steps.step === step)}));
  });
}

/* Where things are, in pixels; and labels, which are placed when all points have been, where no other one is. */
class Plot {
  constructor(box, peak, points) {
    this.rem = rem();
    this.width = box.clientWidth;
    this.height = box.clientHeight;
    this.isNarrow = this.width < 32 * this.rem;
    this.isCrowded = points.length > 12;
    this.peak = peak;
    this.ridge = peak.flops / peak.bytes;
    const shown = points.flatMap(({steps}) => [[steps.intensity, steps.flops_per_s], ...steps.trail]);
    const intensities = [...shown.map(([intensity]) => intensity), this.ridge, 8, this.ridge * 12];
    this.x0 = Math.log10(Math.min(...intensities) / 1.7);
    this.x1 = Math.log10(Math.max(...intensities) * 1.5);
    this.y0 = Math.log10(Math.min(...shown.map(([, flops]) => flops), peak.flops / 60) / 4);
    this.y1 = Math.log10(peak.flops * 2.1);
    this.left = 3.6 * this.rem;
    this.right = this.width - 0.6 * this.rem;
    this.top = 0.4 * this.rem;
    this.bottom = this.height - 2.5 * this.rem;
    this.taken = [[this.left, this.bottom - 1.4 * this.rem, (this.isNarrow ? 8 : 19) * this.rem, 1.4 * this.rem]];
    this.late = [];
  }

  x(intensity) {
    return this.left + ((Math.log10(intensity) - this.x0) / (this.x1 - this.x0)) * (this.right - this.left);
  }

  y(flops) {
    return this.bottom - ((Math.log10(flops) - this.y0) / (this.y1 - this.y0)) * (this.bottom - this.top);
  }

  at(intensity, flops) {
    return `${this.x(intensity).toFixed(1)} ${this.y(flops).toFixed(1)}`;
  }

  /* The slope of the bandwidth's roof on the screen, in degrees. */
  get slope() {
    return (Math.atan2(this.y(10) - this.y(1), this.x(10) - this.x(1)) * 180) / Math.PI;
  }

  text(words, x, y, attributes) {
    return `<text x="${x.toFixed(1)}" y="${y.toFixed(1)}" ${attributes ?? ""}>${esc(words)}</text>`;
  }

  /* Text of some lines, the first one bold, under the roof; it moves down to where no other one is. */
  label(x, y, lines) {
    const line = 1.15 * this.rem;
    const wide = Math.max(...lines.map(each => each.length)) * 0.44 * this.rem; // a character, on average
    const tall = lines.length * line;
    const left = Math.max(this.left, Math.min(x, this.right - wide));
    const intensity = 10 ** (this.x0 + ((left - this.left) / (this.right - this.left)) * (this.x1 - this.x0));
    const roof = this.y(Math.min(this.peak.flops, this.peak.bytes * intensity));
    let top = Math.max(y, roof + 1.25 * this.rem) - this.rem;
    for (let tries = 0; tries < 8; tries++) {
      const hit = this.taken.find(([x2, y2, wide2, tall2]) =>
        left < x2 + wide2 && left + wide > x2 && top < y2 + tall2 && top + tall > y2);
      if (!hit) break;
      top = hit[1] + hit[3];
    }
    top = Math.min(top, this.bottom - 1.3 * this.rem - tall);
    this.taken.push([left, top, wide, tall]);
    return lines.map((each, i) =>
      this.text(each, left, top + this.rem + i * line, i ? "" : 'class="i"')).join("");
  }
}

function grid(plot) {
  const {left, right, top, bottom, rem: em} = plot;
  const parts = [];
  for (let power = Math.ceil(plot.x0); power <= plot.x1; power++) {
    const x = plot.x(10 ** power);
    parts.push(`<path d="M${x.toFixed(1)} ${top}V${bottom}" stroke="var(--line)"/>`);
    parts.push(plot.text((10 ** power).toLocaleString("en"), x, bottom + 1.05 * em, 'text-anchor="middle"'));
  }
  for (let power = Math.ceil(plot.y0); power <= plot.y1; power++) {
    const y = plot.y(10 ** power);
    parts.push(`<path d="M${left} ${y.toFixed(1)}H${right}" stroke="var(--line)"/>`);
    parts.push(plot.text(si(10 ** power, "").replace(NB, ""), left - 0.4 * em, y + 0.28 * em, 'text-anchor="end"'));
  }
  parts.push(plot.text("FLOP/s", left - 0.4 * em, top + 0.3 * em, 'text-anchor="end"'));
  parts.push(plot.text("arithmetic intensity, FLOP per byte moved", (left + right) / 2, bottom + 2.2 * em,
    'text-anchor="middle"'));
  return parts.join("");
}

/* Whether peaks were measured, in a word; else the source says more than the plot has room for. */
function sourceOf(pools) {
  return pools.every(each => each.peaks_source?.startsWith("measured")) ? "measured" : "by data sheet";
}

/* The roof, the dashed line above which a resource binds, and the ridge, each with its name. */
function roof(plot, source) {
  const {peak, ridge, left, right, top, bottom, rem: em} = plot;
  const begin = Math.max(10 ** plot.x0, 10 ** plot.y0 / peak.bytes); // where the roof enters the plot
  const line = share => {
    const from = Math.max(10 ** plot.x0, 10 ** plot.y0 / (peak.bytes * share));
    return `M${plot.at(from, from * peak.bytes * share)}L${plot.at(ridge, peak.flops * share)}H${right}`;
  };
  const [ridgeX, ceiling] = [plot.x(ridge), plot.y(peak.flops)];
  const middle = Math.sqrt(begin * ridge);
  const turn = `translate(${plot.x(middle).toFixed(1)} ${(plot.y(middle * peak.bytes) - 0.55 * em).toFixed(1)}) `
    + `rotate(${plot.slope.toFixed(1)})`;
  const dashed = Math.max(left, plot.x(10 ** plot.y0 / (peak.bytes * BINDS_FROM)));
  return [
    `<path d="${line(1)}V${top}H${left}V${plot.y(begin * peak.bytes).toFixed(1)}Z" fill="var(--track)" opacity=".45"/>`,
    `<path d="M${ridgeX.toFixed(1)} ${ceiling.toFixed(1)}V${bottom}" stroke="var(--muted)" stroke-dasharray="2 4"/>`,
    `<path d="${line(BINDS_FROM)}" fill="none" stroke="var(--muted)" stroke-dasharray="6 5"/>`,
    `<path d="${line(1)}" fill="none" stroke="var(--roof)" stroke-width="2.2" stroke-linejoin="round"/>`,
    `<text class="i" transform="${turn}" text-anchor="middle">${si(peak.bytes, "B/s")} ${source}</text>`,
    plot.text(`${si(peak.flops, "FLOP/s")} ${source}`, right - 0.2 * em, ceiling - 0.5 * em,
      'class="i" text-anchor="end"'),
    plot.isNarrow ? plot.text(`ridge ${num(ridge)}`, ridgeX + 0.4 * em, bottom - 0.4 * em)
      : plot.text(`ridge ${num(ridge)}`, ridgeX - 0.2 * em, ceiling - 0.5 * em, 'text-anchor="end"'),
    plot.text(plot.isNarrow ? "binds above" : "a resource binds above the dashed line", dashed + 2.2 * em,
      bottom - 0.45 * em),
  ].join("");
}

/* The points of one pool and kind of step, with trails, the TPOT tick, and one label for all. */
function series(plot, {pool, step, points}) {
  const colour = {prefill: "var(--prefill)", decode: "var(--decode)"}[step] ?? "var(--roof)";
  const parts = points.map(each => trail(plot, each.steps, colour));
  if (pool.slo_point?.intensity > 0 && step === "decode") parts.push(sloTick(plot, pool.slo_point));
  for (const each of points) parts.push(point(plot, each, colour));
  const mean = name => Math.exp(meanOf(points, ({steps}) => Math.log(steps[name])));
  const [flops, bytes] = [mean("flops_per_s") / pool.peak_flops_per_s, mean("bytes_per_s") / pool.peak_bytes_per_s];
  const more = flops >= bytes ? "compute" : "memory";
  const binds = Math.max(flops, bytes) >= BINDS_FROM ? `${more} binds` : "neither binds";
  const share = flops >= bytes ? `${pct(flops)} of peak FLOP/s` : `${pct(bytes)} of peak B/s`;
  const lowest = Math.max(...points.map(({steps}) => plot.y(steps.flops_per_s)));
  const intensity = `${num(mean("intensity"))} FLOP/byte`;
  plot.late.push(() => plot.label(plot.x(mean("intensity")), lowest + 1.7 * plot.rem, [
    `${step}${step === "mixed" ? " steps" : ""}: ${binds}`,
    plot.isNarrow ? intensity : `${intensity} · ${share}`,
  ]));
  return parts.join("");
}

function trail(plot, steps, colour) {
  if (!steps.trail.length) return "";
  const path = [...steps.trail, [steps.intensity, steps.flops_per_s]].map(([x, y]) => plot.at(x, y)).join("L");
  const dots = steps.trail.map(([x, y], i) => {
    const age = (i + 1) / steps.trail.length; // older minutes are smaller and fainter
    const size = (0.1 + 0.09 * age) * plot.rem;
    return `<circle cx="${plot.x(x).toFixed(1)}" cy="${plot.y(y).toFixed(1)}" r="${size.toFixed(1)}" `
      + `fill="${colour}" opacity="${(0.25 + 0.5 * age).toFixed(2)}"/>`;
  });
  return `<path d="M${path}" fill="none" stroke="${colour}" stroke-width="1.4" opacity=".65"/>${dots.join("")}`;
}

function sloTick(plot, slo) {
  const [x, y] = [plot.x(slo.intensity), plot.y(slo.flops_per_s)];
  const across = ((plot.slope + 90) * Math.PI) / 180;
  const [dx, dy] = [Math.cos(across) * 0.75 * plot.rem, Math.sin(across) * 0.75 * plot.rem];
  plot.late.unshift(() =>
    plot.label(x + dx + 0.5 * plot.rem, y + dy + 0.45 * plot.rem, [`TPOT limit: batch ${num(slo.batch)}`]));
  return `<path d="M${(x - dx).toFixed(1)} ${(y - dy).toFixed(1)}L${(x + dx).toFixed(1)} ${(y + dy).toFixed(1)}" `
    + 'stroke="var(--ink)" stroke-width="3"/>';
}

function point(plot, {worker, pool, steps}, colour) {
  const [x, y] = [plot.x(steps.intensity), plot.y(steps.flops_per_s)];
  const size = (plot.isCrowded ? 0.3 : 0.46) * plot.rem;
  const tip = `${worker.id} (${pool.pool}), ${steps.step} steps: ${num(steps.intensity)} FLOP/byte, `
    + `${si(steps.flops_per_s, "FLOP/s")}, ${si(steps.bytes_per_s, "B/s")}, ${time(steps.seconds)} each, `
    + `${pct(steps.busy_ratio)} of the time`;
  return `<g data-tip="${esc(tip)}">${marker(steps.step, x, y, size, colour)}</g>`;
}

function marker(step, x, y, size, colour) {
  const look = `fill="${colour}" stroke="var(--card)" stroke-width="1.5"`;
  const path = (from, ...to) => {
    const lines = to.map(([dx, dy]) => `l${(dx * size).toFixed(1)} ${(dy * size).toFixed(1)}`).join("");
    return `<path d="M${x.toFixed(1)} ${(y - from * size).toFixed(1)}${lines}Z" ${look}/>`;
  };
  if (step === "prefill") return path(1.15, [1.1, 1.95], [-2.2, 0]);
  if (step === "mixed") return path(1.2, [1.2, 1.2], [-1.2, 1.2], [-1.2, -1.2]);
  return `<circle cx="${x.toFixed(1)}" cy="${y.toFixed(1)}" r="${size.toFixed(1)}" ${look}/>`;
}

function drawRooflineTable(points) {
  const head = ["worker", "FLOP/byte", "FLOP/s", "B/s", "busy"].map(each => `<th>${each}</th>`).join("");
  const rows = points.map(({pool, worker, steps}) =>
    [`${esc(worker.id)} (${esc(pool.pool)}), ${esc(steps.step)}`, num(steps.intensity), si(steps.flops_per_s, ""),
      si(steps.bytes_per_s, ""), pct(steps.busy_ratio)].map(each => `<td>${each}</td>`).join(""));
  patch($("rooftable"), `<thead><tr>${head}</tr></thead><tbody><tr>${rows.join("</tr><tr>")}</tr></tbody>`);
}
