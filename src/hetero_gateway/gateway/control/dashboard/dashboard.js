// The live page. It reads /admin about once a second and writes what it reads as text: ids, model
// names and reasons come from outside, so nothing here builds markup from a string (the page's
// Content-Security-Policy refuses it, too).

const POLL_MS = 1000;
const RETRY_CLOSED_MS = 5000;
const REQUEST_TIMEOUT_MS = 5000;
const HISTORY_MS = 120_000;
const GAP_MS = 4000; // a longer silence breaks the line: nothing is known about it
const DECISIONS = 30;
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

const clock = new Intl.DateTimeFormat(undefined, { timeStyle: "medium", hour12: false });

// Talking to /admin

class Closed extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function ask(path) {
  const key = sessionStorage.getItem(KEY_NAME);
  const response = await fetch(`admin/${path}`, {
    headers: key ? { authorization: `Bearer ${key}` } : {},
    cache: "no-store",
    signal: AbortSignal.timeout(REQUEST_TIMEOUT_MS),
  });
  const body = await response.json();
  if (!response.ok) throw new Closed(response.status, body.error?.message ?? `status ${response.status}`);
  return body;
}

// Instances

const rows = new Map(); // id -> the row's elements and its history

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
  const parts = { history: [] };
  const span = (name, className) => (parts[name] = make("span", { className }));
  const bar = (name, kind) => {
    const made = makeBar(kind);
    parts[name] = made.fill;
    return made.bar;
  };
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 100 30");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  const base = document.createElementNS(svg.namespaceURI, "line");
  for (const [name, value] of [["x1", 0], ["x2", 100], ["y1", 30], ["y2", 30]]) base.setAttribute(name, value);
  parts.path = document.createElementNS(svg.namespaceURI, "path");
  svg.append(base, parts.path);
  parts.row = make("li", { className: "row" },
    make("div", { className: "who" },
      make("span", { className: "id" }, id), span("state", "pill"), span("drift", "pill drifted"),
      span("why", "note why"), span("models", "note"), span("profile", "note")),
    cell("workload-cell", "Workload",
      make("div", { className: "workload" }, bar("load", ""), span("loadValue", "value"))),
    cell("history", "Last 2 minutes", svg),
    cell("kv-cell", "KV cache",
      make("div", { className: "kv" },
        "estimated", bar("kv", "estimated"), span("kvValue", "value"),
        "engine", bar("engine", "engine"), span("engineValue", "value"))),
    cell("in-flight", "In flight", span("inFlight", "value"), span("unseen", "note")),
    cell("share", "Share of requests", span("share", "value"), bar("shareBar", "")));
  return parts;
}

function stateOf(instance) {
  if (!instance.up) return "down";
  if (instance.draining) return "draining";
  return instance.ejected ? "ejected" : "up";
}

/** How much its engine found in its prefix cache, and how far its matches are trusted. */
function cacheText(instance) {
  const saved = `${grouped.format(Math.round(instance.cached_tokens))} prompt tokens were cached`;
  const trusted = instance.prefix_trust === null || instance.prefix_trust === undefined;
  return trusted ? saved : `${saved}, matches trusted to ${percent(instance.prefix_trust)}`;
}

/** What the scheduler takes the instance for, and how far that is from what is seen. */
function profileText(instance) {
  const source = instance.profile_source ? ` (${instance.profile_source})` : "";
  if (instance.profile === "unprofiled") return "unprofiled, by its observed speed";
  const words = [instance.profile + source];
  if (instance.recalibrated && instance.profile !== "learned") words.push("recalibrated from traffic");
  if (instance.speed_factor !== null) words.push(`steps take ${figure(instance.speed_factor)}× as long as it says`);
  if (instance.cached_tokens > 0) words.push(cacheText(instance));
  const ratios = [["decode", instance.drift?.decode], ["prefill", instance.drift?.prefill]]
    .filter(([, ratio]) => ratio !== null && ratio !== undefined)
    .map(([phase, ratio]) => `${phase} ${figure(ratio)}×`);
  if (ratios.length) words.push(`over minutes ${ratios.join(", ")}`);
  return words.join(", ");
}

