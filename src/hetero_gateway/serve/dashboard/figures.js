// What all parts of the page use: elements, figures as text, questions to /admin. Everything that is
// shown is written as text: ids, model names and reasons come from outside, so nothing here builds
// markup from a string (the page's Content-Security-Policy refuses it, too).

const REQUEST_TIMEOUT_MS = 5000;
export const KEY_NAME = "hetero-gateway-admin-key";

export const byId = (id) => document.getElementById(id);

/** An element with properties and children; strings become text nodes. */
export function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function setWidth(fill, share) {
  const width = `${(Math.min(1, Math.max(0, share || 0)) * 100).toFixed(2)}%`;
  if (fill.style.width !== width) fill.style.width = width;
}

export function makeBar(kind = "") {
  const fill = make("i");
  return { bar: make("div", { className: `bar ${kind}` }, fill), fill };
}

/** Rows of cells, each a string, an element, or [string or element, class]. */
export function showRows(body, rows) {
  body.replaceChildren(...rows.map((cells) => make("tr", {}, ...cells.map((cell) => {
    const [content, className] = Array.isArray(cell) ? cell : [cell, ""];
    return make("td", { className }, content);
  }))));
}

// Figures

const SMALLEST_MS = 0.1;
export const grouped = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
export const clock = new Intl.DateTimeFormat(undefined, { timeStyle: "medium", hour12: false });

export function figure(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  if (Math.abs(value) >= 1000) return grouped.format(value);
  const decimals = Math.max(0, 2 - Math.floor(Math.log10(Math.abs(value))));
  return value.toFixed(Math.min(decimals, 9));
}

export function percent(value) {
  if (value === null || value === undefined) return "–";
  const hundredths = value * 100;
  return `${hundredths > 0 && hundredths < 10 ? hundredths.toFixed(1) : hundredths.toFixed(0)} %`;
}

export function rate(value) {
  if (value === null || value === undefined) return "–";
  return value >= 100 ? grouped.format(value) : value === 0 ? "0" : String(Number(value.toPrecision(2)));
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value !== 0 && value * 1000 < SMALLEST_MS) return `< ${SMALLEST_MS} ms`;
  if (value < 0.995) return `${Number((value * 1000).toPrecision(2))} ms`; // above, it would be "1000 ms"
  return `${value >= 100 ? grouped.format(value) : Number(value.toPrecision(2))} s`;
}

/** How many times: two digits that count. */
export function times(value) {
  if (value === null || value === undefined) return "–";
  return `${value >= 10 ? value.toFixed(0) : value >= 1.95 ? value.toFixed(1) : value.toFixed(2)}×`;
}

export function age(unixSeconds) {
  const passed = Math.max(0, Date.now() / 1000 - unixSeconds);
  if (passed < 90) return `${passed.toFixed(0)} s`;
  return passed < 5400 ? `${(passed / 60).toFixed(0)} min` : `${(passed / 3600).toFixed(0)} h`;
}

// Talking to /admin

export class Closed extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function withKey(headers = {}) {
  const key = sessionStorage.getItem(KEY_NAME);
  return key ? { ...headers, authorization: `Bearer ${key}` } : headers;
}

export async function refusalOf(response) {
  const body = await response.json().catch(() => ({}));
  return new Closed(response.status, body.error?.message ?? `status ${response.status}`);
}

export async function ask(path, options = {}) {
  const response = await fetch(`admin/${path}`, {
    ...options,
    headers: withKey(options.headers),
    cache: "no-store",
    signal: AbortSignal.timeout(REQUEST_TIMEOUT_MS),
  });
  if (!response.ok) throw await refusalOf(response);
  return response.json();
}
