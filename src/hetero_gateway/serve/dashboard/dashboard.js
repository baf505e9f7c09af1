// The live page: the stream of what changes (/admin/events), and what stands above the instances.

import {
  age, byId, clock, Closed, grouped, KEY_NAME, make, percent, rate, refusalOf, seconds, setText, showRows, withKey,
} from "./figures.js";
import { showInstances, STATES, want, wantedModel } from "./instances.js";
import { pollLast, showRequest, waitBar } from "./requests.js";

const RETRY_MS = 1000;
const RETRY_CLOSED_MS = 5000;
const SILENCE_MS = 40_000; // the gateway says something every 15 s
const ALARMS = 4; // that are shown at once
const POINTS = 180;

/** Take up the key of a link that the gateway printed; it leaves the address at once. */
function takeKeyOfLink() {
  const [, key] = location.hash.match(/^#key=([\x21-\x7e]+)$/) ?? [];
  if (!key) return false;
  history.replaceState(null, "", location.pathname + location.search);
  sessionStorage.setItem(KEY_NAME, key);
  return true;
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
  } else if (name === "use") {
    board.use = data;
  } else if (name === "trend") {
    const { point, long_point: longPoint = [], ...trend } = data;
    board.trend = trend;
    board.points = [...board.points, ...point].slice(-POINTS);
    board.long_points = [...board.long_points, ...longPoint].slice(-POINTS);
  }
}

// Totals, each with its trend

let long = false; // hours, not minutes

const TILES = [
  { name: "Requests/s", now: (f) => rate(f.requests_per_s), lines: [0], text: rate },
  { name: "Output tokens/s", now: (f) => rate(f.output_tokens_per_s), lines: [1], text: rate },
  { name: "First token, p50 and p99", now: (f) => pair(f.ttft_s), lines: [3, 2], text: seconds },
  { name: "Per token, p50 and p99", now: (f) => pair(f.tpot_s), lines: [5, 4], text: seconds },
  { name: "Failed", now: (f) => percent(f.errors ?? 0), lines: [6], text: percent, bad: (f) => f.errors > 0.02 },
  {
    name: "Waiting here", lines: [7], text: (value) => grouped.format(value),
    now: () => waitingText(),
    all: (f) => `most ${grouped.format(f.queue.most)}`,
  },
];

function pair(found) {
  return found ? `${seconds(found[0])} · ${seconds(found[1])}` : "–";
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
  svg.setAttribute("viewBox", `0 0 ${POINTS} 40`);
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
  tile.top = make("span", { className: "top-value" });
  tile.spark = make("div", { className: "spark" }, svg, tile.top);
  tile.spark.addEventListener("pointermove", (event) => {
    const box = tile.spark.getBoundingClientRect();
    tile.at = Math.min(POINTS - 1, Math.max(0, Math.floor(((event.clientX - box.left) / box.width) * POINTS)));
    showTile(tile);
  });
  tile.spark.addEventListener("pointerleave", () => {
    tile.at = null;
    showTile(tile);
  });
  byId("figures").append(make("div", { className: "tile" },
    make("h3", {}, tile.name), tile.value, tile.average, tile.spark));
}

function drawLine(path, points, column, top) {
  let drawn = "";
  let began = false;
  points.forEach((point, i) => {
    if (point[column] === null) {
      began = false;
      return;
    }
    const x = POINTS - points.length + i + 0.5;
    const y = 38 - (top > 0 ? point[column] / top : 0) * 36;
    drawn += `${began ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}${began ? "" : "h.01"}`;
    began = true;
  });
  path.setAttribute("d", drawn);
}

const pointsShown = () => (long ? board.long_points : board.points);
const stepShown = () => (long ? board.long_step_s : board.step_s);

function showTile(tile) {
  const { now, all } = board.trend;
  const points = pointsShown();
  setText(tile.value, tile.now(now));
  tile.value.classList.toggle("bad", tile.bad?.(now) === true);
  const point = tile.at === null || tile.at === undefined ? null : points[tile.at - POINTS + points.length];
  if (point) {
    const ago = (POINTS - 1 - tile.at) * stepShown();
    setText(tile.average, `${age(Date.now() / 1000 - ago)} ago: ${[...tile.lines].reverse().map((line) => tile.text(point[line])).join(" · ")}`);
  } else {
    setText(tile.average, long ? "6 h" : `15 min: ${(tile.all ?? tile.now)(all)}`);
  }
  const top = Math.max(0, ...points.flatMap((each) => tile.lines.map((line) => each[line] ?? 0)));
  setText(tile.top, points.length ? tile.text(top) : "");
  tile.lines.forEach((line, i) => drawLine(tile.paths[i], points, line, top));
}

function showFigures() {
  for (const tile of TILES) {
    if (!tile.value) makeTile(tile);
    showTile(tile);
  }
}

byId("range").addEventListener("click", () => {
  long = !long;
  byId("range").setAttribute("aria-pressed", String(long));
  setText(byId("range"), long ? "6 hours" : "15 minutes");
  if (board) showFigures();
});

function showSummary() {
  const counts = {};
  for (const row of board.rows) counts[row[figureOf.state]] = (counts[row[figureOf.state]] ?? 0) + 1;
  const ready = counts.up ?? 0;
  const total = board.rows.length;
  const others = STATES.filter((state) => state !== "up" && counts[state]);
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
  showAlarms(alarms);
}

