// Requests: the last ones with what was predicted of them, the page of one, and "where would it go".

import { ask, byId, clock, figure, grouped, make, makeBar, percent, seconds, setText, setWidth, times } from "./figures.js";

const EVERY_MS = 2000;
const SHOWN = 40; // as many as a tall screen has room for
// As predicted, within this: no colour.
const NEAR = 1.5;
// At least so far off, in seconds: less is HTTP's own time, and nobody's mistake.
const NOTICED_S = 0.05;
const WAITS = [["queue_s", "queue"], ["prefill_s", "prefill"], ["network_s", "network"], ["retry_s", "retry"]];

// Candidates

const COLUMNS = ["Instance", "", "T, s", "KV", "w", "Load before", "Load after", "", "In flight"];
// What a policy that estimates (finish-time) reports beside, where it does.
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

// What a first token is waited for

/** A bar of the parts of a TTFT, and what each is; ``waits`` null: nothing streamed. */
export function waitBar(waits) {
  const bar = make("div", { className: "waitbar" });
  const legend = make("p", { className: "legend" });
  for (const [key, name] of WAITS) {
    const part = make("i", { className: `of-${name}` });
    setWidth(part, waits?.ttft_s ? waits[key] / waits.ttft_s : 0);
    bar.append(part);
    legend.append(make("span", { className: `of-${name}` }, `${name} `, make("b", {}, waits ? seconds(waits[key]) : "–")));
  }
  return [bar, legend];
}

// The last requests

function ratioOf(predicted, measured) {
  return predicted && measured !== null && measured !== undefined ? measured / predicted : null;
}

/** [text, class] of how long something took beside what was predicted. */
function beside(predicted, measured) {
  const ratio = ratioOf(predicted, measured);
  const noticed = ratio !== null && Math.abs(measured - predicted) > NOTICED_S;
  const late = noticed && ratio > NEAR;
  const early = noticed && ratio < 1 / NEAR;
  return [`${seconds(predicted)} → ${seconds(measured)}`, late ? "late" : early ? "early" : ""];
}

function outcomeText({ outcome, status, retries }) {
  const again = retries ? ` after ${retries} failed` : "";
  if (outcome === "completed") return `ok${again}`;
  return `${status ? `${status} ` : ""}${outcome.replaceAll("_", " ")}${again}`;
}

const link = (id, text = id) => make("a", { href: `#request=${encodeURIComponent(id)}`, title: id }, text);

function lastRow(decision) {
  const { outcome, predicted } = decision;
  const failed = outcome.outcome !== "completed" && outcome.outcome !== "client_disconnected";
  const cells = [
    [link(decision.request_id, clock.format(decision.time * 1000)), "when"],
    [decision.chosen, "where"],
    outcome.ttft_s === null ? ["–", ""] : beside(predicted.ttft_s, outcome.ttft_s),
    beside(predicted.latency_s, outcome.latency_s),
    [outcomeText(outcome), failed ? "late" : ""],
  ];
  const row = make("tr", { title: decision.reason }, ...cells.map(([content, className]) => make("td", { className }, content)));
  row.dataset.key = `${decision.time} ${decision.request_id}`;
  return row;
}

let timer;

/** Ask for the last requests again and again, as long as ``looks`` says so. */
export async function pollLast(looks) {
  clearTimeout(timer);
  if (!looks()) return;
  try {
    const { decisions } = await ask(`decisions?limit=${SHOWN}&candidates=false&over=true`);
    const body = byId("last");
    if (!body.contains(document.activeElement) && body.dataset.newest !== String(decisions[0]?.time)) {
      body.dataset.newest = String(decisions[0]?.time);
      body.replaceChildren(...decisions.map(lastRow));
    }
    byId("no-decisions").hidden = decisions.length > 0;
  } catch {
    // The stream shows what is wrong.
  }
  timer = setTimeout(pollLast, EVERY_MS, looks);
}