function showRow(parts, instance, top, total) {
  const state = stateOf(instance);
  parts.row.classList.toggle("off", state !== "up");
  parts.state.className = `pill ${state}`;
  setText(parts.state, state);
  const reasons = [];
  if (!instance.up) reasons.push(instance.down_reason || "unknown reason");
  if (instance.draining) reasons.push("draining: it finishes what it has and gets nothing new");
  if (instance.ejected) {
    const seconds = instance.ejected_for_s;
    const next = seconds === null ? "one request at a time tries it" : `for another ${Math.ceil(seconds)} s`;
    reasons.push(`ejected, ${next}: its requests failed (${instance.ejected_reason})`);
  } else if (instance.standing === "recovering" || instance.standing === "busy") {
    reasons.push(`${instance.standing}: it gets fewer requests than it could hold`);
  }
  setText(parts.why, reasons.join("; "));
  parts.why.hidden = reasons.length === 0;
  setText(parts.models, instance.models.join(", ") || "models not known yet");
  setText(parts.profile, profileText(instance));
  const drifted = instance.drift?.drifted === true;
  setText(parts.drift, drifted ? "profile drifted" : "");
  parts.drift.hidden = !drifted;
  setWidth(parts.load, top > 0 ? instance.workload / top : 0);
  setText(parts.loadValue, figure(instance.workload));
  for (const [bar, text, value] of [
    [parts.kv, parts.kvValue, instance.kv_usage],
    [parts.engine, parts.engineValue, instance.engine_kv_usage],
  ]) {
    setWidth(bar, value);
    setText(text, percent(value));
    text.classList.toggle("full", value >= 1);
  }
  setText(parts.inFlight, grouped.format(instance.in_flight));
  const unseen = instance.waiting_first_token;
  setText(parts.unseen, unseen ? `${grouped.format(unseen)} before a first token` : "");
  setWidth(parts.shareBar, total > 0 ? instance.requests / total : 0);
  const share = total > 0 ? percent(instance.requests / total) : "–";
  setText(parts.share, `${share} of ${grouped.format(total)}`);
}

function drawHistory(parts, now, top) {
  let path = "";
  let previous = -Infinity;
  for (const [time, load] of parts.history) {
    const x = 100 - ((now - time) / HISTORY_MS) * 100;
    const y = 29 - (top > 0 ? load / top : 0) * 27;
    path += `${time - previous > GAP_MS ? "M" : "L"}${x.toFixed(2)} ${y.toFixed(2)}`;
    previous = time;
  }
  parts.path.setAttribute("d", path);
}

function showInstances(instances, queue, sharing) {
  const list = byId("instances");
  const now = Date.now();
  const top = Math.max(0, ...instances.map((instance) => instance.workload));
  const total = instances.reduce((sum, instance) => sum + instance.requests, 0);
  const present = new Set(instances.map((instance) => instance.id));
  for (const [id, parts] of rows) {
    if (!present.has(id)) {
      parts.row.remove();
      rows.delete(id);
    }
  }
  let highest = 0;
  for (const instance of instances) {
    if (!rows.has(instance.id)) {
      rows.set(instance.id, makeRow(instance.id));
      list.append(rows.get(instance.id).row);
    }
    const parts = rows.get(instance.id);
    parts.history.push([now, instance.workload]);
    while (parts.history[0][0] < now - HISTORY_MS) parts.history.shift();
    highest = parts.history.reduce((most, [, load]) => Math.max(most, load), highest);
    showRow(parts, instance, top, total);
  }
  // One scale for all, so that the lines can be compared.
  for (const parts of rows.values()) drawHistory(parts, now, highest);
  byId("no-instances").hidden = instances.length > 0;
  showSummary(instances, total, queue, sharing);
  showModels(instances);
}

function showSummary(instances, total, queue, sharing) {
  const ready = instances.filter((instance) => stateOf(instance) === "up");
  const loads = ready.map((instance) => instance.workload);
  const mean = loads.reduce((sum, load) => sum + load, 0) / (loads.length || 1);
  const figures = [
    ["Taking requests", `${ready.length} of ${instances.length}`],
    ["In flight", grouped.format(instances.reduce((sum, instance) => sum + instance.in_flight, 0))],
    ["Waiting here", waitingText(queue)],
    ["Requests sent", grouped.format(total)],
    ["Highest load ÷ mean", mean > 0 ? `${(Math.max(...loads) / mean).toFixed(2)}×` : "–"],
    ...(sharing ? [["Other gateways", sharingText(sharing)]] : []),
  ];
  const summary = byId("summary");
  if (!summary.children.length) {
    for (const [name] of figures) summary.append(make("div", {}, make("dt", {}, name), make("dd")));
  }
  figures.forEach(([, value], i) => setText(summary.children[i].lastChild, value));
  document.title = `${ready.length}/${instances.length} up · hetero-gateway`;
}

