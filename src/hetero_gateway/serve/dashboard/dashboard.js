// The live page. It reads /admin/events, a stream of what changes, and writes what it reads as text:
// ids, model names and reasons come from outside, so nothing here builds markup from a string (the
// page's Content-Security-Policy refuses it, too).

const RETRY_MS = 1000;
const RETRY_CLOSED_MS = 5000;
const REQUEST_TIMEOUT_MS = 5000;
const SILENCE_MS = 40_000; // the gateway says something every 15 s
const DECISIONS_EVERY_MS = 2000;
const DECISIONS = 30;
const FEW = 8; // of so many instances, models and profiles are shown without a click
const KEY_NAME = "hetero-gateway-admin-key";

const byId = (id) => document.getElementById(id);

/** An element with properties and children; strings become text nodes. */
function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Figures

const grouped = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

function figure(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  if (Math.abs(value) >= 1000) return grouped.format(value);
  const decimals = Math.max(0, 2 - Math.floor(Math.log10(Math.abs(value))));
  return value.toFixed(Math.min(decimals, 9));
}

function percent(value) {
  if (value === null || value === undefined) return "–";
  const hundredths = value * 100;
  return `${hundredths > 0 && hundredths < 10 ? hundredths.toFixed(1) : hundredths.toFixed(0)} %`;
}

function rate(value) {
  if (value === null || value === undefined) return "–";
  return value >= 100 ? grouped.format(value) : value === 0 ? "0" : String(Number(value.toPrecision(2)));
}

function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.995) return `${Number((value * 1000).toPrecision(2))} ms`; // above, it would be "1000 ms"
  return `${value >= 100 ? grouped.format(value) : Number(value.toPrecision(2))} s`;
}

const clock = new Intl.DateTimeFormat(undefined, { timeStyle: "medium", hour12: false });

// Talking to /admin

class Closed extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

function withKey(headers = {}) {
  const key = sessionStorage.getItem(KEY_NAME);
  return key ? { ...headers, authorization: `Bearer ${key}` } : headers;
}

/** Take up the key of a link that the gateway printed; it leaves the address at once. */
function takeKeyOfLink() {
  const [, key] = location.hash.match(/^#key=([\x21-\x7e]+)$/) ?? [];
  if (!key) return false;
  history.replaceState(null, "", location.pathname + location.search);
  sessionStorage.setItem(KEY_NAME, key);
  return true;
}

async function refusalOf(response) {
  const body = await response.json().catch(() => ({}));
  return new Closed(response.status, body.error?.message ?? `status ${response.status}`);
}

async function ask(path, options = {}) {
  const response = await fetch(`admin/${path}`, {
    ...options,
    headers: withKey(options.headers),
    cache: "no-store",
    signal: AbortSignal.timeout(REQUEST_TIMEOUT_MS),
  });
  if (!response.ok) throw await refusalOf(response);
  return response.json();
}

// What the gateway has said so far

let board = null; // the last "all", kept up to date
let figureOf = {}; // name of a figure -> its place in a row

function take(name, data) {
  if (name === "all") {
    board = data;
    figureOf = Object.fromEntries(data.columns.map((column, i) => [column, i]));
  } else if (board === null) {
    return;
  } else if (name === "rows") {
    for (const [place, ...row] of data.rows) board.rows[place] = row;
    for (const [place, instance] of Object.entries(data.instances)) board.instances[place] = instance;
  } else if (name === "capacities") {
    board.capacities = data;
  } else if (name === "head") {
    board.head = data;
  } else if (name === "trend") {
    const { point, ...trend } = data;
    board.trend = trend;
    board.points = [...board.points, ...point].slice(-180);
  }
}

const value = (place, name) => board.rows[place][figureOf[name]];

// The figures at the top

const TILES = [
  { name: "Requests/s", now: (f) => rate(f.requests_per_s), lines: [0] },
  { name: "Output tokens/s", now: (f) => rate(f.output_tokens_per_s), lines: [1] },
  { name: "TTFT p50, p99", now: (f) => pair(f.ttft_s), lines: [3, 2], title: "Time to first token" },
  { name: "TPOT p50, p99", now: (f) => pair(f.tpot_s), lines: [5, 4], title: "Time per output token after the first" },
  { name: "Errors", now: (f) => percent(f.errors), lines: [6], bad: (f) => f.errors > 0.05 },
  {
    name: "Waiting here", lines: [7],
    now: (f) => waitingText(f),
    all: (f) => `most ${grouped.format(f.queue.most)}`,
  },
];

function pair(found) {
  return found ? `${seconds(found[0])}, ${seconds(found[1])}` : "–";
}

/** The gateway's own queue; a policy that places at once has none. */
function waitingText() {
  const { waiting, oldest_wait_s: oldest } = board.head;
  if (waiting === null) return "no queue";
  return waiting ? `${grouped.format(waiting)}, for ${seconds(oldest)}` : "0";
}

const SVG = "http://www.w3.org/2000/svg";

function makeTile(tile) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 180 40");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  tile.paths = tile.lines.map((_, i) => {
    const path = document.createElementNS(SVG, "path");
    path.setAttribute("class", i ? "second" : "first");
    svg.append(path);
    return path;
  });
  tile.value = make("p", { className: "now" });
  tile.average = make("p", { className: "note" });
  byId("figures").append(make("div", { className: "tile" },
    make("h3", { title: tile.title ?? "" }, tile.name),
    tile.value, make("div", { className: "spark" }, svg), tile.average));
}

