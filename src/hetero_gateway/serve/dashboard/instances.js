// The rows of instances: what troubles an operator first, dense enough for many.

import { ask, byId, figure, grouped, make, makeBar, percent, rate, seconds, setText, setWidth, times } from "./figures.js";

const rows = new Map(); // id -> the row's elements
const open = new Set(); // ids whose details are shown
let board = null;
let figureOf = {}; // name of a figure -> its place in a row

const value = (place, name) => board.rows[place][figureOf[name]];

// Somebody has wanted it so: it is no error.
const RESTS = new Set(["draining", "paused", "asleep"]);
export const STATES = ["down", "ejected", "draining", "paused", "asleep", "up"];
const FULL = 0.9;
const FAILING = 0.02;

/** How much an instance needs somebody's eyes; 0: not at all. Whole numbers, so that rows that are
 *  read do not change places for nothing. */
function trouble(place) {
  const instance = board.instances[place];
  const state = value(place, "state");
  if (state === "down") return 1000;
  if (state === "ejected") return 900;
  const errors = value(place, "errors");
  const slow = value(place, "slow");
  let score = 0;
  if (errors > FAILING) score += 300 + Math.round(errors * 10);
  if (slow !== null) score += 200 + Math.min(50, Math.round(slow));
  if (Math.max(value(place, "kv") ?? 0, value(place, "engine_kv") ?? 0) > FULL) score += 100;
  if (instance.why && state === "up") score += 80;
  if (instance.drifted) score += 40;
  if (RESTS.has(state)) score += 20;
  return score;
}

const SORTS = {
  trouble: (a, b) => trouble(b) - trouble(a),
  id: (a, b) => board.instances[a].id.localeCompare(board.instances[b].id, undefined, { numeric: true }),
  load: (a, b) => value(b, "load") - value(a, "load"),
  in_flight: (a, b) => value(b, "in_flight") - value(a, "in_flight"),
  kv: (a, b) => (value(b, "kv") ?? -1) - (value(a, "kv") ?? -1),
  tokens: (a, b) => value(b, "output_tokens_per_s") - value(a, "output_tokens_per_s"),
};

function cell(className, label, ...children) {
  return make("div", { className }, make("span", { className: "label" }, label), ...children);
}

function makeRow(id) {
  const parts = {};
  const span = (name, className) => (parts[name] = make("span", { className }));
  const bar = (name, kind) => {
    const made = makeBar(kind);
    parts[name] = made.fill;
    return made.bar;
  };
  parts.more = make("button", { type: "button", className: "more", title: `More of ${id}` }, "⋯");
  parts.more.setAttribute("aria-label", `More of ${id}`);
  parts.more.addEventListener("click", () => {
    if (!open.delete(id)) open.add(id);
    parts.asks = false;
    showInstances(board, figureOf);
  });
  parts.capacityMark = make("b", { className: "mark" });
  const shares = bar("shareBar", "traffic");
  shares.append(parts.capacityMark);
  parts.row = make("li", { className: "row" },
    make("div", { className: "who" },
      make("span", { className: "id", title: id }, id), span("state", "pill"), span("why", "note why")),
    cell("speed", "Speed", span("speed", "value")),
    cell("queue", "Queue", make("div", { className: "workload" }, bar("load", "")),
      span("inFlight", "value"), span("unseen", "note")),
    cell("kv", "KV cache", bar("kv", "estimated"), bar("engine", "engine"), span("kvValue", "value")),
    cell("tokens", "Tokens/s", span("tokens", "value")),
    cell("errors", "Failed", span("errors", "value")),
    cell("share", "Share", shares, span("share", "value")),
    parts.more, span("about", "note about"));
  parts.drain = make("button", { type: "button" });
  parts.weight = make("input", { type: "number", min: "0.001", max: "1000", step: "any", required: true });
  parts.told = make("span", { className: "note", role: "status" });
  const form = make("form", { className: "actions" }, parts.drain,
    make("label", {}, "Weight ", parts.weight), make("button", { type: "submit" }, "Set"), parts.told);
  parts.drain.addEventListener("click", () => drain(parts, id));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    change(parts, id, { weight: Number(parts.weight.value) });
  });
  parts.actions = form;
  parts.row.append(form);
  return parts;
}

/** What is left of its models if an instance no longer takes requests: [model, instances]. */
function leftWithout(id) {
  const gone = board.instances.findIndex((instance) => instance.id === id);
  const left = (board.instances[gone]?.models ?? []).map((model) => [model,
    board.instances.filter((instance, place) => place !== gone && value(place, "state") === "up" && instance.models.includes(model)).length]);
  return left.sort((a, b) => a[1] - b[1])[0] ?? null;
}

