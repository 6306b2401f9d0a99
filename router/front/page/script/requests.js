/* The latest requests over both legs, and the one that is open: its stages, decision and hand-off. */

const MOST_ROWS = 10;
const CUT_PERCENT = 68; // up to decode's first step time is enlarged: hand-offs take milliseconds, decode seconds
const STAGES = {
  preprocess: "preprocess", queue: "queue in the router", dispatch: "dispatch", engine_queue: "queue in the engine",
  prefill: "prefill", handoff_wait: "hand-off wait", wire: "KV on the wire", decode_queue: "decode queue",
  decode: "decode", unreported: "not reported", lost: "on a lost worker",
};

/* While one is open the list stays as it is, so that it does not move under the reader. */
function drawRequests(s) {
  const rows = view.kept ?? latest(s.requests);
  if (view.open) view.kept = rows;
  patch($("gnote"), rows.length ? note(s, rows) : "");
  if (!rows.length) {
    patch($("gantt"), '<p class="m">No request has ended lately.</p>');
    patch($("open"), "");
    return;
  }
  const scale = scaleOf(rows);
  patch($("gantt"), `<div class="gr head" aria-hidden="true"><span>id<span class="long">, tokens</span></span>
    <span class="axis">${axis(scale)}</span><span><span class="long">TTFT, TPOT</span></span></div>
    ${rows.map(each => requestRow(each, scale, s.promise.slo.ttft_s)).join("")}`);
  const open = rows.find(each => each.id === view.open);
  patch($("open"), open ? openRequest(open, s)
    : '<p class="m">Choose a request to see its stages, decision and hand-off.</p>');
}

const hasMissed = r => r.ttft_ok === false || r.tpot_ok === false;
const isCutOff = r => (r.outcome ?? "finished") !== "finished";
const isBad = r => hasMissed(r) || isCutOff(r);

function latest(requests) {
  const age = r => r.ended_s_ago ?? 0;
  return [...requests].sort((a, b) => isBad(b) - isBad(a) || age(a) - age(b)).slice(0, MOST_ROWS);
}

function note(s, rows) {
  const of = isKnown(s.requests_shown_of) ? ` of ${num(s.requests_shown_of)}` : "";
  const enlarged = view.axis === "clock" ? "" : " Left of the gap: enlarged, up to decode's first step."
    + (s.promise.slo.ttft_s < scaleOf(rows).cut ? " Tick: TTFT SLO." : "");
  const held = view.open ? ' <button class="k" data-act="newest">Held while one is open: show newest</button>' : "";
  return `${rows.length}${of} in the last minute, those that missed an SLO first. Upper lane: prefill leg; `
    + `lower: decode leg.${enlarged}${held}`;
}

const endOf = stage => stage.start_s + stage.seconds;
const isTimed = stage => isKnown(stage.start_s) && isKnown(stage.seconds);
const timed = r => r.stages.filter(isTimed);
const lastEnd = r => Math.max(0, ...timed(r).map(endOf));

/* When decode began; of one that ended before, its end. */
function decodeStart(r) {
  const decode = timed(r).find(each => each.stage === "decode");
  return decode ? decode.start_s : lastEnd(r);
}

/* Seconds to percent of the lanes' width. */
function scaleOf(rows) {
  const oldest = Math.max(0.001, ...rows.map(each => each.arrived_s_ago).filter(isKnown));
  const cut = Math.max(0.001, ...rows.map(decodeStart)) * 1.1;
  const end = Math.max(cut * 1.01, ...rows.map(lastEnd));
  const isClock = view.axis === "clock";
  return {isClock, oldest, cut, end, x: isClock ? seconds => (100 * seconds) / oldest : broken(cut, end)};
}

function broken(cut, end) {
  return seconds => (seconds < cut ? (CUT_PERCENT * seconds) / cut
    : CUT_PERCENT + (100 - CUT_PERCENT) * Math.min(1, (seconds - cut) / (end - cut)));
}

function axis({isClock, oldest, cut, end}) {
  const mark = (left, text, side) => `<span class="${side ?? ""}" data-style="left:${left}%">${text}</span>`;
  if (isClock) return mark(0, `${time(oldest)} ago`) + mark(50, `${time(oldest / 2)} ago`) + mark(100, "now", "e");
  return mark(0, "arrival") + mark(CUT_PERCENT / 2, time(cut / 2)) + mark(CUT_PERCENT - 1, time(cut), "e")
    + mark(100, time(end), "e");
}

function segment(stage, x, from, classes) {
  const left = x(from + stage.start_s);
  const width = Math.max(0, x(from + endOf(stage)) - left);
  const style = `left:${left.toFixed(2)}%;width:${width.toFixed(2)}%`;
  return `<i class="st-${esc(stage.stage)} ${classes}" data-style="${style}"></i>`;
}

const tick = (left, classes) => `<u class="${classes ?? ""}" data-style="left:${left.toFixed(2)}%"></u>`;

/* The random part of an id, of which its first letters tell requests apart. */
const nameOf = id => id.replace(/^(chatcmpl|cmpl|resp|msg)[-_]/, "").slice(0, 6);

