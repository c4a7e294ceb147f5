import { form, h, halves, picture, small, t } from "../core.js";
import { LINE, SECTOR, coalescing, indexOf, layout as place } from "../math/machine.js";
import { readouts } from "../stage.js";
import { Panel } from "../touch.js";

const SHAPES = { "2x3": [2, 3], "2x4x3": [2, 4, 3] };
const VIEWS = ["same", "transpose", "flat"];

export const layout = {
  id: "layout",
  follows: ["text"],
  defaults: { part: "layout", shape: "k", view: "transpose", pattern: "thread", wide: 64, itemsize: 4, instant: 0 },
  controls: [
    { kind: "choice", key: "part", label: "layout.part", names: "layout.part", options: ["layout", "coalescing"] },
    { kind: "choice", key: "shape", label: "layout.shape", options: ["k", ...Object.keys(SHAPES)], names: "layout.shape", when: (s) => s.part === "layout" },
    { kind: "choice", key: "view", label: "layout.view", names: "layout.view", options: VIEWS, when: (s) => s.part === "layout" },
    { kind: "choice", key: "pattern", label: "layout.pattern", names: "layout.pattern", options: ["warp", "thread"], when: (s) => s.part === "coalescing" },
    { kind: "range", key: "wide", label: "layout.columns", values: [1, 2, 4, 8, 16, 32, 64, 128, 1024, 4096], when: (s) => s.part === "coalescing" },
    { kind: "choice", key: "itemsize", label: "layout.itemsize", options: [2, 4], when: (s) => s.part === "coalescing" },
    { kind: "range", key: "instant", label: "layout.instant", min: 0, max: 7, when: (s) => s.part === "coalescing" },
  ],
  compute(one, { part, shape, view, pattern, wide, itemsize, instant }) {
    if (part === "coalescing") return coalescing({ pattern, columns: wide, itemsize, instant });
    const sizes = SHAPES[shape] ?? [one.n, one.k[0].length];
    const count = sizes.reduce((a, b) => a * b, 1);
    const values = SHAPES[shape] ? Array.from({ length: count }, (_, i) => String.fromCharCode(65 + i)) : one.k.flat().map((x) => form.short(x));
    return { ...place(sizes, view === "flat" ? [count] : view), values, words: SHAPES[shape] ? null : one.words };
  },
  draw(figure, data, state) {
    figure.replaceChildren(...(data.offsets ? strides(figure, data, state) : lines(figure, data, state)));
  },
};

const tint = (offset, total) => `color-mix(in oklab, var(--s0) ${100 - (100 * offset) / Math.max(1, total - 1)}%, var(--s2))`;
const list = (xs) => `[${xs.join(", ")}]`;