/** Drain or resume; the last but one of a model is drained by a second click. */
function drain(parts, id) {
  const wanted = parts.drain.dataset.to === "true";
  const [model, left] = (wanted ? leftWithout(id) : null) ?? ["", 2];
  if (left < 2 && !parts.asks) {
    parts.asks = true;
    setText(parts.drain, "Drain all the same");
    setText(parts.told, left ? `Only one other would take requests for ${model}.` : `Nobody would take requests for ${model}: clients get 503.`);
    return;
  }
  parts.asks = false;
  change(parts, id, { draining: wanted });
}

async function change(parts, id, fields) {
  setText(parts.told, "…");
  try {
    await ask(`instances/${encodeURIComponent(id)}`, {
      method: "PATCH", body: JSON.stringify(fields), headers: { "content-type": "application/json" },
    });
    setText(parts.told, "done");
  } catch (error) {
    setText(parts.told, `not done: ${error.message}`);
  }
}

/** What the scheduler takes the instance for. */
function profileText(instance, load) {
  const words = [instance.models.join(", ") || "models not known yet"];
  if (instance.part_of) words.push(instance.part_of);
  if (instance.profile === "unprofiled") words.push("unprofiled, by its observed speed");
  else words.push(instance.profile);
  if (instance.recalibrated && instance.profile !== "learned") words.push("recalibrated from traffic");
  if (instance.weight !== 1) words.push(`weight ${figure(instance.weight)}`);
  words.push(`load ${load}`);
  return words.join(" · ");
}

function showRow(parts, place, sums, top) {
  const instance = board.instances[place];
  const state = value(place, "state");
  parts.row.classList.toggle("off", state !== "up");
  // With nothing on it there is more to say of why than of figures.
  parts.row.classList.toggle("idle", (state === "down" || state === "ejected") && !value(place, "in_flight"));
  parts.row.classList.toggle("open", open.has(instance.id));
  if (parts.state.className !== `pill ${state}`) parts.state.className = `pill ${state}`;
  setText(parts.state, state);
  const whys = [instance.why, instance.drifted && state === "up" ? "profile drifted" : ""].filter(Boolean).join("; ");
  setText(parts.why, whys);
  parts.why.title = whys;
  parts.why.classList.toggle("rests", RESTS.has(state));
  const load = value(place, "load");
  const loadText = board.load_unit === "s" && load ? seconds(load) : figure(load);
  setText(parts.about, profileText(instance, loadText));
  parts.about.title = parts.about.textContent;
  const slow = value(place, "slow");
  setText(parts.speed, times(slow ?? value(place, "speed")));
  parts.speed.classList.toggle("bad", slow !== null);
  parts.speed.title = slow === null ? "Observed over modelled time of a step" : "Slow: its last seconds over what its profile has for them";
  setWidth(parts.load, top > 0 ? load / top : 0);
  parts.load.parentElement.title = `Load ${loadText}`;
  const unseen = value(place, "waiting_first_token");
  setText(parts.inFlight, grouped.format(value(place, "in_flight")));
  setText(parts.unseen, unseen ? `${grouped.format(unseen)} new` : "");
  const kv = value(place, "kv");
  const engine = value(place, "engine_kv");
  setWidth(parts.kv, kv);
  setWidth(parts.engine, engine);
  setText(parts.kvValue, percent(kv ?? engine));
  parts.kvValue.title = `Estimated ${percent(kv)}; its engine says ${percent(engine)}`;
  parts.kvValue.classList.toggle("bad", Math.max(kv ?? 0, engine ?? 0) > FULL);
  setText(parts.tokens, rate(value(place, "output_tokens_per_s")));
  const errors = value(place, "errors");
  setText(parts.errors, errors > 0 ? percent(errors) : "0");
  parts.errors.classList.toggle("bad", errors > FAILING);
  const sum = sums.get(instance.models.join("\n"));
  const traffic = sum.requests > 0 ? value(place, "requests_per_s") / sum.requests : null;
  const own = board.capacities[place] ?? 0;
  const capacity = sum.known && sum.capacity > 0 ? (state === "up" ? own / sum.capacity : 0) : null;
  const most = Math.max(sum.mostRequests / sum.requests || 0, sum.known ? sum.mostCapacity / sum.capacity || 0 : 0);
  setWidth(parts.shareBar, traffic / most);
  parts.capacityMark.hidden = !capacity;
  if (capacity) parts.capacityMark.style.left = `${((capacity / most) * 100).toFixed(1)}%`;
  setText(parts.share, `${percent(traffic)} of ${percent(capacity)}`);
  parts.share.title = "Of the last minute's requests, and of what those that take requests can do by their profiles"
    + (state === "up" || !sum.known ? "" : `; with it up, ${percent(own / (sum.capacity + own))}`);
  parts.more.setAttribute("aria-expanded", String(open.has(instance.id)));
  parts.actions.hidden = !open.has(instance.id);
  if (parts.asks !== true) setText(parts.drain, state === "draining" ? "Resume" : "Drain");
  parts.drain.dataset.to = String(state !== "draining");
  if (document.activeElement !== parts.weight) parts.weight.value = instance.weight;
}