let allAlarms = false;

function showAlarms(alarms) {
  const list = byId("alarms");
  const shown = alarms.slice(0, allAlarms ? alarms.length : ALARMS);
  list.replaceChildren(...shown.map((alarm) => make("li", { className: alarm.severity },
    make("b", {}, alarm.text), " ", make("span", { className: "advice" }, alarm.advice),
    make("span", { className: "since", title: `since ${clock.format(alarm.since * 1000)}` }, `for ${age(alarm.since)}`))));
  if (alarms.length > ALARMS) {
    const more = make("button", { type: "button", className: "link" }, allAlarms ? "Fewer" : `${alarms.length - ALARMS} more`);
    more.addEventListener("click", () => {
      allAlarms = !allAlarms;
      showAlarms(alarms);
    });
    list.append(make("li", {}, more));
  }
}

// Who uses it, and what for

function showUse() {
  const { use } = board;
  const perMinute = use.span_s >= 60 ? "last minute" : `last ${use.span_s.toFixed(0)} s`;
  byId("waits").replaceChildren(...waitBar(use.waits));
  setText(byId("waits-title"), use.waits
    ? `${seconds(use.waits.ttft_s)}, mean of ${grouped.format(use.waits.streams)} streams`
    : `no stream in the ${perMinute}`);
  const share = use.requests ? use.retried / use.requests : 0;
  setText(byId("retries"), `Retried: ${percent(share)} of ${grouped.format(use.requests)} requests, ${grouped.format(use.retries)} attempts failed; hedged: never`);
  byId("retries").classList.toggle("bad", share > 0.05);
  setText(byId("clients-title"), perMinute);
  const tokens = use.clients.reduce((sum, client) => sum + client.output_tokens, 0);
  showRows(byId("clients"), use.clients.map((client) => [
    [client.name ?? "without a key", "name"],
    rate(client.requests / use.span_s),
    rate(client.output_tokens / use.span_s),
    percent(tokens ? client.output_tokens / tokens : 0),
    [client.failed ? grouped.format(client.failed) : "0", client.failed ? "late" : ""],
    [grouped.format(client.refused), client.refused ? "late" : ""],
  ]));
  byId("no-clients").hidden = use.clients.length > 0;
}

// Batches

function time(unixSeconds) {
  return unixSeconds === null ? "–" : new Date(unixSeconds * 1000).toLocaleString();
}

function showBatches() {
  const { batches } = board.head;
  byId("batches-panel").hidden = !batches?.length;
  showRows(byId("batches"), (batches ?? []).slice(0, 50).map((batch) => [
    [batch.id, "name"],
    batch.client || "–",
    `${grouped.format(batch.done)} of ${grouped.format(batch.lines)}, ${percent(batch.done / batch.lines)}`,
    grouped.format(batch.failed),
    Object.entries(batch.out).map(([id, count]) => `${id}: ${count}`).join(", ") || "–",
    [time(batch.predicted_end), batch.late ? "late" : ""],
    time(batch.expires),
  ]));
}

// Models

function showModels() {
  const counts = new Map();
  board.instances.forEach((instance, place) => {
    for (const model of instance.models) {
      const count = counts.get(model) ?? [0, 0];
      count[1] += 1;
      if (board.rows[place][figureOf.state] === "up") count[0] += 1;
      counts.set(model, count);
    }
  });
  const names = [...counts.keys()].sort((a, b) => counts.get(b)[1] - counts.get(a)[1] || (a < b ? -1 : 1));
  byId("models-panel").hidden = names.length === 0;
  if (wantedModel && !counts.has(wantedModel)) want("");
  byId("served").replaceChildren(...names.slice(0, 50).map((name) => {
    const [up, all] = counts.get(name);
    const found = board.trend.models[name]?.all;
    const choose = make("button", { type: "button", className: "link" }, name);
    choose.setAttribute("aria-pressed", String(name === wantedModel));
    choose.addEventListener("click", () => {
      want(name === wantedModel ? "" : name);
      showModels();
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

// One request, by the address

let requestShown = null;

function showPlace() {
  const [, raw] = location.hash.match(/^#request=(.+)$/) ?? [];
  const wanted = raw === undefined ? null : decode(raw);
  byId("request-page").hidden = wanted === null;
  byId("first").hidden = wanted !== null;
  if (wanted !== null && wanted !== requestShown) showRequest(wanted);
  requestShown = wanted;
}

function decode(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

// The stream

let paused = false;
const looks = () => !paused && !document.hidden && !byId("main").hidden;
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
  showPlace();
  if (all || names.has("trend") || names.has("head")) showFigures();
  if (all || names.has("use")) showUse();
  if (all || names.has("head")) showBatches();
  if (all || names.has("trend") || names.has("rows")) showModels();
  if (all || names.has("rows") || names.has("capacities")) showInstances(board, figureOf);
  showSummary();
  if (!performance.getEntriesByName("board").length) performance.mark("board");
  if (began) pollLast(looks);
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
    pollLast(looks);
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
    pollLast(looks);
  }
});
addEventListener("hashchange", () => {
  if (!takeKeyOfLink()) {
    showPlace();
    return;
  }
  leave();
  follow();
});
takeKeyOfLink();
follow();