function requestRow(r, scale, slo_s) {
  const from = scale.isClock ? scale.oldest - (r.arrived_s_ago ?? scale.oldest) : 0;
  const lanes = timed(r).map(each => segment(each, scale.x, from, each.leg === "decode" ? "d" : "")).join("");
  const marks = scale.isClock ? "" : (slo_s < scale.cut ? tick(scale.x(slo_s)) : "") + tick(CUT_PERCENT, "gap");
  return `<button class="gr" aria-pressed="${r.id === view.open}" data-req="${esc(r.id)}">
    <span class="nw"><b>${esc(nameOf(r.id))}</b>
    <span class="m long">${num(r.prompt_tokens)}→${num(r.output_tokens)}</span></span>
    <span class="lanes">${lanes}${marks}</span><span class="nw">${verdictOn(r)}</span></button>`;
}

function verdictOn(r) {
  const missed = [r.ttft_ok === false && "TTFT", r.tpot_ok === false && "TPOT"].filter(Boolean);
  const words = [...(isCutOff(r) ? [r.outcome] : []), ...missed];
  if (words.length) return `<b class="missed">✕<span class="long"> ${esc(words.join(", "))}</span></b>`;
  const sign = r.ttft_ok || r.tpot_ok ? "✓" : ""; // without an SLO, none is kept
  return `${sign}<span class="long m"> ${time(r.ttft_s)}, ${time(r.tpot_s)}</span>`;
}

function openRequest(r, s) {
  const cut = Math.max(0.001, decodeStart(r) * 1.06);
  const x = broken(cut, Math.max(cut * 1.01, lastEnd(r)));
  const rows = r.stages.map(stage => {
    const where = {router: "router", prefill: r.prefill_worker}[stage.leg] ?? r.decode_worker;
    const lane = isTimed(stage) ? segment(stage, x, 0, "") : "";
    return `<tr><th scope="row">${esc(STAGES[stage.stage] ?? stage.stage)}</th><td class="m">${esc(where)}</td>
      <td class="n">${time(stage.seconds)}</td>
      <td class="z"><div class="zoom">${lane}${tick(CUT_PERCENT, "gap")}</div></td></tr>`;
  });
  const workers = r.prefill_worker === r.decode_worker ? `${esc(r.decode_worker)} alone`
    : `${esc(r.prefill_worker)} → ${esc(r.decode_worker)}`;
  return `<h3>${esc(r.id)}</h3><p class="s">${num(r.prompt_tokens)} tokens in, ${num(r.output_tokens)} out; ${workers};
    TTFT ${time(r.ttft_s)}${sign(r.ttft_ok)}, TPOT ${time(r.tpot_s)}${sign(r.tpot_ok)}</p>
    <table><tbody>${rows.join("")}</tbody></table>
    <p class="s">${reason(r, s)}${moved(r)}</p>${decision(r.decision)}
    <p class="s"><b>Hand-off:</b> ${handoff(r.handoff)}.</p>`;
}

const sign = kept => (kept === undefined ? "" : kept ? " ✓" : " ✕");

function reason(r, s) {
  const decode = timed(r).find(each => each.stage === "decode");
  const pace = decode?.seconds / Math.max(1, (r.output_tokens ?? 1) - 1);
  const [longest] = timed(r).filter(each => each.stage !== "decode" && each.stage !== "prefill")
    .sort((a, b) => b.seconds - a.seconds);
  const title = `<b>${hasMissed(r) ? "Why it missed" : "Longest wait"}:</b>`;
  if (r.tpot_ok === false && pace > s.promise.slo.tpot_s) {
    return `${title} decode took ${time(pace)} per token, TPOT allows ${time(s.promise.slo.tpot_s)}.`;
  }
  return longest ? `${title} ${esc(STAGES[longest.stage] ?? longest.stage)}, ${time(longest.seconds)}.` : "";
}

function moved(r) {
  if (!r.retries) return "";
  return ` It moved ${r.retries === 1 ? "once" : `${num(r.retries)} times`}.`;
}

function decision(d) {
  if (!d) return "";
  const predicted = isKnown(d.predicted_ttft_s) || isKnown(d.predicted_tpot_s)
    ? ` Predicted TTFT ${time(d.predicted_ttft_s)}, TPOT ${time(d.predicted_tpot_s)}.` : "";
  const placed = isKnown(d.placed_after_s) ? `, placed after ${time(d.placed_after_s)}` : "";
  const cached = isKnown(d.cached_tokens) ? ` ${num(d.cached_tokens)} tokens cached.` : "";
  return `<p class="s"><b>Decision:</b> ${esc(d.reason ?? d.policy)}${placed}.${predicted}${cached}</p>`;
}

function handoff(h) {
  if (!h) return "none";
  const moved = `${si(h.bytes, "B")} by ${esc(h.transport)}`;
  if (h.overlapped) return `${moved}, fetched during prefill; only the last ${time(h.wire_s)} were waited for`;
  const rate = isKnown(h.bytes_per_s) ? `, ${si(h.bytes_per_s, "B/s")}` : "";
  return `${moved}${rate}, waited ${time(h.wait_s)} first`;
}