function drawLine(path, points, column, top) {
  let drawn = "";
  let began = false;
  points.forEach((point, i) => {
    if (point[column] === null) {
      began = false;
      return;
    }
    const x = 180 - points.length + i + 0.5;
    const y = 38 - (top > 0 ? point[column] / top : 0) * 36;
    drawn += `${began ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}${began ? "" : "h.01"}`;
    began = true;
  });
  path.setAttribute("d", drawn);
}

function showFigures() {
  const { now, all } = board.trend;
  for (const tile of TILES) {
    if (!tile.value) makeTile(tile);
    setText(tile.value, tile.now(now));
    tile.value.classList.toggle("bad", tile.bad?.(now) === true);
    setText(tile.average, `15 min: ${(tile.all ?? tile.now)(all)}`);
    const top = Math.max(0, ...board.points.flatMap((point) => tile.lines.map((line) => point[line] ?? 0)));
    tile.lines.forEach((line, i) => drawLine(tile.paths[i], board.points, line, top));
  }
}

function showSummary() {
  const counts = {};
  for (const row of board.rows) counts[row[figureOf.state]] = (counts[row[figureOf.state]] ?? 0) + 1;
  const ready = counts.up ?? 0;
  const total = board.rows.length;
  const others = Object.keys(ORDER).filter((state) => state !== "up" && counts[state]);
  const { in_flight: inFlight, sharing, alarms } = board.head;
  const shown = [
    ["Taking requests", `${ready} of ${total}`],
    ["In flight", grouped.format(inFlight)],
    ...(sharing ? [["Other gateways", `${grouped.format(sharing.other_replicas)}, view ${sharing.mode}`]] : []),
  ];
  const summary = byId("summary");
  if (summary.children.length !== shown.length) {
    summary.replaceChildren(...shown.map(([name]) => make("div", {}, make("dt", {}, name), make("dd"))));
    summary.firstChild.append(make("dd", { id: "resting", className: "note" }));
  }
  shown.forEach(([, text], i) => setText(summary.children[i].querySelector("dd"), text));
  setText(byId("resting"), others.map((state) => `${grouped.format(counts[state])} ${state}`).join(", "));
  const bad = alarms.filter((alarm) => alarm.severity === "bad").length;
  document.title = `${bad ? `⚠ ${bad} · ` : ""}${ready}/${total} up · hetero-gateway`;
  const list = byId("alarms");
  const texts = alarms.map((alarm) => alarm.severity + alarm.text).join("\n");
  if (list.dataset.texts !== texts) {
    list.dataset.texts = texts;
    list.replaceChildren(...alarms.map((alarm) => make("li", { className: alarm.severity }, alarm.text)));
  }
}