function strides(figure, data, state) {
  const total = data.offsets.length;
  const panel = new Panel("layout");
  const [wide] = halves(1);
  const cell = (svg, x, y, width, height, offset, at, where) => {
    const g = svg.append("g").attr("data-element", `${where} ${at}`);
    g.append("rect").attr("class", "tile").attr("x", x + 1).attr("y", y + 1).attr("width", width - 2).attr("height", height - 2).attr("rx", 4).attr("fill", tint(offset, total));
    if (width > 26) g.append("text").attr("class", "middle tiny strong").attr("x", x + width / 2).attr("y", y + height / 2 + 4).style("fill", "var(--card)").text(data.values[offset]);
    panel.add(g, { key: `${where} ${at}`, label: t("layout.element", { index: list(indexOf(data.shape, at)) }) + ` ${offset}`, tell: () => told(data, at), press: () => mark(at) });
    g.node().addEventListener("pointerenter", () => mark(at));
    g.node().addEventListener("focus", () => mark(at));
  };
  const marked = [];
  const mark = (at) => {
    for (const node of marked.splice(0)) node.classList.remove("same");
    for (const where of ["view", "memory"]) {
      const node = figure.querySelector(`[data-element="${where} ${at}"]`);
      node?.classList.add("same");
      if (node) marked.push(node);
    }
    figure.querySelectorAll("[data-path]").forEach((path) => path.classList.toggle("same", [at, at + 1].includes(Number(path.dataset.path))));
  };

  const pages = data.shape.slice(0, -2).reduce((a, b) => a * b, 1);
  const [rows, columns] = [data.shape.at(-2) ?? 1, data.shape.at(-1)];
  const gap = pages > 1 ? 20 : 0;
  const size = Math.max(9, Math.min(46, Math.floor((wide - (pages - 1) * gap) / (pages * columns))));
  const logical = h("div", {});
  const tall = Math.max(22, Math.min(size, 36));
  const view = picture(logical, pages * columns * size + (pages - 1) * gap, rows * tall + 6, t("layout.logical"), "group");
  data.offsets.forEach((offset, i) => {
    const [page, row, column] = [Math.floor(i / (rows * columns)), Math.floor(i / columns) % rows, i % columns];
    cell(view, page * (columns * size + gap) + column * size, row * tall + 3, size, tall, offset, i, "view");
  });

  const strip = h("div", {});
  const perLine = small() ? Math.min(total, 12) : Math.min(total, 24);
  const unit = Math.min(44, Math.floor(wide / perLine));
  const high = 74;
  const memory = picture(strip, perLine * unit, Math.ceil(total / perLine) * high, t("layout.memory"), "group");
  const centre = (offset) => [(offset % perLine) * unit + unit / 2, Math.floor(offset / perLine) * high + 30];
  data.offsets.slice(1).forEach((offset, i) => {
    const [[x, y], [x0, y0]] = [centre(offset), centre(data.offsets[i])];
    const rise = Math.min(26, 8 + Math.abs(x - x0) / 6);
    memory.append("path").attr("data-path", i + 1).attr("class", `hop ${y === y0 ? "" : "far"}`).attr("d", y === y0 ? `M${x0} ${y0}Q${(x + x0) / 2} ${y0 - rise * 2} ${x} ${y}` : `M${x0} ${y0}L${x} ${y}`);
  });
  data.offsets.forEach((offset, i) => {
    const [x, y] = centre(offset);
    cell(memory, x - unit / 2, y, unit, 28, offset, i, "memory");
    memory.append("text").attr("class", "tick middle tiny").attr("x", x).attr("y", y + 41).text(offset);
  });
  panel.begin("view 1");
  return [
    readouts([
      ["layout.shape.now", list(data.shape), "shape"],
      ["layout.strides", list(data.strides), "strides"],
      ["layout.contiguous", t(data.contiguous ? "yes" : "no"), "contiguous", data.contiguous ? "good" : "bad"],
      ["layout.copies", t(data.contiguous ? "no" : "yes"), "copies"],
    ]),
    h("p.small", {}, t("layout.logical")), logical,
    h("div.short", {}, panel.node),
    h("p.small", {}, t("layout.memory")), strip,
  ];
}

function told(data, at) {
  const index = indexOf(data.shape, at);
  const sum = index.map((i, axis) => `${i}·<span class="c">${data.strides[axis]}</span>`).join(" + ");
  const row = data.words?.[Math.floor(data.offsets[at] / 4)];
  return [
    h("p.formula", { html: `${t("layout.element", { index: list(index) })} ${sum} = <b data-value="offset">${data.offsets[at]}</b>` }),
    h("p.small", {}, row ? t("layout.value", { word: row, c: (data.offsets[at] % 4) + 1, x: data.values[data.offsets[at]] }) : data.values[data.offsets[at]]),
  ];
}

