// The matrix of scores with Q, K, V and O around it: one step of a trace, every block of it touchable.
import { scaleLinear } from "d3-scale";
import { below, form, h, picture, t } from "../core.js";
import { draggable } from "../touch.js";

const HUE = { q: "--s0", dq: "--s0", k: "--s1", dk: "--s1", v: "--s2", dv: "--s2", o: "--s3", do: "--s3" };
export const hue = (name) => `var(${HUE[name] ?? "--soft"})`;
export const NAMES = { q: "Q", k: "K", v: "V", o: "O", do: "dO", dq: "dQ", dk: "dK", dv: "dV", m: "m", l: "l", lse: "lse", delta: "δ", p: "P", ds: "dS", s: "S", dp: "dP" };
export const block = ([name, i]) => (name === "p" || name === "ds" ? NAMES[name] : `${NAMES[name]}${below(i + 1)}`);
export const chips = (blocks) => h("span.chips", {}, blocks.map((one) => h("i", { style: `--hue:${hue(one[0])}` }, block(one))));
const inputs = new Set(["q", "k", "v", "do"]);

/** {trace, one, step, first}: `first` is the step of the trace at which this board's steps begin. */
export function board(width, { trace, one, step, first = 0 }, panel, set) {
  const now = trace.steps[first + step - 1];
  const both = first > 0;
  const [band, gap, thin] = [width < 420 ? (both ? 22 : 27) : 34, 5, 12];
  const sides = both ? 2 : 1;
  const [left, top] = [sides * (band + gap), sides * (band + gap)];
  const size = Math.min(460, width - 2 * left - gap - thin);
  const node = h("div", {});
  const svg = picture(node, Math.min(width, 2 * left + size + gap + thin), 2 * top + size, t("tiles.picture"), "group");
  const unit = scaleLinear([0, trace.sq], [0, size]);
  const past = trace.steps.slice(0, first + step);
  const written = new Set(past.flatMap(({ stores }) => stores.map(String)));
  const [loads, stores, resident] = ["loads", "stores", "resident"].map((what) => new Set((now?.[what] ?? []).map(String)));
  const span = (i, many, count) => [i * many, Math.min((i + 1) * many, count)];
  const [tall, wide] = [Math.ceil(trace.sq / trace.rows), Math.ceil(trace.sk / trace.columns)];

  const strip = (name, vertical, at, thick = band) => {
    for (let i = 0; i < (vertical ? tall : wide); i++) {
      const key = String([name, i]);
      const rows = vertical ? span(i, trace.rows, trace.sq) : span(i, trace.columns, trace.sk);
      const [from, to] = rows.map(unit);
      const here = resident.has(key);
      const there = inputs.has(name) || written.has(key);
      const g = svg.append("g");
      const rect = g.append("rect").attr("rx", 3).attr("fill", hue(name)).attr("fill-opacity", here ? 1 : there ? 0.3 : 0.1)
        .attr("stroke", stores.has(key) ? "var(--ink)" : loads.has(key) ? hue(name) : "none").attr("stroke-width", 3).attr("paint-order", "stroke");
      if (vertical) rect.attr("x", at).attr("width", thick).attr("y", top + from + 1).attr("height", to - from - 2);
      else rect.attr("y", at).attr("height", thick).attr("x", left + from + 1).attr("width", to - from - 2);
      if (to - from > 15 && thick > 20)
        g.append("text").attr("class", "middle tiny strong").style("fill", here ? "var(--card)" : hue(name))
          .attr("x", vertical ? at + thick / 2 : left + (from + to) / 2).attr("y", vertical ? top + (from + to) / 2 + 4 : at + thick / 2 + 4).text(block([name, i]));
      panel.add(g, {
        key, label: t("tiles.block.label", { block: block([name, i]), where: t(where(here, there)) }),
        tell: () => tellBlock(trace, one, name, i, rows, past, where(here, there)),
      });
    }
  };
  const near = gap + band;
  strip("k", false, top - near);
  strip("q", true, left - near);
  strip("v", false, top + size + gap);
  strip("o", true, left + size + gap);
  if (both) {
    strip("dk", false, top - 2 * near);
    strip("dq", true, left - 2 * near);
    strip("dv", false, top + size + gap + near);
    strip("do", true, left + size + gap + near);
  }
  strip("lse", true, left + size + gap + sides * near, thin);

  const skipped = new Set(trace.skipped.map(String));
  const done = new Set(past.slice(first).filter(({ i, j }) => i !== null && j !== null).map(({ i, j }) => String([i, j])));
  for (let i = 0; i < tall; i++)
    for (let j = 0; j < wide; j++) {
      const key = String([i, j]);
      const [[r0, r1], [c0, c1]] = [span(i, trace.rows, trace.sq), span(j, trace.columns, trace.sk)];
      const current = now?.i === i && now?.j === j;
      const g = svg.append("g");
      g.append("rect").attr("class", "tile").attr("x", left + unit(c0) + 1).attr("y", top + unit(r0) + 1).attr("width", unit(c1 - c0) - 2).attr("height", unit(r1 - r0) - 2).attr("rx", 3)
        .attr("data-tile", key)
        .attr("fill", skipped.has(key) ? "transparent" : current ? "var(--s4)" : done.has(key) ? "var(--done)" : "var(--wash)")
        .attr("stroke", skipped.has(key) ? "var(--faint)" : "none").attr("stroke-dasharray", "3 3");
      const of = trace.steps.findIndex((s, at) => at >= first && s.i === i && s.j === j);
      const cell = unit(1);
      if (current && cell >= 26)
        now.s.forEach((row, r) => row.forEach((x, c) =>
          g.append("text").attr("class", "middle tiny").style("fill", "var(--card)").attr("x", left + unit(c0 + c) + cell / 2).attr("y", top + unit(r0 + r) + cell / 2 + 4).text(form.fixed(x, cell > 40 ? 2 : Math.abs(x) < 9.95 ? 1 : 0))));
      panel.add(g, {
        key: `tile ${key}`, label: t("tiles.tile.label", { i: i + 1, j: j + 1, state: t(status(skipped.has(key), of - first + 1, step)) }),
        tell: () => tellTile(trace, one, { i, j, rows: [r0, r1], keys: [c0, c1], at: of - first + 1, step, current: trace.steps[of], skipped: skipped.has(key), first }),
        press: () => of >= 0 && set({ step: of - first + 1 }),
      });
    }
  for (let i = 0; i < trace.sq && trace.after !== null; i++)
    svg.append("rect").attr("x", left + unit(Math.min(trace.sk, i + trace.after + 1))).attr("width", size - unit(Math.min(trace.sk, i + trace.after + 1))).attr("y", top + unit(i)).attr("height", unit(1))
      .attr("fill", "var(--card)").attr("opacity", 0.72).attr("pointer-events", "none");
  for (const [key, horizontal, count] of [["columns", true, trace.sk], ["rows", false, trace.sq]]) {
    const at = unit(Math.min(trace[key], count));
    const grip = svg.append("circle").attr("class", "grip").attr("cx", horizontal ? left + at : left - gap / 2).attr("cy", horizontal ? top - gap / 2 : top + at).attr("r", 8)
      .style("cursor", horizontal ? "ew-resize" : "ns-resize");
    draggable(grip, {
      key: `${both ? "back" : "tiles"}-${key}`, label: t(`thread.${key}`), value: trace[key], min: 1, max: count,
      at: (event) => {
        const box = svg.node().getBoundingClientRect();
        return unit.invert(horizontal ? event.clientX - box.x - left : event.clientY - box.y - top);
      },
      set: (value) => set({ [key]: value }),
    });
  }
  panel.begin(now && now.i !== null && now.j !== null ? `tile ${now.i},${now.j}` : now ? String(now.stores[0] ?? "q,0") : "q,0");
  return node;
}