// Batches

function time(unixSeconds) {
  return unixSeconds === null ? "–" : new Date(unixSeconds * 1000).toLocaleString();
}

function showBatches() {
  const { batches } = board.head;
  byId("batches-panel").hidden = !batches?.length;
  byId("batches").replaceChildren(...(batches ?? []).slice(0, 50).map((batch) => make("tr", {},
    make("th", { scope: "row" }, batch.id),
    make("td", {}, batch.client || "–"),
    make("td", {}, `${grouped.format(batch.done)} of ${grouped.format(batch.lines)}, ${percent(batch.done / batch.lines)}`),
    make("td", {}, grouped.format(batch.failed)),
    make("td", {}, Object.entries(batch.out).map(([id, count]) => `${id}: ${count}`).join(", ") || "–"),
    make("td", { className: batch.late ? "late" : "" }, time(batch.predicted_end)),
    make("td", {}, time(batch.expires)))));
}

// Models

let wantedModel = "";

function showModels() {
  const counts = new Map();
  board.instances.forEach((instance, place) => {
    for (const model of instance.models) {
      const count = counts.get(model) ?? [0, 0];
      count[1] += 1;
      if (value(place, "state") === "up") count[0] += 1;
      counts.set(model, count);
    }
  });
  const names = [...counts.keys()].sort((a, b) => counts.get(b)[1] - counts.get(a)[1] || (a < b ? -1 : 1));
  byId("models-panel").hidden = names.length === 0;
  if (wantedModel && !counts.has(wantedModel)) wantedModel = "";
  byId("served").replaceChildren(...names.slice(0, 50).map((name) => {
    const [up, all] = counts.get(name);
    const found = board.trend.models[name]?.all;
    const choose = make("button", { type: "button", className: "link" }, name);
    choose.setAttribute("aria-pressed", String(name === wantedModel));
    choose.addEventListener("click", () => {
      wantedModel = name === wantedModel ? "" : name;
      showModels();
      showInstances();
    });
    const cells = found ? [
      rate(found.requests_per_s), rate(found.output_tokens_per_s),
      ...(found.ttft_s ?? [null, null]).map(seconds), ...(found.tpot_s ?? [null, null]).map(seconds),
      percent(found.cached), percent(found.errors),
    ] : ["0", "0", "–", "–", "–", "–", "–", "–"];
    return make("tr", { className: up ? "" : "none-up" }, make("th", { scope: "row" }, choose),
      make("td", {}, `${up} of ${all}`), ...cells.map((text) => make("td", {}, text)));
  }));
  const list = byId("models");
  if ([...list.children].map((option) => option.value).join("\n") === names.join("\n")) return;
  if (!list.children.length && names.length > 1) byId("model").value ||= names[0];
  list.replaceChildren(...names.map((name) => make("option", { value: name })));
}

// Instances

const rows = new Map(); // id -> the row's elements
const open = new Set(); // ids whose details are shown

function makeBar(kind = "") {
  const fill = make("i");
  return { bar: make("div", { className: `bar ${kind}` }, fill), fill };
}