// The page of one request

function fact(name, content) {
  return make("div", {}, make("dt", {}, name), make("dd", {}, content));
}

function predictedTable(attempt) {
  const { predicted, outcome } = attempt;
  const rows = [
    ["First token", predicted.ttft_s, outcome?.ttft_s ?? null, seconds],
    ["Latency", predicted.latency_s, outcome?.latency_s ?? null, seconds],
    ["Output tokens", attempt.predicted_output_tokens, outcome?.output_tokens ?? null, (value) => (value === null ? "–" : grouped.format(value))],
  ];
  const head = ["", "Predicted", "Measured", "Ratio"].map((name) => make("th", { scope: "col" }, name));
  return make("table", { className: "narrow" }, make("thead", {}, make("tr", {}, ...head)),
    make("tbody", {}, ...rows.map(([name, before, after, text]) => make("tr", {},
      make("th", { scope: "row" }, name), make("td", {}, text(before)), make("td", {}, text(after)),
      make("td", {}, times(ratioOf(before, after)))))));
}

function attemptParts(attempt, number, count) {
  const again = make("button", { type: "button" }, "Where would it go now?");
  again.addEventListener("click", () => {
    location.hash = "";
    byId("prompt-tokens").value = attempt.prompt_tokens;
    byId("max-tokens").value = "";
    byId("model").value = attempt.model;
    byId("explain-panel").open = true;
    byId("explain").requestSubmit();
    byId("explain-panel").scrollIntoView({ block: "nearest" });
  });
  const title = count > 1 ? `Attempt ${number} of ${count}` : "Its decision";
  const failed = attempt.failed
    ? [make("p", { className: "why" }, `It failed after ${seconds(attempt.failed.after_s)}: ${attempt.failed.reason}.`)]
    : [];
  return make("section", { className: "panel" },
    make("div", { className: "title" }, make("h2", {}, title),
      make("p", { className: "note" }, `${clock.format(attempt.time * 1000)}, ${attempt.model}, ${grouped.format(attempt.prompt_tokens)} prompt tokens`)),
    make("p", { className: "sentence" }, attempt.reason), ...failed,
    predictedTable(attempt), candidateTable(attempt.candidates, attempt.chosen), again);
}

export async function showRequest(id) {
  const target = byId("request-parts");
  setText(byId("request-name"), id);
  target.replaceChildren(make("p", { className: "empty" }, "…"));
  try {
    const found = await ask(`requests/${encodeURIComponent(id)}`);
    const { outcome } = found;
    const away = found.turned_away.map((each) => each.reason.replaceAll("_", " ")).join(", ");
    const facts = outcome === null
      ? [fact("What came of it", away ? `turned away: ${away}` : "it is not over")]
      : [
        fact("What came of it", outcomeText(outcome)),
        fact("In all", seconds(outcome.total_s)),
        fact("Client", outcome.client ?? "no key"),
        fact("Tokens in, out", `${outcome.input_tokens === null ? "–" : grouped.format(outcome.input_tokens)}, ${outcome.output_tokens === null ? "–" : grouped.format(outcome.output_tokens)}`),
      ];
    const first = found.first_token === null ? [] : [make("section", { className: "panel" },
      make("div", { className: "title" }, make("h2", {}, "What its first byte was waited for"),
        make("p", { className: "note" }, seconds(found.first_token.ttft_s))),
      ...waitBar(found.first_token))];
    target.replaceChildren(make("dl", { className: "summary" }, ...facts), ...first,
      ...found.attempts.map((attempt, i) => attemptParts(attempt, i + 1, found.attempts.length)));
  } catch (error) {
    target.replaceChildren(make("p", { className: "empty" }, error.message));
  }
}

byId("find").addEventListener("submit", (event) => {
  event.preventDefault();
  const id = byId("request-id").value.trim();
  if (id) location.hash = `request=${encodeURIComponent(id)}`;
});

// Where would a request go?

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