const where = (here, there) => (here ? (there ? "where.both" : "where.sram") : there ? "where.hbm" : "where.nowhere");
const status = (skipped, at, step) => (skipped ? "tile.skipped" : at > step ? "tile.later" : at === step ? "tile.now" : "tile.gone");

/** Numbers in rows, with heads; a column whose head begins with "|" is set apart. */
export function grid(heads, rows, named = {}) {
  return h("div.scroll", { tabindex: 0, role: "group", "aria-label": named.label },
    h("table.numbers", {}, h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col" }, head)))),
      h("tbody", {}, rows.map(([head, ...row]) => h("tr", {}, h("th", { scope: "row" }, head), row.map((x) => h("td", {}, typeof x === "number" ? form.fixed(x, 2) : x)))))));
}

function tellBlock(trace, one, name, i, [from, to], past, place) {
  const last = [...past].reverse().find((step) => (name === "o" || name === "lse" ? step.i : { dk: step.j, dv: step.j }[name] ?? step.i) === i && step[name]);
  const rows = inputs.has(name) ? one[name].slice(from, to) : last?.[name];
  const list = rows?.map((row) => [row].flat());
  return [
    h("p.phase", {}, t("tiles.block", { block: block([name, i]), from: from + 1, to })),
    h("p.small", {}, t(place), " ", place === "where.nowhere" ? "" : t(`holds.${name}`)),
    list ? grid([block([name, i]), ...list[0].map((_, c) => String(c + 1))], list.map((row, r) => [one.words[from + r], ...row]), { label: block([name, i]) }) : "",
  ];
}

function tellTile(trace, one, { i, j, rows, keys, at, step, current, skipped, first }) {
  const title = h("p.phase", {}, t("tiles.tile", { i: i + 1, j: j + 1, q0: rows[0] + 1, q1: rows[1], k0: keys[0] + 1, k1: keys[1] }));
  const told = h("p.small", {}, t(status(skipped, at, step), { at }));
  if (skipped) return [title, told];
  const words = one.words.slice(...rows);
  const heads = one.words.slice(...keys);
  const label = (name) => ({ label: name });
  if (first)
    return [
      title, told,
      grid([t("lives.p"), ...heads], words.map((word, r) => [word, ...current.p[r]]), label("P")),
      grid(["dP", ...heads], words.map((word, r) => [word, ...current.dp[r]]), label("dP")),
      grid(["dS", ...heads], words.map((word, r) => [word, ...current.ds[r]]), label("dS")),
      h("p.small", {}, t(current.phase === "key" ? "lives.key" : "lives.query")),
    ];
  return [
    title, told,
    grid(["S", ...heads, "m", "l"], words.map((word, r) => [word, ...current.s[r], current.m[r], current.l[r]]), label("S, m, l")),
    grid(["P", ...heads, t("tiles.factor")], words.map((word, r) => [word, ...current.p[r], current.factor[r]]), label("P")),
    grid(["O", ...current.o[0].map((_, c) => String(c + 1))], words.map((word, r) => [word, ...current.o[r]]), label("O")),
    h("p.small", {}, t(trace.order === "fa1" ? "lives.fa1" : "lives.fa2")),
  ];
}