/** How many gateways share the instances, and what is known of them. */
function sharingText(sharing) {
  return `${grouped.format(sharing.other_replicas)}, view ${sharing.mode}`;
}

/** The gateway's own queue; a policy that places at once has none. */
function waitingText(queue) {
  if (!queue) return "no queue";
  const longest = queue.waiting ? `, longest ${figure(queue.oldest_wait_s)} s` : "";
  return grouped.format(queue.waiting) + longest;
}

function showModels(instances) {
  const served = new Map();
  for (const name of instances.flatMap((instance) => instance.models)) {
    served.set(name, (served.get(name) ?? 0) + 1);
  }
  const names = [...served.keys()].sort((a, b) => served.get(b) - served.get(a) || (a < b ? -1 : 1));
  const list = byId("models");
  if ([...list.children].map((option) => option.value).join("\n") === names.join("\n")) return;
  if (!list.children.length && names.length > 1) byId("model").value ||= names[0];
  list.replaceChildren(...names.map((value) => make("option", { value })));
}

// Decisions

const shown = new Map(); // decision key -> its <details>

const COLUMNS = ["Instance", "", "T, s", "KV", "w", "Load before", "Load after", "", "In flight"];
// What a policy that estimates (finish-time) tells beside, where it does.
const ESTIMATES = [["First token, s", "ttft_s"], ["Latency, s", "latency_s"], ["Delay, s", "delay_s"], ["Memory, s", "memory_price_s"], ["Late, s", "late_price_s"], ["Cost", "cost_s"]];

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
      make("span", { className: "sentence" }, decision.reason),
      make("span", { className: "what muted" }, `${decision.model}, ${tokens}${times}`)),
    body);
  details.addEventListener("toggle", () => {
    if (details.open && !body.children.length) loadCandidates(decision, body);
  });
  return details;
}

async function loadCandidates(decision, body) {
  const id = make("p", { className: "note" }, "Request ", make("code", {}, decision.request_id));
  body.replaceChildren(id);
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
    if (keep.has(key) || details.open || details.contains(document.activeElement)) continue;
    details.remove();
    shown.delete(key);
  }
  byId("no-decisions").hidden = shown.size > 0;
}

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

// Polling

let timer;
let running = false;
let paused = false;
let answeredAt = null;

function setLive(state, text) {
  byId("live").dataset.state = state;
  setText(byId("live"), text);
}

function showOnly(id) {
  for (const other of ["key-form", "off"]) byId(other).hidden = other !== id;
  if (id) byId("main").hidden = true;
}

function showAnswer(instances, decisions) {
  answeredAt = Date.now();
  showOnly(null);
  byId("main").hidden = false;
  byId("banner").hidden = true;
  document.body.classList.remove("stale");
  byId("forget").hidden = !sessionStorage.getItem(KEY_NAME);
  byId("policy").hidden = false;
  setText(byId("policy"), `policy ${instances.policy}`);
  setLive("live", instances.draining ? "live, the gateway is draining" : "live");
  showInstances(instances.instances, instances.queue, instances.sharing);
  showDecisions(decisions.decisions);
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
  return POLL_MS;
}

async function poll() {
  clearTimeout(timer);
  if (running || paused || document.hidden) return;
  running = true;
  const started = performance.now();
  let wait = POLL_MS;
  try {
    showAnswer(...(await Promise.all([
      ask("instances"),
      ask(`decisions?limit=${DECISIONS}&candidates=false`),
    ])));
    wait = Math.max(200, POLL_MS - (performance.now() - started));
  } catch (error) {
    wait = showProblem(error);
  }
  running = false;
  if (wait !== null) timer = setTimeout(poll, wait);
}

byId("pause").addEventListener("click", () => {
  paused = !paused;
  byId("pause").setAttribute("aria-pressed", String(paused));
  if (paused) setLive("wait", "paused");
  poll();
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
  poll();
});

byId("forget").addEventListener("click", () => {
  sessionStorage.removeItem(KEY_NAME);
  byId("forget").hidden = true;
  byId("main").hidden = true;
  poll();
});

document.addEventListener("visibilitychange", poll);
poll();
