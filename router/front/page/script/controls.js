/* What an operator can do here. Every change asks first, names the command that does the same, and what to expect. */

const NONE_LOST = "No request is lost.";
const CAN_BE_CANCELLED = `${NONE_LOST} It can be cancelled while it runs.`;
const EXPECTED_OF = {
  colocated: "no KV is moved; prompts and tokens share each worker, so ITL may grow",
  disaggregated: "prompts and tokens have workers of their own; KV moves between them",
  adaptive: "any worker may do either phase, as is predicted to be faster for each request",
};

function drawControls(s) {
  patch($("controls"), modeControl(s) + scaleControl(s) + leaveControl(s));
  const done = view.done ? [`<li>${esc(view.done)}</li>`] : [];
  const operations = [...done, ...s.operations.map(operation)];
  patch($("ops"), operations.join("") || '<li class="m">No operation since the start.</li>');
}

function modeControl({deployment: d}) {
  const button = mode => (mode === d.mode
    ? `<button class="k" aria-pressed="true" disabled>● ${esc(mode)}</button>`
    : `<button class="k" data-act="mode" data-arg="${esc(mode)}" aria-pressed="false">${esc(mode)}…</button>`);
  const modes = d.modes.includes(d.mode) || !d.mode ? d.modes : [d.mode, ...d.modes];
  return `<fieldset><legend>Mode</legend><div class="row">${modes.map(button).join("")}</div>
    <p class="s m">${NONE_LOST}</p></fieldset>`;
}

/* The number of workers that the reader wants, or else those that are wanted now. */
const wantedOf = p => view.wanted[p.pool] ?? p.workers_wanted ?? p.workers.length;

const changedPools = s => s.pools.filter(each => wantedOf(each) !== (each.workers_wanted ?? each.workers.length));

function scaleControl(s) {
  const button = (act, pool, sign, word) =>
    `<button class="k" data-act="${act}" data-arg="${pool}" aria-label="one ${pool} worker ${word}">${sign}</button>`;
  const pools = s.pools.map(p => {
    const pool = esc(p.pool);
    return `<span class="nw">${glyph(p.pool)}${pool} ${button("less", pool, "−", "less")}
      <span class="num">${num(wantedOf(p))}</span> ${button("more", pool, "+", "more")}</span>`;
  });
  return `<fieldset><legend>Scale</legend><div class="row">${pools.join("")}
    <button class="k" data-act="scale" ${changedPools(s).length ? "" : "disabled"}>Scale…</button>
    </div></fieldset>`;
}

function leaveControl(s) {
  const option = (worker, pool) => `<option value="${esc(worker.id)}">${esc(worker.id)} (${esc(pool.pool)})</option>`;
  const options = s.pools.flatMap(pool => pool.workers.map(worker => option(worker, pool)));
  const off = options.length ? "" : "disabled";
  return `<fieldset><legend>Drain or restart</legend><div class="row">
    <select class="k" id="which" aria-label="worker" ${off}>${options.join("")}</select>
    <button class="k" data-act="drain" ${off}>Drain…</button>
    <button class="k" data-act="restart" ${off}>Restart all…</button>
    </div><p class="s m">Its streams move after at most 30${NB}s.</p></fieldset>`;
}

function operation(o) {
  const cancel = o.running ? ' <button class="k" data-act="cancel">Cancel it…</button>' : "";
  return `<li>${esc(o.text)}${cancel}</li>`;
}

function countWanted(pool, change) {
  const p = view.shown.pools.find(each => each.pool === pool);
  if (!p) return;
  view.wanted[pool] = Math.max(1, wantedOf(p) + change);
  drawControls(view.shown);
}

const post = (path, body) => ({method: "POST", path, body});

function askMode(mode) {
  ask({
    title: `Change mode to ${mode}`, command: `ridgeline mode ${mode}`, expect: EXPECTED_OF[mode],
    meanwhile: NONE_LOST, request: post("mode", {mode}),
  });
}

function askScale() {
  const pools = changedPools(view.shown);
  const words = pools.map(each => `${each.pool}=${wantedOf(each)}`);
  ask({
    title: `Scale to ${pools.map(each => `${wantedOf(each)} ${each.pool}`).join(", ")}`,
    command: `ridgeline scale ${words.join(" ")}`, meanwhile: CAN_BE_CANCELLED,
    expect: "new workers serve once they have started; leaving ones finish or hand over their streams",
    request: post("scale", {workers: Object.fromEntries(pools.map(each => [each.pool, wantedOf(each)]))}),
  });
}