function setWidth(fill, share) {
  fill.style.width = `${(Math.min(1, Math.max(0, share || 0)) * 100).toFixed(2)}%`;
}

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
    showInstances();
  });
  parts.row = make("li", { className: "row" },
    make("div", { className: "who" },
      make("span", { className: "id" }, id), span("state", "pill"), span("drift", "pill drifted"),
      span("why", "note why"), span("models", "note"), span("profile", "note")),
    cell("workload-cell", "Load",
      make("div", { className: "workload" }, bar("load", ""), span("loadValue", "value"))),
    cell("kv-cell", "KV cache: estimated, engine",
      make("div", { className: "kv" },
        bar("kv", "estimated"), span("kvValue", "value"),
        bar("engine", "engine"), span("engineValue", "value"))),
    cell("in-flight", "In flight", span("inFlight", "value"), span("unseen", "note")),
    cell("tokens", "Tokens/s", span("tokens", "value"), span("errors", "note why")),
    cell("share", "Share of traffic, of capacity",
      make("div", { className: "shares" },
        bar("shareBar", "traffic"), span("share", "value"),
        bar("capacityBar", "capacity"), span("capacity", "value"))),
    parts.more);
  parts.drain = make("button", { type: "button" });
  parts.weight = make("input", { type: "number", min: "0.001", max: "1000", step: "any", required: true });
  parts.told = make("span", { className: "note", role: "status" });
  const form = make("form", { className: "actions" }, parts.drain,
    make("label", {}, "Weight ", parts.weight), make("button", { type: "submit" }, "Set"), parts.told);
  parts.drain.addEventListener("click", () => change(parts, id, { draining: parts.drain.dataset.to === "true" }));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    change(parts, id, { weight: Number(parts.weight.value) });
  });
  parts.actions = form;
  parts.row.append(form);
  return parts;
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

/** What the scheduler takes the instance for, and how far that is from what is seen. */
function profileText(instance, speed) {
  if (instance.profile === "unprofiled") return "unprofiled, by its observed speed";
  const words = [instance.profile];
  if (instance.recalibrated && instance.profile !== "learned") words.push("recalibrated from traffic");
  if (speed !== null) words.push(`steps take ${figure(speed)}× as long as it says`);
  if (instance.weight !== 1) words.push(`weight ${figure(instance.weight)}`);
  return words.join(", ");
}

function showRow(parts, place, sums, top) {
  const instance = board.instances[place];
  const state = value(place, "state");
  const detailed = open.has(instance.id) || board.instances.length <= FEW;
  parts.row.classList.toggle("off", state !== "up");
  if (parts.state.className !== `pill ${state}`) parts.state.className = `pill ${state}`;
  setText(parts.state, state);
  setText(parts.why, instance.why);
  parts.why.hidden = !instance.why;
  parts.why.classList.toggle("rests", RESTS.has(state));
  parts.models.hidden = parts.profile.hidden = !detailed;
  setText(parts.models, instance.models.join(", ") || "models not known yet");
  setText(parts.profile, profileText(instance, value(place, "speed")));
  setText(parts.drift, instance.drifted ? "profile drifted" : "");
  parts.drift.hidden = !instance.drifted;
  const load = value(place, "load");
  setWidth(parts.load, top > 0 ? load / top : 0);
  setText(parts.loadValue, board.load_unit === "s" && load ? seconds(load) : figure(load));
  for (const [bar, text, share] of [
    [parts.kv, parts.kvValue, value(place, "kv")],
    [parts.engine, parts.engineValue, value(place, "engine_kv")],
  ]) {
    setWidth(bar, share);
    setText(text, percent(share));
    text.classList.toggle("full", share >= 1);
  }
  setText(parts.inFlight, grouped.format(value(place, "in_flight")));
  const unseen = value(place, "waiting_first_token");
  setText(parts.unseen, unseen ? `${grouped.format(unseen)} without a token` : "");
  setText(parts.tokens, rate(value(place, "output_tokens_per_s")));
  const errors = value(place, "errors");
  setText(parts.errors, errors > 0 ? `${percent(errors)} failed` : "");
  const sum = sums.get(instance.models.join("\n"));
  const traffic = sum.requests > 0 ? value(place, "requests_per_s") / sum.requests : null;
  const capacity = sum.known && sum.capacity > 0 ? board.capacities[place] / sum.capacity : null;
  const most = Math.max(sum.mostRequests / sum.requests || 0, sum.known ? sum.mostCapacity / sum.capacity || 0 : 0);
  setWidth(parts.shareBar, traffic / most);
  setText(parts.share, percent(traffic));
  setWidth(parts.capacityBar, capacity / most);
  setText(parts.capacity, percent(capacity));
  parts.more.setAttribute("aria-expanded", String(open.has(instance.id)));
  parts.actions.hidden = !open.has(instance.id);
  parts.row.classList.toggle("open", open.has(instance.id));
  setText(parts.drain, state === "draining" ? "Resume" : "Drain");
  parts.drain.dataset.to = String(state !== "draining");
  if (document.activeElement !== parts.weight) parts.weight.value = instance.weight;
}

