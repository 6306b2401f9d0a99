/* Figures as text. One that is not known, or no number, is an en dash. */

const NB = "\u00a0";
const UNKNOWN = "–";

const isKnown = x => typeof x === "number" && Number.isFinite(x);

function esc(text) {
  const entities = {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;"};
  return String(text ?? UNKNOWN).replace(/[&<>"]/g, character => entities[character]);
}

/* Three digits at most below 1,000, and no zeros that say nothing. */
function num(x) {
  if (!isKnown(x)) return UNKNOWN;
  if (x >= 1000) return Math.round(x).toLocaleString("en");
  if (x >= 100) return x.toFixed(0);
  if (x >= 10) return x.toFixed(x % 1 ? 1 : 0);
  return x === 0 ? "0" : x.toFixed(x % 1 ? 2 : 0).replace(/(\.\d)0$/, "$1");
}

/* A latency. The borders are where rounding would give 100.0 ms or 1000 ms. */
function time(s) {
  if (!isKnown(s)) return UNKNOWN;
  if (s < 0.0995) return `${+(s * 1e3).toFixed(1)}${NB}ms`;
  if (s < 0.9995) return `${Math.round(s * 1e3)}${NB}ms`;
  if (s < 100) return `${s.toFixed(s < 10 ? 2 : 1)}${NB}s`;
  return `${Math.round(s / 60)}${NB}min`;
}

/* How long ago, or for how long: one unit, up to a day. */
function span(s) {
  if (!isKnown(s)) return UNKNOWN;
  if (s < 90) return `${Math.round(s)}${NB}s`;
  if (s < 5400) return `${Math.round(s / 60)}${NB}min`;
  if (s < 129600) return `${Math.round(s / 3600)}${NB}h`;
  return `${Math.floor(s / 86400)}${NB}d ${Math.round((s % 86400) / 3600)}${NB}h`;
}

/* 99.96 % is not shown as 100: somebody missed an SLO. */
function pct(x) {
  if (!isKnown(x)) return UNKNOWN;
  const percents = x > 0.99 && x < 1 ? (Math.floor(x * 1000) / 10).toFixed(1) : Math.round(x * 100);
  return `${percents}${NB}%`;
}

function si(x, unit) {
  if (!isKnown(x)) return UNKNOWN;
  const power = x > 0 ? Math.min(5, Math.max(0, Math.floor(Math.log10(x) / 3))) : 0;
  const value = x / 1e3 ** power;
  const digits = value >= 100 ? value.toFixed(0) : value >= 10 ? +value.toFixed(1) : +value.toFixed(2);
  return `${digits}${NB}${["", "k", "M", "G", "T", "P"][power]}${unit}`;
}

const capital = word => (word ? word[0].toUpperCase() + word.slice(1) : UNKNOWN);

const plural = (count, one, many) => (count === 1 ? one : many);