/** Of the instances that serve the same models: their traffic, and what those that are up can do. */
function sumsOfModels() {
  const sums = new Map();
  board.instances.forEach((instance, place) => {
    const key = instance.models.join("\n");
    const sum = sums.get(key) ?? { requests: 0, capacity: 0, mostRequests: 0, mostCapacity: 0, known: true };
    sum.requests += value(place, "requests_per_s");
    sum.mostRequests = Math.max(sum.mostRequests, value(place, "requests_per_s"));
    if (value(place, "state") === "up") {
      sum.mostCapacity = Math.max(sum.mostCapacity, board.capacities[place] ?? 0);
      sum.capacity += board.capacities[place] ?? 0;
      sum.known &&= board.capacities[place] !== null;
    }
    sums.set(key, sum);
  });
  return sums;
}

export let wantedModel = "";

/** Show the instances of one model alone; "" for all. */
export function want(model) {
  wantedModel = model;
  showInstances(board, figureOf);
}

function isWanted(place) {
  const instance = board.instances[place];
  const which = byId("which").value;
  if (which === "up" && value(place, "state") !== "up") return false;
  if (which === "wrong" && trouble(place) === 0) return false;
  if (wantedModel && !instance.models.includes(wantedModel)) return false;
  const words = byId("filter").value.toLowerCase().trim();
  const text = [instance.id, instance.accelerator ?? "", instance.profile, ...instance.models].join(" ").toLowerCase();
  return words.split(/\s+/).every((word) => text.includes(word));
}

function groupOf(place, by) {
  const instance = board.instances[place];
  if (by === "model") return instance.models.join(", ") || "models not known yet";
  return by === "accelerator" ? instance.accelerator ?? "unprofiled" : "";
}

/** ``of``: the board; ``places``: where the figures of a row are. */
export function showInstances(of, places) {
  [board, figureOf] = [of, places];
  const list = byId("instances");
  const sums = sumsOfModels();
  const top = Math.max(0, ...board.rows.map((row) => row[figureOf.load]));
  const present = new Set(board.instances.map((instance) => instance.id));
  for (const [id, parts] of rows) {
    if (!present.has(id)) {
      parts.row.remove();
      rows.delete(id);
    }
  }
  const by = byId("group").value;
  const sort = SORTS[byId("sort").value];
  let wantedPlaces = board.instances.map((_, place) => place).filter(isWanted);
  if (sort) wantedPlaces = wantedPlaces.sort((a, b) => sort(a, b) || a - b);
  const groups = new Map();
  for (const place of wantedPlaces) {
    const name = groupOf(place, by);
    if (!groups.has(name)) groups.set(name, []);
    groups.get(name).push(place);
  }
  const wanted = [];
  for (const [name, members] of groups) {
    if (by) wanted.push(groupHead(name, members));
    for (const place of members) {
      const { id } = board.instances[place];
      if (!rows.has(id)) rows.set(id, makeRow(id));
      showRow(rows.get(id), place, sums, top);
      wanted.push(rows.get(id).row);
    }
  }
  const same = wanted.length === list.children.length && wanted.every((row, i) => row === list.children[i]);
  if (!same) list.replaceChildren(...wanted);
  byId("no-instances").hidden = board.instances.length > 0;
  const troubled = board.instances.filter((_, place) => trouble(place) > 0).length;
  const shown = wantedPlaces.length === board.instances.length ? "" : `${wantedPlaces.length} of ${board.instances.length} shown`;
  setText(byId("shown-count"), [troubled ? `${grouped.format(troubled)} need a look` : "", shown, wantedModel].filter(Boolean).join(" · "));
}

const heads = new Map(); // group -> its <li>

function groupHead(name, members) {
  if (!heads.has(name)) {
    heads.set(name, make("li", { className: "group" }, make("b", {}, name), make("span", { className: "note" })));
  }
  const head = heads.get(name);
  const up = members.filter((place) => value(place, "state") === "up").length;
  const sum = (column) => members.reduce((total, place) => total + value(place, column), 0);
  setText(head.lastChild,
    `${up} of ${members.length} up, ${grouped.format(sum("in_flight"))} in flight, ${rate(sum("output_tokens_per_s"))} tokens/s`);
  return head;
}

for (const id of ["filter", "which", "group", "sort"]) {
  byId(id).addEventListener("input", () => board && showInstances(board, figureOf));
}