/** Of the instances that serve the same models: their traffic and capacity together. */
function sumsOfModels() {
  const sums = new Map();
  board.instances.forEach((instance, place) => {
    const key = instance.models.join("\n");
    const sum = sums.get(key) ?? { requests: 0, capacity: 0, mostRequests: 0, mostCapacity: 0, known: true };
    sum.requests += value(place, "requests_per_s");
    sum.mostRequests = Math.max(sum.mostRequests, value(place, "requests_per_s"));
    sum.mostCapacity = Math.max(sum.mostCapacity, board.capacities[place] ?? 0);
    sum.capacity += board.capacities[place] ?? 0;
    sum.known &&= board.capacities[place] !== null;
    sums.set(key, sum);
  });
  return sums;
}

// Somebody has wanted it so: it is no error.
const RESTS = new Set(["draining", "paused", "asleep"]);
const ORDER = { down: 0, ejected: 1, draining: 2, paused: 3, asleep: 4, up: 5 };
const SORTS = {
  id: (a, b) => board.instances[a].id.localeCompare(board.instances[b].id, undefined, { numeric: true }),
  state: (a, b) => ORDER[value(a, "state")] - ORDER[value(b, "state")] || value(b, "errors") - value(a, "errors"),
  load: (a, b) => value(b, "load") - value(a, "load"),
  in_flight: (a, b) => value(b, "in_flight") - value(a, "in_flight"),
  kv: (a, b) => (value(b, "kv") ?? -1) - (value(a, "kv") ?? -1),
  tokens: (a, b) => value(b, "output_tokens_per_s") - value(a, "output_tokens_per_s"),
};

