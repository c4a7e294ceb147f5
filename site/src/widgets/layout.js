import { form, h, picture, room, small, t } from "../core.js";
import { readouts } from "../stage.js";

const VIEWS = { 7: ["same"], "2x3": ["same", "transpose", "3x2", "6"], "2x4x3": ["same", "transpose", "8x3", "4x6"], "4x6": ["same", "transpose", "6x4", "24"] };

export const layout = {
  id: "layout",
  endpoint: "coalescing",
  defaults: { part: "layout", shape: "2x3", view: "transpose", at: 1, pattern: "thread", columns: 64, itemsize: 4, instant: 0 },
  controls: [
    { kind: "choice", key: "part", label: "layout.part", names: "layout.part", options: ["layout", "coalescing"] },
    { kind: "choice", key: "shape", label: "layout.shape", options: Object.keys(VIEWS), names: "layout.shape", also: { view: "same", at: 0 }, when: (s) => s.part === "layout" },
    ...Object.entries(VIEWS).map(([shape, options]) => ({
      kind: "choice", key: "view", free: true, group: shape, label: "layout.view", names: "layout.view", options, when: (s) => s.part === "layout" && s.shape === shape && options.length > 1,
    })),
    { kind: "choice", key: "pattern", label: "layout.pattern", names: "layout.pattern", options: ["warp", "thread"], when: (s) => s.part === "coalescing" },
    { kind: "range", key: "columns", label: "layout.columns", values: [1, 2, 4, 8, 16, 32, 64, 128, 1024, 4096], when: (s) => s.part === "coalescing" },
    { kind: "choice", key: "itemsize", label: "layout.itemsize", options: [2, 4], when: (s) => s.part === "coalescing" },
    { kind: "range", key: "instant", label: "layout.instant", min: 0, max: 7, when: (s) => s.part === "coalescing" },
  ],
  async ask({ part, shape, view, pattern, columns, itemsize, instant }, ask) {
    const allowed = VIEWS[shape] ?? [];
    return part === "layout" ? ask("layout", { shape, view: allowed.includes(view) || !allowed.length ? view : "same" }) : ask("coalescing", { pattern, columns, itemsize, instant });
  },
  draw(figure, data, state, set) {
    figure.replaceChildren(...(data.offsets ? strides(data, state, set) : lines(data, state)));
  },
};

const tint = (offset, total) => `color-mix(in oklab, var(--s0) ${100 - (100 * offset) / Math.max(1, total - 1)}%, var(--s2))`;
const letter = (offset) => String.fromCharCode(65 + offset);

function strides(data, state, set) {
  const total = data.offsets.length;
  const at = Math.min(state.at, total - 1);
  const index = [];
  data.shape.reduceRight((rest, size) => (index.unshift(rest % size), Math.floor(rest / size)), at);
  const sum = index.map((i, axis) => `${i}·<span class="c">${data.strides[axis]}</span>`).join(" + ");
  const list = (xs) => `[${xs.join(", ")}]`;

  const cell = (svg, x, y, size, offset, logical) => {
    const chosen = logical === at;
    const g = svg.append("g").style("cursor", "pointer").on("click", () => set({ at: logical }));
    g.append("rect").attr("x", x).attr("y", y).attr("width", size - 4).attr("height", size - 4).attr("rx", 6).attr("fill", tint(offset, total))
      .attr("stroke", chosen ? "var(--ink)" : "none").attr("stroke-width", 3).attr("opacity", chosen ? 1 : 0.78);
    g.append("text").attr("class", "middle strong").attr("x", x + size / 2 - 2).attr("y", y + size / 2 + 3).style("fill", "var(--card)").style("font-size", size < 22 ? "9px" : null).text(letter(offset));
  };
  const pages = data.shape.slice(0, -2).reduce((a, b) => a * b, 1);
  const [rows, columns] = [data.shape.at(-2) ?? 1, data.shape.at(-1)];
  const size = columns > 12 ? 30 : 44;
  const logical = h("div", {});
  const wide = pages * columns * size + (pages - 1) * 26;
  const view = picture(logical, wide, rows * size + 8, t("layout.logical")).style("max-width", `${wide}px`);
  data.offsets.forEach((offset, i) => {
    const [page, row, column] = [Math.floor(i / (rows * columns)), Math.floor(i / columns) % rows, i % columns];
    cell(view, page * (columns * size + 26) + column * size + 2, row * size + 4, size, offset, i);
  });
  const strip = h("div", {});
  const unit = Math.min(44, (room() - 4) / total);
  const memory = picture(strip, total * unit, unit + 66, t("layout.memory")).style("max-width", `${total * unit}px`);
  const centre = (offset) => offset * unit + unit / 2;
  data.offsets.forEach((offset, i) => {
    cell(memory, offset * unit + 2, 46, unit, offset, i);
    if (unit > 18 || offset % 4 === 0) memory.append("text").attr("class", "tick middle").attr("x", centre(offset)).attr("y", 46 + unit + 14).text(offset);
    if (i && total <= 24) {
      const [from, to] = [centre(data.offsets[i - 1]), centre(offset)];
      const high = Math.min(40, 8 + Math.abs(to - from) / 5);
      memory.append("path").attr("d", `M${from} 44Q${(from + to) / 2} ${44 - high} ${to} 44`).attr("fill", "none")
        .attr("stroke", i === at || i === at + 1 ? "var(--ink)" : "var(--faint)").attr("stroke-width", i === at || i === at + 1 ? 2 : 1.2);
    }
  });
  return [
    readouts([
      ["layout.shape.now", list(data.shape), "shape"],
      ["layout.strides", list(data.strides), "strides"],
      ["layout.contiguous", t(data.contiguous ? "yes" : "no"), "contiguous", data.contiguous ? "good" : "bad"],
      ["layout.copies", t(data.torch.copies ? "yes" : "no"), "copies"],
    ]),
    h("p.formula", { html: `${t("layout.element", { index: list(index) })}: ${sum} = <b data-value="offset">${data.offsets[at]}</b>` }),
    h("p.small", {}, t("layout.logical")), logical,
    h("p.small", {}, t("layout.memory")), strip,
  ];
}