function lines(figure, data, state) {
  const { itemsize } = state;
  const numbers = [...new Set(data.elements.flatMap((e) => [Math.floor((e * itemsize) / LINE), Math.floor(((e + 1) * itemsize - 1) / LINE)]))].sort((a, b) => a - b);
  const [width] = halves(1);
  const panel = new Panel("coalescing");
  const node = h("div", {});
  const per = small() ? 2 : 4;
  const [box, top, lead] = [width / per, small() ? 96 : 80, 38];
  const svg = picture(node, width, top + Math.ceil(numbers.length / per) * 36 + 4, t("layout.lines"), "group");
  const hue = (lane) => `color-mix(in oklab, var(--s0) ${100 - (100 * lane) / 31}%, var(--s2))`;
  const at = (byte) => {
    const i = numbers.indexOf(Math.floor(byte / LINE));
    return [(i % per) * box + lead + ((byte % LINE) / LINE) * (box - lead - 10), top + Math.floor(i / per) * 36];
  };
  numbers.forEach((number, i) => {
    const [x, y] = [(i % per) * box, top + Math.floor(i / per) * 36];
    svg.append("text").attr("class", "tick end").attr("x", x + lead - 4).attr("y", y + 17).text(number);
    for (let s = 0; s < LINE / SECTOR; s++) {
      const from = number * LINE + s * SECTOR;
      const used = data.elements.some((e) => e * itemsize < from + SECTOR && (e + 1) * itemsize > from);
      const wide = (box - lead - 10) / (LINE / SECTOR);
      svg.append("rect").attr("x", x + lead + s * wide).attr("y", y).attr("width", wide - 2).attr("height", 24).attr("rx", 4)
        .attr("fill", used ? "var(--s2w)" : "var(--wash)").attr("stroke", used ? "var(--s2)" : "none").attr("stroke-opacity", 0.5);
    }
  });
  const lanes = small() ? 16 : 32;
  data.elements.forEach((element, lane) => {
    const [x, y0] = [((lane % lanes) + 0.5) * (width / lanes), Math.floor(lane / lanes) * 26];
    const [to, y] = at(element * itemsize);
    const wide = Math.max(2, ((box - lead - 10) * itemsize) / LINE - 0.8);
    svg.append("line").attr("class", "ray").attr("data-lane", lane).attr("x1", x).attr("y1", y0 + 24).attr("x2", to + wide / 2).attr("y2", y).attr("stroke", hue(lane)).attr("opacity", numbers.length > 8 ? 0.28 : 0.45);
    svg.append("rect").attr("x", to).attr("y", y).attr("width", wide).attr("height", 24).attr("fill", hue(lane)).attr("pointer-events", "none");
    const g = svg.append("g");
    g.append("rect").attr("class", "tile").attr("x", x - width / lanes / 2 + 1).attr("y", y0 + 2).attr("width", width / lanes - 2).attr("height", 22).attr("rx", 4).attr("fill", hue(lane));
    g.append("text").attr("class", "middle tiny").style("fill", "var(--card)").attr("x", x).attr("y", y0 + 17).text(lane);
    const lit = () => svg.selectAll(".ray").classed("same", false).filter(`[data-lane="${lane}"]`).classed("same", true);
    g.node().addEventListener("pointerenter", lit);
    g.node().addEventListener("focus", lit);
    panel.add(g, { key: lane, label: t("layout.lane", { lane, element }), tell: () => [h("p.phase", {}, t("layout.lane", { lane, element })), h("p.small", {}, t("layout.lane.where", { byte: element * itemsize, line: Math.floor((element * itemsize) / LINE) }))] });
  });
  panel.begin(0);
  return [
    readouts([
      ["layout.touched", `${data.lines}`, "lines", data.lines > 2 ? "bad" : "good"],
      ["layout.sectors", `${data.sectors}`, "sectors"],
      ["layout.efficiency", form.percent(data.efficiency), "efficiency", data.efficiency < 0.6 ? "bad" : "good"],
    ]),
    h("p.small", {}, t("layout.lines")),
    node,
    h("div.short", {}, panel.node),
  ];
}