function askDrain(worker) {
  ask({
    title: `Drain ${worker}`, command: `ridgeline drain ${worker}`, meanwhile: NONE_LOST,
    expect: "it takes no new request and leaves for good; its streams move after at most 30 s",
    request: post("drain", {worker}),
  });
}

function askRestart() {
  ask({
    title: "Restart all workers, one after another", command: "ridgeline restart", meanwhile: CAN_BE_CANCELLED,
    expect: "one worker at a time is away", request: post("restart", {}),
  });
}

function askCancel() {
  ask({
    title: "Cancel the operation", command: "ridgeline scale --cancel",
    expect: "what it has done so far stays", request: {method: "DELETE", path: "operation"},
  });
}

/* The action that the sentence advises; one that the page cannot do shows its command. */
function askAdvised({label, command, expect, live, do: act, args = {}}) {
  const requests = {
    mode: () => post("mode", {mode: args.mode}),
    scale: () => post("scale", {workers: args}),
  };
  const request = live ? requests[act]?.() : undefined;
  const meanwhile = request && (act === "scale" ? CAN_BE_CANCELLED : NONE_LOST);
  ask({title: label.replace("…", ""), command, expect, request, meanwhile});
}

function ask({title, command, expect, meanwhile, request}) {
  const entry = (name, html) => (html ? `<dt>${name}</dt><dd>${html}</dd>` : "");
  const dialog = $("ask");
  const yes = request ? `<button class="k main" value="yes">${esc(title)}</button>`
    : '<button class="k main" value="copy">Copy command</button>';
  dialog.innerHTML = `<h2 id="asktitle">${esc(title)}</h2><dl>${entry("Expected", expect && esc(expect))}
    ${entry("The same in a terminal", command && `<code>${esc(command)}</code>`)}
    ${entry("Meanwhile", meanwhile && esc(meanwhile))}</dl><p class="refusal" role="alert" hidden></p>
    <div class="row"><button class="k" value="no">${request ? "Cancel" : "Close"}</button>${yes}</div>`;
  dialog.setAttribute("aria-labelledby", "asktitle");
  dialog.onclick = ({target}) => {
    if (target.value === "yes") confirmed(dialog, target, {title, request});
    else if (target.value === "copy") copy(dialog.querySelector("code"), target);
    else if (target.value === "no") dialog.close();
  };
  dialog.showModal();
}

/* A refusal stays in the dialog, in the router's own words; without one, or once it is closed, below the controls. */
async function confirmed(dialog, button, {title, request}) {
  button.disabled = true;
  button.textContent = "Waiting for the router…";
  const refusal = await send(request);
  const isAsking = dialog.open && button.isConnected;
  if (refusal === null) view.wanted = {};
  if (refusal === null || !isAsking) {
    view.done = `${new Date().toLocaleTimeString("en-GB")}: ${title}: ${refusal ?? "the router has accepted it."}`;
    speak(view.done);
    if (view.shown) drawControls(view.shown);
    if (isAsking) dialog.close();
    return;
  }
  const shown = dialog.querySelector(".refusal");
  shown.textContent = refusal;
  shown.hidden = false;
  button.remove();
  const close = dialog.querySelector("button");
  close.textContent = "Close";
  close.focus();
}

/* Without HTTPS a browser gives a page no clipboard: the command is then selected, ready to be copied by hand. */
async function copy(code, button) {
  getSelection().selectAllChildren(code);
  try {
    await navigator.clipboard.writeText(code.textContent);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Selected: press Ctrl+C";
  }
}

/* Returns why not, or null once it is accepted. */
async function send({method, path, body}) {
  const json = body === undefined ? {} : {"content-type": "application/json"};
  try {
    const reply = await fetch(`ridgeline/${path}`, {
      method, headers: {...authorization(), ...json}, body: body === undefined ? undefined : JSON.stringify(body),
    });
    return reply.ok ? null : await refusalOf(reply);
  } catch (error) {
    return `The router did not answer (${error.message}): look at the figures whether it has begun.`;
  }
}