function lines(data, state) {
  const { itemsize } = state;
  const [line, sector] = [data.line, data.sector];
  const numbers = [...new Set(data.elements.flatMap((e) => [Math.floor((e * itemsize) / line), Math.floor(((e + 1) * itemsize - 1) / line)]))].sort((a, b) => a - b);
  const node = h("div", {});
  const width = room();
  const per = small() ? 2 : 4;
  const box = width / per;
  const top = 92;
  const svg = picture(node, width, top + Math.ceil(numbers.length / per) * 40 + 4, t("layout.lines"));
  const hue = (lane) => `color-mix(in oklab, var(--s0) ${100 - (100 * lane) / 31}%, var(--s2))`;
  const place = (byte) => {
    const i = numbers.indexOf(Math.floor(byte / line));
    return [(i % per) * box + 34 + ((byte % line) / line) * (box - 44), top + Math.floor(i / per) * 40];
  };
  numbers.forEach((number, i) => {
    const [x, y] = [(i % per) * box, top + Math.floor(i / per) * 40];
    svg.append("text").attr("class", "tick end").attr("x", x + 30).attr("y", y + 18).text(number);
    for (let s = 0; s < line / sector; s++) {
      const from = number * line + s * sector;
      const used = data.elements.some((e) => e * itemsize < from + sector && (e + 1) * itemsize > from);
      const wide = (box - 44) / (line / sector);
      svg.append("rect").attr("x", x + 34 + s * wide).attr("y", y).attr("width", wide - 2).attr("height", 26).attr("rx", 4)
        .attr("fill", used ? "var(--s2w)" : "var(--wash)").attr("stroke", used ? "var(--s2)" : "none").attr("stroke-opacity", 0.5);
    }
  });
  data.elements.forEach((element, lane) => {
    const x = (lane + 0.5) * (width / 32);
    const [to, y] = place(element * itemsize);
    const wide = ((box - 44) * itemsize) / line;
    svg.append("line").attr("x1", x).attr("y1", 30).attr("x2", to + wide / 2).attr("y2", y).attr("stroke", hue(lane)).attr("opacity", numbers.length > 8 ? 0.28 : 0.45);
    svg.append("rect").attr("x", to).attr("y", y).attr("width", Math.max(2, wide - 0.8)).attr("height", 26).attr("fill", hue(lane));
    svg.append("rect").attr("x", x - width / 76).attr("y", 8).attr("width", width / 38).attr("height", 22).attr("rx", 4).attr("fill", hue(lane));
    if (!small() || lane % 4 === 0) svg.append("text").attr("class", "middle").style("font-size", small() ? "9px" : "10.5px").style("fill", "var(--card)").attr("x", x).attr("y", 23).text(lane);
  });
  return [
    readouts([
      ["layout.touched", `${data.lines}`, "lines", data.lines > 2 ? "bad" : "good"],
      ["layout.sectors", `${data.sectors}`, "sectors"],
      ["layout.efficiency", form.percent(data.efficiency), "efficiency", data.efficiency < 0.6 ? "bad" : "good"],
    ]),
    h("p.small", {}, t("layout.lines")),
    node,
  ];
}