function isWanted(place) {
  const instance = board.instances[place];
  const state = value(place, "state");
  const which = byId("which").value;
  if (which === "up" && state !== "up") return false;
  if (which === "wrong" && state === "up" && !instance.why && !instance.drifted && !(value(place, "errors") > 0)) return false;
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

function showInstances() {
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
  let places = board.instances.map((_, place) => place).filter(isWanted);
  if (sort) places = places.sort((a, b) => sort(a, b) || a - b);
  const groups = new Map();
  for (const place of places) {
    const name = groupOf(place, by);
    groups.set(name, [...(groups.get(name) ?? []), place]);
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
  list.classList.toggle("dense", board.instances.length > FEW);
  byId("no-instances").hidden = board.instances.length > 0;
  setText(byId("load-head"), `Load${board.load_unit ? `, ${board.load_unit}` : ""}`);
  const shown = places.length === board.instances.length ? "" : `${places.length} of ${board.instances.length} shown`;
  setText(byId("shown-count"), shown + (wantedModel ? ` (model ${wantedModel})` : ""));
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
  byId(id).addEventListener("input", () => board && showInstances());
}

// Decisions

const shown = new Map(); // decision key -> its <details>
let sought = ""; // a request id

const COLUMNS = ["Instance", "", "T, s", "KV", "w", "Load before", "Load after", "", "In flight"];
// What a policy that estimates (finish-time) tells beside, where it does.
const ESTIMATES = [["First token, s", "ttft_s"], ["Latency, s", "latency_s"], ["Delay, s", "delay_s"], ["Memory, s", "memory_price_s"], ["Late, s", "late_price_s"], ["SLO, s", "slo_price_s"], ["Cost", "cost_s"]];

/** What an instance should have cached of a prompt: the match with what it was sent, times trust. */
function cachedPart(prefix) {
  if (!prefix) return "–";
  const match = grouped.format(Math.round(prefix.match_tokens));
  return prefix.trust === 1 || !prefix.match_tokens ? match : `${match} × ${percent(prefix.trust)}`;
}

/** Every candidate of a decision as a table; the chosen one and the excluded ones are marked. */
function candidateTable(candidates, chosen, waits = false) {
  const top = Math.max(0, ...candidates.map((candidate) => candidate.load_after ?? 0));
  const estimates = candidates.some((candidate) => "cost_s" in candidate) ? ESTIMATES : [];
  const cached = candidates.some((candidate) => candidate.prefix);
  const body = make("tbody");
  for (const candidate of candidates) {
    const isChosen = candidate.instance === chosen;
    const { bar, fill } = makeBar();
    const added = make("i", { className: "added" });
    bar.prepend(added);
    setWidth(added, top > 0 ? candidate.load_after / top : 0);
    setWidth(fill, top > 0 ? candidate.load / top : 0);
    const note = make("td", { className: "verdict" });
    if (isChosen) note.append(make("span", { className: "pill chosen" }, waits ? "best" : "chosen"));
    if (candidate.excluded !== null) note.append(`left out: ${candidate.excluded}`);
    if (candidate.room === false) note.append(isChosen ? ", no room" : "no room");
    body.append(make("tr", { className: isChosen ? "chosen" : candidate.excluded !== null ? "excluded" : "" },
      make("th", { scope: "row" }, candidate.instance),
      note,
      make("td", {}, figure(candidate.request_time_s)),
      make("td", {}, percent(candidate.kv_usage)),
      make("td", {}, figure(candidate.workload)),
      make("td", {}, figure(candidate.load)),
      make("td", {}, figure(candidate.load_after)),
      make("td", { className: "load-bar" }, ...(candidate.excluded === null ? [bar] : [])),
      make("td", {}, candidate.in_flight === null ? "–" : grouped.format(candidate.in_flight)),
      ...estimates.map(([, key]) => make("td", {}, figure(candidate[key]))),
      ...(cached ? [make("td", {}, cachedPart(candidate.prefix))] : [])));
  }
  const names = [...COLUMNS, ...estimates.map(([name]) => name), ...(cached ? ["Cached, tokens"] : [])];
  const head = make("tr", {}, ...names.map((name) => make(name ? "th" : "td", name ? { scope: "col" } : {}, name)));
  const region = make("div", { className: "scroll", tabIndex: 0 }, make("table", {}, make("thead", {}, head), body));
  region.setAttribute("role", "region");
  region.setAttribute("aria-label", "Candidates");
  return region;
}

function makeDecision(decision) {
  const body = make("div", { className: "body" });
  const tokens = `${grouped.format(decision.prompt_tokens)} → ${grouped.format(decision.predicted_output_tokens)} tokens`;
  const times = decision.sequences > 1 ? `, ${decision.sequences} sequences` : "";
  const details = make("details", { className: "decision" },
    make("summary", {},
      make("span", { className: "muted" }, clock.format(decision.time * 1000)),
      make("span", { className: "sentence", title: decision.reason }, decision.reason),
      make("span", { className: "what muted" }, `${decision.model}, ${tokens}${times}`)),
    body);
  details.addEventListener("toggle", () => {
    if (details.open && !body.children.length) loadCandidates(decision, body);
  });
  return details;
}

async function loadCandidates(decision, body) {
  const again = make("button", { type: "button" }, "Where would it go now?");
  again.addEventListener("click", () => {
    byId("prompt-tokens").value = decision.prompt_tokens;
    byId("max-tokens").value = "";
    byId("model").value = decision.model;
    byId("explain-panel").open = true;
    byId("explain").requestSubmit();
    byId("explain-panel").scrollIntoView({ block: "nearest" });
  });
  const id = make("p", { className: "note" }, "Request ", make("code", {}, decision.request_id), " ", again);
  body.replaceChildren(make("p", { className: "note" }, decision.reason), id);
  try {
    const answer = await ask(`decisions?limit=256&request_id=${encodeURIComponent(decision.request_id)}`);
    const found = answer.decisions.find((other) => other.time === decision.time);
    body.append(found
      ? candidateTable(found.candidates, found.chosen)
      : make("p", { className: "empty" }, "The gateway no longer keeps this decision."));
  } catch (error) {
    body.append(make("p", { className: "empty" }, `The figures could not be read: ${error.message}`));
  }
}

function showDecisions(decisions) {
  const list = byId("decisions");
  const keep = new Set();
  let before = list.firstChild;
  for (const decision of decisions) {
    const key = `${decision.time} ${decision.request_id}`;
    keep.add(key);
    if (shown.has(key)) continue;
    // Newest first, as they come: what is new stands above everything that was shown.
    const details = makeDecision(decision);
    shown.set(key, details);
    list.insertBefore(details, before);
  }
  for (const [key, details] of shown) {
    // What somebody reads stays until it is closed.
    if (keep.has(key) || (!sought && (details.open || details.contains(document.activeElement)))) continue;
    details.remove();
    shown.delete(key);
  }
  setText(byId("no-decisions"), sought ? `The gateway keeps no decision about ${sought} any more.` : "No request has come yet.");
  byId("no-decisions").hidden = shown.size > 0;
}

let decisionsTimer;

async function pollDecisions() {
  clearTimeout(decisionsTimer);
  if (!byId("decisions-panel").open || paused || document.hidden || byId("main").hidden) return;
  const query = sought ? `&request_id=${encodeURIComponent(sought)}` : "";
  try {
    showDecisions((await ask(`decisions?limit=${DECISIONS}&candidates=false${query}`)).decisions);
  } catch {
    // The stream shows what is wrong.
  }
  decisionsTimer = setTimeout(pollDecisions, DECISIONS_EVERY_MS);
}

byId("decisions-panel").addEventListener("toggle", pollDecisions);
byId("find").addEventListener("submit", (event) => {
  event.preventDefault();
  sought = byId("request-id").value.trim();
  pollDecisions();
});

// Explain

byId("explain").addEventListener("submit", async (event) => {
  event.preventDefault();
  const query = new URLSearchParams({ prompt_tokens: byId("prompt-tokens").value });
  if (byId("max-tokens").value) query.set("max_tokens", byId("max-tokens").value);
  if (byId("model").value) query.set("model", byId("model").value);
  const target = byId("explained");
  try {
    const answer = await ask(`explain?${query}`);
    const predicted = `${grouped.format(answer.predicted_output_tokens)} output tokens predicted`;
    target.replaceChildren(
      make("p", { className: "sentence" }, answer.reason),
      make("p", { className: "note" }, `${answer.model}, policy ${answer.policy}, ${predicted}`));
    if (answer.candidates.length) target.append(candidateTable(answer.candidates, answer.chosen, answer.waits));
  } catch (error) {
    target.replaceChildren(make("p", { className: "empty" }, `No answer: ${error.message}`));
  }
});

// The stream

let paused = false;
let answeredAt = null;
let listening = null; // an AbortController
let timer;

function setLive(state, text) {
  byId("live").dataset.state = state;
  setText(byId("live"), text);
}

function showOnly(id) {
  for (const other of ["key-form", "off"]) byId(other).hidden = other !== id;
  if (id) {
    byId("main").hidden = true;
    byId("alarms").replaceChildren();
    delete byId("alarms").dataset.texts;
  }
}

function showBoard(names) {
  const began = byId("main").hidden;
  showOnly(null);
  byId("main").hidden = false;
  byId("banner").hidden = true;
  document.body.classList.remove("stale");
  byId("forget").hidden = !sessionStorage.getItem(KEY_NAME);
  byId("policy").hidden = false;
  setText(byId("policy"), `policy ${board.policy}`);
  setLive("live", board.head.draining ? "live, the gateway is draining" : "live");
  const all = began || names.has("all");
  if (all || names.has("trend") || names.has("head")) showFigures();
  if (all || names.has("head")) showBatches();
  if (all || names.has("trend") || names.has("rows")) showModels();
  if (all || names.has("rows") || names.has("capacities")) showInstances();
  showSummary();
  if (began) pollDecisions();
}

/** Show what went wrong; returns after how long to try again, or null when only a person can help. */
function showProblem(error) {
  if (error instanceof Closed && error.status === 401) {
    const refused = sessionStorage.getItem(KEY_NAME) !== null;
    sessionStorage.removeItem(KEY_NAME);
    setText(byId("key-problem"), "The gateway refused that key.");
    byId("key-problem").hidden = !refused;
    byId("banner").hidden = true;
    byId("forget").hidden = true;
    setLive("wait", "waiting for a key");
    showOnly("key-form");
    byId("key").focus();
    return null;
  }
  if (error instanceof Closed && error.status === 403) {
    setText(byId("off-message"), error.message);
    byId("banner").hidden = true;
    setLive("wait", "closed");
    showOnly("off");
    return RETRY_CLOSED_MS;
  }
  const since = answeredAt === null ? "" : ` What you see is from ${clock.format(answeredAt)}.`;
  const what = error instanceof Closed ? `The gateway answers: ${error.message}` : "The gateway does not answer.";
  setText(byId("banner"), `${what}${since} Trying again.`);
  byId("banner").hidden = false;
  document.body.classList.add("stale");
  setLive("lost", "no answer");
  return RETRY_MS;
}

/** Takes the events of one answer until it ends. */
async function listen(signal) {
  const response = await fetch("admin/events", { headers: withKey(), cache: "no-store", signal });
  if (!response.ok) throw await refusalOf(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const silence = setTimeout(() => listening?.abort(), SILENCE_MS);
    const { done, value: part } = await reader.read().finally(() => clearTimeout(silence));
    if (done) return;
    answeredAt = Date.now();
    const events = (text + part).split("\n\n");
    text = events.pop();
    const names = new Set();
    for (const event of events) {
      const [, name, data] = event.match(/^event: (\w+)\ndata: (.*)$/s) ?? [];
      if (!name) continue;
      take(name, JSON.parse(data));
      names.add(name);
    }
    if (board !== null && names.size) showBoard(names);
  }
}

async function follow() {
  clearTimeout(timer);
  if (listening || paused || document.hidden) return;
  const ours = (listening = new AbortController());
  let wait = RETRY_MS;
  try {
    await listen(ours.signal);
  } catch (error) {
    if (!ours.signal.aborted || !(paused || document.hidden)) wait = showProblem(error);
  }
  if (listening === ours) listening = null;
  if (wait !== null) timer = setTimeout(follow, wait);
}

function leave() {
  listening?.abort();
  listening = null;
}

byId("pause").addEventListener("click", () => {
  paused = !paused;
  byId("pause").setAttribute("aria-pressed", String(paused));
  setText(byId("pause"), paused ? "Go on" : "Pause");
  if (paused) {
    leave();
    setLive("wait", "paused");
  } else {
    follow();
    pollDecisions();
  }
});

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = byId("key").value.trim();
  byId("key").value = "";
  if (!/^[\x21-\x7e]+$/.test(key)) {
    setText(byId("key-problem"), "A key has only visible ASCII characters.");
    byId("key-problem").hidden = false;
    return;
  }
  sessionStorage.setItem(KEY_NAME, key);
  leave();
  follow();
});

byId("forget").addEventListener("click", () => {
  sessionStorage.removeItem(KEY_NAME);
  byId("forget").hidden = true;
  byId("main").hidden = true;
  leave();
  follow();
});

document.addEventListener("visibilitychange", () => {
  if (document.hidden) {
    leave();
  } else {
    follow();
    pollDecisions();
  }
});
addEventListener("hashchange", () => {
  if (!takeKeyOfLink()) return;
  leave();
  follow();
});
takeKeyOfLink();
follow();
