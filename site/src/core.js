// What every widget is made of: elements, numbers, state in the URL, data from the library.
import { select } from "d3-selection";
import { words } from "./words.js";

/** h("p.note", {title: "x"}, "text", child): an HTML element. */
export function h(tag, props = {}, ...children) {
  const [name, ...classes] = tag.split(".");
  const node = document.createElement(name || "div");
  if (classes.length) node.className = classes.join(" ");
  for (const [key, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "html") node.innerHTML = value;
    else if (key === "value" || key === "checked" || key === "disabled") node[key] = value;
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat(9).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** An SVG of a given view box, as a d3 selection. */
export function picture(parent, width, height, title) {
  return select(parent)
    .append("svg")
    .attr("viewBox", `0 0 ${width} ${height}`)
    .attr("role", "img")
    .attr("aria-label", title);
}

/** The width of a wide picture: its text must stay readable on a phone. */
export const small = () => innerWidth < 640;
export const room = () => (small() ? 400 : 760);

export const MINUS = "−";

/** Numbers as people read them; tests read them back from [data-value]. */
export const form = {
  fixed(x, digits = 6) {
    if (x === null || x === undefined) return "–";
    if (x === "-inf") return `${MINUS}∞`;
    if (x === "inf") return "∞";
    if (x === "nan") return "NaN";
    return x.toFixed(digits).replace("-", MINUS);
  },
  short(x) {
    if (typeof x !== "number") return form.fixed(x);
    const size = Math.abs(x);
    if (x !== 0 && (size < 1e-3 || size >= 1e6)) return x.toExponential(2).replace(/-/g, MINUS);
    return String(Number(x.toPrecision(4))).replace("-", MINUS);
  },
  count: (x) => x.toLocaleString("en-US"),
  percent: (x, digits = 1) => `${(100 * x).toFixed(digits)} %`,
  bytes(x) {
    for (const [size, unit] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]])
      if (x >= size) return `${Number((x / size).toPrecision(3))} ${unit}`;
    return `${x} B`;
  },
  si(x, unit) {
    for (const [size, prefix] of [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]])
      if (x >= size) return `${Number((x / size).toPrecision(3))} ${prefix}${unit}`;
    return `${Number(x.toPrecision(3))} ${unit}`;
  },
  seconds(x) {
    for (const [size, unit] of [[1, "s"], [1e-3, "ms"]])
      if (x >= size) return `${Number((x / size).toPrecision(3))} ${unit}`;
    return `${Number((x / 1e-6).toPrecision(3))} µs`;
  },
};

const sub = { 0: "₀", 1: "₁", 2: "₂", 3: "₃", 4: "₄", 5: "₅", 6: "₆", 7: "₇", 8: "₈", 9: "₉" };
export const below = (n) => String(n).replace(/\d/g, (digit) => sub[digit]);

// State: "#at=tiles&tiles.bq=4&lang=zh". What has its default value is not written.

export const address = new URLSearchParams(location.hash.slice(1));
const listeners = new Set();

export function remember(changes, { quiet = false } = {}) {
  for (const [key, value] of Object.entries(changes))
    if (value === null) address.delete(key);
    else address.set(key, value);
  const written = address.toString().replace(/%2C/g, ",").replace(/%3A/g, ":");
  history.replaceState(null, "", written ? `#${written}` : location.pathname + location.search);
  if (!quiet) listeners.forEach((listener) => listener());
}

export const onAddress = (listener) => listeners.add(listener);

addEventListener("hashchange", () => {
  const now = new URLSearchParams(location.hash.slice(1));
  [...address.keys()].forEach((key) => address.delete(key));
  now.forEach((value, key) => address.set(key, value));
  listeners.forEach((listener) => listener());
});

export function read(id, defaults) {
  return Object.fromEntries(
    Object.entries(defaults).map(([key, value]) => {
      const found = address.get(`${id}.${key}`);
      if (found === null) return [key, value];
      if (typeof value === "number") return [key, Number.isFinite(Number(found)) ? Number(found) : value];
      return [key, found];
    }),
  );
}

export function write(id, defaults, patch) {
  remember(
    Object.fromEntries(
      Object.entries(patch).map(([key, value]) => [`${id}.${key}`, String(value) === String(defaults[key]) ? null : value]),
    ),
    { quiet: true },
  );
}

// Words

export const language = () => address.get("lang") || (navigator.language.startsWith("zh") ? "zh" : "en");
export function t(key, values = {}) {
  const text = words[key];
  if (!text) throw new Error(`no words for ${key}`);
  return text[language() === "zh" ? 1 : 0].replace(/\{(\w+)\}/g, (_, name) => values[name]);
}

// Data: computed by the library, now (a server) or when this page was written (a copy).

const copy = window.TILEWISE;
export const offline = Boolean(copy);
export const choices = (endpoint, key) => copy?.grid[endpoint]?.[key];
const answers = new Map();

export class NotHere extends Error {}

export async function ask(endpoint, params) {
  const query = Object.keys(params).sort().map((key) => `${key}=${params[key]}`).join("&");
  const key = `${endpoint}?${query}`;
  if (!answers.has(key)) answers.set(key, offline ? fromCopy(key) : fromServer(endpoint, params));
  return answers.get(key);
}

async function fromCopy(key) {
  const found = copy.answers[key];
  if (found === undefined) throw new NotHere(key);
  return found;
}

async function fromServer(endpoint, params) {
  const response = await fetch(`data/${endpoint}?${new URLSearchParams(params)}`);
  const body = await response.json();
  if (!response.ok) throw new Error(body.error);
  return body;
}
