import { scaleLinear } from "d3-scale";
import { form, h, halves, picture, small, t } from "../core.js";
import { plan } from "../math/kv.js";
import { sum } from "../math/matrix.js";
import { readouts } from "../stage.js";
import { Panel, draggable } from "../touch.js";
import { colour } from "./softmax.js";

const [MOST, STEP] = [8192, 128];
const PAGES = { 128: 3, 256: 5, 512: 7 }; // by which prime a page's place is scattered

export const cache = {
  id: "cache",
  follows: [],
  tall: [650, 876],
  defaults: { lengths: "6144,512,2304,128,4096,1024", heads: 2, processors: "8", page: 256 },
  controls: [
    { kind: "choice", key: "processors", label: "cache.programs", names: "cache.programs", options: ["4", "8", "16", "H200"] },
    { kind: "choice", key: "heads", label: "cache.heads", options: [1, 2, 4, 8] },
    { kind: "choice", key: "page", label: "cache.page", options: [128, 256, 512] },
  ],
  ask: (state, ask) => ask("gpus"),
  compute(one, state, gpus) {
    const given = state.lengths.split(",").map(Number).filter((x) => Number.isFinite(x));
    const lengths = (given.length ? given : [1024]).slice(0, 8).map((x) => Math.max(0, Math.min(MOST, x)));
    const { unit, programs: all } = gpus.H200;
    const programs = state.processors === "H200" ? all : Number(state.processors);
    const heads = Number(state.heads);
    return { lengths, unit, heads, ...plan({ lengths, heads, programs, unit }) };
  },
  draw(figure, data, state, set) {
    const [width] = halves(1);
    const panel = new Panel("cache");
    const { lengths, heads, programs, items, pieces, divided } = data;
    const work = Array(programs).fill(0);
    for (const [program, , , from, to] of pieces) work[program] += to - from;
    const most = Math.max(...work);
    const alone = Math.max(0, ...items.map(({ units }) => units)); // one program for each row set
    const rounds = Math.ceil((lengths.length * heads) / programs);
    figure.replaceChildren(
      readouts([
        ["cache.units", form.count(sum(items.map(({ units }) => units)) * heads), "units", "", { unit: data.unit }],
        ["cache.most", form.count(most), "most", "good"],
        ["cache.alone", form.count(alone * rounds), "alone", "bad"],
        ["cache.busy", form.percent(sum(work) / (programs * Math.max(1, most)), 0), "busy"],
        ["cache.divided", `${divided} / ${lengths.length * heads}`, "divided"],
      ]),
      h("p.phase", {}, t("cache.lengths")), bars(width, data, set, panel),
      h("p.phase", {}, t("cache.pages", { page: state.page })), pages(width, data, Number(state.page), panel),
      h("p.phase", {}, t("cache.dealt", { programs })), dealt(width, data, panel),
      h("div.line", {}, panel.node),
    );
    panel.begin("program 0");
  },
};

const name = (b) => String.fromCharCode(65 + b);

function bars(width, { lengths }, set, panel) {
  const node = h("div", {});
  const row = 24;
  const svg = picture(node, width, lengths.length * row, t("cache.lengths"), "group");
  const x = scaleLinear([0, MOST], [24, width - 62]);
  lengths.forEach((length, b) => {
    svg.append("text").attr("class", "strong").attr("x", 2).attr("y", b * row + 16).text(name(b));
    svg.append("rect").attr("x", x(0)).attr("y", b * row + 3).attr("width", x(MOST) - x(0)).attr("height", row - 8).attr("rx", 4).attr("fill", "var(--wash)");
    svg.append("rect").attr("x", x(0)).attr("y", b * row + 3).attr("width", Math.max(1, x(length) - x(0))).attr("height", row - 8).attr("rx", 4).attr("fill", colour(b));
    svg.append("text").attr("x", width - 44).attr("y", b * row + 16).text(form.count(length));
    draggable(svg.append("circle").attr("class", "grip").attr("cx", x(length)).attr("cy", b * row + 11).attr("r", 8).style("cursor", "ew-resize"), {
      key: `cache-${b}`, label: t("cache.sequence", { b: name(b), length: form.count(length) }), value: length, min: 0, max: MOST, step: STEP,
      at: (place) => x.invert(place.x),
      set: (value) => set({ lengths: lengths.map((old, i) => (i === b ? value : old)).join(",") }),
    });
  });
  return node;
}

