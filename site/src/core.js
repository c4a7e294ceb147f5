// What every widget is made of: elements, numbers, state in the URL, data from the library.
import { select } from "d3-selection";
import { words } from "./words/index.js";

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

/** An SVG of so many pixels, never scaled: its text is as large as it says. As a d3 selection. "group" if parts of it
    can be touched. */
export function picture(parent, width, height, title, role = "img") {
  return select(parent).append("svg").attr("width", width).attr("height", height).attr("role", role).attr("aria-label", title);
}

export const small = () => innerWidth < 760;

let wide = 0; // of every figure: measured once, since asking makes the browser lay out what was drawn so far
export const measure = (figure) => (wide = figure.clientWidth);

/** The widths of two columns side by side, the first with this share; on a phone, both are all there is. */
export const halves = (share) => {
  return small() ? [wide, wide] : [Math.floor((wide - 30) * share), Math.floor((wide - 30) * (1 - share))];
};

export const MINUS = "−";

/** Numbers as people read them; tests read them back from [data-value]. */
export const form = {
  fixed(x, digits = 6) {
    if (x === null || x === undefined) return "–";
    if (x === -Infinity) return `${MINUS}∞`;
    if (x === Infinity) return "∞";
    return x.toFixed(digits).replace("-", MINUS);
  },
  short(x) {
    if (!Number.isFinite(x)) return form.fixed(x);
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
    if (x < 1e-9) return "0 s";
    for (const [size, unit] of [[1, "s"], [1e-3, "ms"]])
      if (x >= size) return `${Number((x / size).toPrecision(3))} ${unit}`;
    return `${Number((x / 1e-6).toPrecision(3))} µs`;
  },
};

const sub = { 0: "₀", 1: "₁", 2: "₂", 3: "₃", 4: "₄", 5: "₅", 6: "₆", 7: "₇", 8: "₈", 9: "₉" };
export const below = (n) => String(n).replace(/\d/g, (digit) => sub[digit]);

// State: "#text=3+2+5+1&rows=2&tiles.step=4&lang=zh". What has its default value is not written; a key without a dot
// belongs to the example that all chapters share.

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

const named = (id, key) => (id ? `${id}.${key}` : key);

export function read(id, defaults) {
  return Object.fromEntries(
    Object.entries(defaults).map(([key, value]) => {
      const found = address.get(named(id, key));
      if (found === null) return [key, value];
      if (typeof value === "number") return [key, Number.isFinite(Number(found)) ? Number(found) : value];
      return [key, found];
    }),
  );
}

export function write(id, defaults, patch) {
  remember(
    Object.fromEntries(
      Object.entries(patch).map(([key, value]) => [named(id, key), String(value) === String(defaults[key]) ? null : value]),
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

// What the browser does not compute: the cost model, the emulated kernel, plans for many GPUs. The library answers, now
// (a server) or when this page was written (a copy); both offer the same choices.

const copy = window.TILEWISE;
export const offline = Boolean(copy);
const answers = new Map();

export function ask(endpoint, params = {}) {
  const key = `${endpoint}?${Object.keys(params).sort().map((name) => `${name}=${params[name]}`).join("&")}`;
  if (offline) {
    if (!(key in copy)) throw new Error(t("offline.missing"));
    return copy[key];
  }
  if (!answers.has(key)) {
    const coming = fromServer(endpoint, params);
    answers.set(key, coming);
    coming.then((found) => answers.set(key, found), () => answers.delete(key));
  }
  return answers.get(key);
}

async function fromServer(endpoint, params) {
  let response;
  try {
    response = await fetch(`data/${endpoint}?${new URLSearchParams(params)}`);
  } catch {
    throw new Error(t("server.gone"));
  }
  const body = await response.json();
  if (!response.ok) throw new Error(body.error);
  return body;
}
