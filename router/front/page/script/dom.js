/* Changes parts of the document in place, and makes the pieces that several of them have. */

const $ = id => document.getElementById(id);

const rem = () => parseFloat(getComputedStyle(document.documentElement).fontSize);

/* Makes a part of the page equal to this HTML. What stays the same stays the same node, so that focus, hover and
   transitions survive an event each two seconds. */
function patch(element, html) {
  if (element.shownHtml === html) return;
  element.shownHtml = html;
  const template = document.createElement("template");
  template.innerHTML = html;
  morph(element, template.content);
  for (const styled of element.querySelectorAll("[data-style]")) applyStyle(styled);
}

/* The page's Content-Security-Policy refuses style attributes, in HTML as well; a script may set each property. */
function applyStyle(element) {
  if (element.shownStyle === element.dataset.style) return;
  element.shownStyle = element.style.cssText = element.dataset.style;
}

function morph(shown, wanted) {
  const fresh = [...wanted.childNodes];
  const kept = new Set(fresh.map(keyOf));
  for (const node of [...shown.childNodes]) {
    if (keyOf(node) && !kept.has(keyOf(node))) node.remove();
  }
  const keyed = new Map([...shown.childNodes].filter(keyOf).map(node => [keyOf(node), node]));
  fresh.forEach((node, i) => {
    const old = shown.childNodes[i];
    const same = keyOf(node) ? keyed.get(keyOf(node)) : old && keyOf(old) ? undefined : old;
    if (!same) return shown.insertBefore(node, old ?? null);
    if (same !== old) shown.insertBefore(same, old);
    return morphNode(shown, same, node);
  });
  [...shown.childNodes].slice(fresh.length).forEach(node => node.remove());
}

/* A request or a worker to choose is the same one, wherever it stands in its list. */
function keyOf(node) {
  return node.dataset?.req ?? (node.nodeName === "OPTION" ? node.value : undefined);
}

function morphNode(parent, old, node) {
  if (old.nodeType !== node.nodeType || old.nodeName !== node.nodeName) {
    parent.replaceChild(node, old);
  } else if (node.nodeType === Node.TEXT_NODE) {
    if (old.data !== node.data) old.data = node.data;
  } else if (node.nodeType === Node.ELEMENT_NODE) {
    for (const {name} of [...old.attributes]) {
      if (name !== "style" && !node.hasAttribute(name)) old.removeAttribute(name);
    }
    for (const {name, value} of node.attributes) {
      if (old.getAttribute(name) !== value) old.setAttribute(name, value);
    }
    morph(old, node);
  }
}

/* A pool's or a step's shape: colour is never the only difference. */
function glyph(pool) {
  const shapes = {
    prefill: '<path d="M6 .8 11.6 11H.4Z" fill="var(--prefill)"/>',
    decode: '<circle cx="6" cy="6" r="5.2" fill="var(--decode)"/>',
  };
  const mixed = '<path d="M6 .2 11.8 6 6 11.8 .2 6Z" fill="var(--roof)"/>';
  return `<svg class="glyph" viewBox="0 0 12 12" aria-hidden="true">${shapes[pool] ?? mixed}</svg>`;
}

/* A bar filled to this ratio, with a tick; one whose use is not known has neither. */
function bar(use, {tick, hot, pinned} = {}) {
  if (!isKnown(use)) return '<div class="bar unknown"></div>';
  const width = Math.min(100, use * 100).toFixed(1);
  const mark = tick ? `<u data-style="left:${(tick * 100).toFixed(1)}%"></u>` : "";
  const over = use > 1.005 ? '<span class="over" aria-hidden="true">»</span>' : "";
  const fill = `<i class="${pinned ? "pin" : ""}" data-style="width:${width}%"></i>`;
  return `<div class="bar ${hot ? "hot" : ""}">${fill}${mark}${over}</div>`;
}