/** Pages of all sequences lie scattered over the memory: page i of the order in which they were given out has its place. */
function pages(width, { lengths }, page, panel) {
  const counts = lengths.map((length) => Math.ceil(length / page));
  const total = Math.max(1, sum(counts) + 5);
  const given = []; // in turns, as sequences grow
  for (let i = 0; i < Math.max(...counts, 0); i++) counts.forEach((count, b) => i < count && given.push([b, i]));
  let stride = PAGES[page];
  while (gcd(stride, total) > 1) stride++;
  const per = small() ? 16 : 32;
  const unit = Math.floor(width / per);
  const node = h("div", {});
  const svg = picture(node, per * unit, Math.ceil(total / per) * 22, t("cache.pages", { page }), "group");
  const at = (place) => [(place % per) * unit, Math.floor(place / per) * 22];
  for (let place = 0; place < total; place++) svg.append("rect").attr("x", at(place)[0] + 1).attr("y", at(place)[1] + 1).attr("width", unit - 2).attr("height", 20).attr("rx", 3).attr("fill", "var(--wash)");
  given.forEach(([b, i], n) => {
    const [x, y] = at((n * stride + 2) % total);
    const g = svg.append("g");
    g.append("rect").attr("class", "tile").attr("x", x + 1).attr("y", y + 1).attr("width", unit - 2).attr("height", 20).attr("rx", 3).attr("fill", colour(b));
    if (unit > 22) g.append("text").attr("class", "middle tiny").attr("x", x + unit / 2).attr("y", y + 15).style("fill", "var(--card)").attr("pointer-events", "none").text(`${name(b)}${i}`);
    const words = t("cache.page.told", { b: name(b), i, place: (n * stride + 2) % total, from: i * page, to: Math.min(lengths[b], (i + 1) * page) - 1 });
    panel.add(g, { key: `page ${b} ${i}`, label: words, tell: () => h("p.small", {}, words) });
  });
  return node;
}

const gcd = (a, b) => (b ? gcd(b, a % b) : a);

function dealt(width, { pieces, programs, unit, each }, panel) {
  const node = h("div", {});
  const row = programs > 32 ? 2 : Math.min(24, 400 / programs);
  const left = programs > 32 ? 4 : 34;
  const svg = picture(node, width, Math.ceil(programs * row) + 20, t("cache.dealt", { programs }), "group");
  const x = scaleLinear([0, Math.max(1, each)], [left, width - 6]);
  const filled = Array(programs).fill(0);
  const of = new Map();
  pieces.forEach(([program, item, head, from, to], n) => {
    const g = svg.append("g");
    g.append("rect").attr("class", "tile").attr("x", x(filled[program])).attr("y", program * row).attr("width", Math.max(1.5, x(to - from) - x(0) - 1)).attr("height", Math.max(1.5, row - (row > 4 ? 3 : 0.4))).attr("rx", row > 8 ? 3 : 0)
      .attr("fill", colour(item)).attr("fill-opacity", head % 2 ? 0.75 : 1);
    if (row > 14 && x(to - from) - x(0) > 34) g.append("text").attr("class", "middle tiny").attr("pointer-events", "none").style("fill", "var(--card)").attr("x", (x(filled[program]) + x(filled[program] + to - from)) / 2).attr("y", program * row + row / 2 + 3).text(`${name(item)} h${head}`);
    filled[program] += to - from;
    const words = t("cache.piece", { program, b: name(item), head, from: form.count(from * unit), to: form.count(to * unit - 1), units: to - from });
    const key = of.has(program) ? `piece ${n}` : `program ${program}`;
    of.set(program, true);
    panel.add(g, { key, label: words, tell: () => h("p.small", {}, words) });
  });
  if (left > 10) for (let program = 0; program < programs; program++) svg.append("text").attr("class", "tick end tiny").attr("x", left - 5).attr("y", program * row + row / 2 + 3).text(program);
  svg.append("text").attr("class", "tick end tiny").attr("x", width - 4).attr("y", programs * row + 15).text(t("cache.each", { each }));
  return node;
}
