import { scaleLinear } from "d3-scale";
import { form, h, halves, picture, small, t } from "../core.js";
import { plan } from "../math/kv.js";
import { sum } from "../math/matrix.js";
import { readouts } from "../stage.js";
import { Panel, draggable } from "../touch.js";
import { clip, colour } from "./softmax.js";

// The reader's tokens beside three short sequences, or the sequences of a server.
const SCALE = { example: { most: 12, step: 1 }, server: { most: 8192, step: 128 } };
const few = (state) => state.at === "example";

export const cache = {
  id: "cache",
  follows: ["text"],
  tall: [629, 842],
  defaults: { at: "example", others: "3,12,5", own: 1, small: 8, tokens: 2, lengths: "6144,512,2304,128,4096,1024", heads: 2, processors: "8", page: 256 },
  controls: [
    { kind: "choice", key: "at", label: "cache.at", names: "cache.at", options: ["example", "server"] },
    { kind: "choice", key: "small", label: "cache.programs", options: [4, 8, 16], when: few },
    { kind: "choice", key: "own", label: "cache.heads", options: [1, 2], when: few },
    { kind: "choice", key: "tokens", label: "cache.page", options: [1, 2, 4], when: few },
    { kind: "choice", key: "processors", label: "cache.programs", names: "cache.programs", options: ["4", "8", "16", "H200"], when: (s) => !few(s) },
    { kind: "choice", key: "heads", label: "cache.heads", options: [1, 2, 4, 8], when: (s) => !few(s) },
    { kind: "choice", key: "page", label: "cache.page", options: [128, 256, 512], when: (s) => !few(s) },
  ],
  ask: (state, ask) => ask("gpus"),
  compute(one, state, gpus) {
    const scale = SCALE[few(state) ? "example" : "server"];
    const given = (few(state) ? state.others : state.lengths).split(",").map(Number).filter((x) => Number.isFinite(x));
    const others = (given.length ? given : [scale.most / 2]).slice(0, 8).map((x) => Math.max(0, Math.min(scale.most, x)));
    const { unit: chunk, programs: all, factor, quarters } = gpus.H200;
    if (few(state)) {
      const [lengths, heads] = [[one.n, ...others], Number(state.own)];
      return { ...scale, lengths, words: one.words, unit: 1, heads, page: Number(state.tokens), ...plan({ lengths, heads, programs: Number(state.small), unit: 1, factor, quarters, shortest: 1 }) };
    }
    const [programs, heads] = [state.processors === "H200" ? all : Number(state.processors), Number(state.heads)];
    return { ...scale, lengths: others, unit: chunk, heads, page: Number(state.page), ...plan({ lengths: others, heads, programs, unit: chunk, factor, quarters }) };
  },
  draw(figure, data, state, set) {
    const [width] = halves(1);
    const panel = new Panel("cache");
    const { lengths, heads, programs, items, length, divided, page } = data;
    const chunks = sum(items.map((item) => item.chunks)) * heads;
    figure.replaceChildren(
      readouts([
        ["cache.units", form.count(chunks), "units", "", { unit: data.unit }],
        ["cache.most", form.count(length), "most", "good"],
        ["cache.alone", form.count(data.alone), "alone", "bad"],
        ["cache.busy", form.percent(chunks / (programs * Math.max(1, length)), 0), "busy"],
        ["cache.divided", `${divided} / ${lengths.length * heads}`, "divided"],
      ]),
      h("p.phase", {}, t("cache.lengths")), bars(width, data, set),
      h("p.phase", {}, t("cache.pages", { page })), pages(width, data, panel),
      h("p.phase", {}, t("cache.dealt", { programs })), dealt(width, data, panel),
      h("div.line", {}, panel.node),
    );
    panel.begin("program 0");
  },
};

const name = (b) => String.fromCharCode(65 + b);

function bars(width, { lengths, words, most, step }, set) {
  const node = h("div", {});
  const row = 24;
  const svg = picture(node, width, lengths.length * row, t("cache.lengths"), "group");
  const x = scaleLinear([0, most], [24, width - 62]);
  lengths.forEach((length, b) => {
    svg.append("text").attr("class", "strong").attr("x", 2).attr("y", b * row + 16).text(name(b));
    svg.append("rect").attr("x", x(0)).attr("y", b * row + 3).attr("width", x(most) - x(0)).attr("height", row - 8).attr("rx", 4).attr("fill", "var(--wash)");
    svg.append("rect").attr("x", x(0)).attr("y", b * row + 3).attr("width", Math.max(1, x(length) - x(0))).attr("height", row - 8).attr("rx", 4).attr("fill", colour(b));
    svg.append("text").attr("x", width - 44).attr("y", b * row + 16).text(form.count(length));
    if (words && b === 0) return words.forEach((word, i) => svg.append("text").attr("class", "middle tiny").attr("x", x(i + 0.5)).attr("y", b * row + 15).style("fill", "var(--card)").text(clip(word, x(1) - x(0)))); // as long as the example
    draggable(svg.append("circle").attr("class", "grip").attr("cx", x(length)).attr("cy", b * row + 11).attr("r", 8).style("cursor", "ew-resize"), {
      key: `cache-${b}`, label: t("cache.sequence", { b: name(b), length: form.count(length) }), value: length, min: 0, max: most, step,
      at: (place) => x.invert(place.x),
      set: (value) => set({ [words ? "others" : "lengths"]: lengths.map((old, i) => (i === b ? value : old)).slice(words ? 1 : 0).join(",") }),
    });
  });
  return node;
}

/** Pages of all sequences lie scattered over the memory, in the order in which they were given out. */
function pages(width, { lengths, words, page }, panel) {
  const counts = lengths.map((length) => Math.ceil(length / page));
  const total = Math.max(1, sum(counts) + 5);
  const given = []; // in turns, as sequences grow
  for (let i = 0; i < Math.max(...counts, 0); i++) counts.forEach((count, b) => i < count && given.push([b, i]));
  let stride = 5;
  while (gcd(stride, total) > 1) stride++;
  const per = (small() ? 16 : 32) / (words ? 2 : 1);
  const unit = Math.floor(width / per);
  const node = h("div", {});
  const svg = picture(node, per * unit, Math.ceil(total / per) * 22, t("cache.pages", { page }), "group");
  const at = (place) => [(place % per) * unit, Math.floor(place / per) * 22];
  for (let place = 0; place < total; place++) svg.append("rect").attr("x", at(place)[0] + 1).attr("y", at(place)[1] + 1).attr("width", unit - 2).attr("height", 20).attr("rx", 3).attr("fill", "var(--wash)");
  given.forEach(([b, i], n) => {
    const [x, y] = at((n * stride + 2) % total);
    const g = svg.append("g");
    g.append("rect").attr("class", "tile").attr("x", x + 1).attr("y", y + 1).attr("width", unit - 2).attr("height", 20).attr("rx", 3).attr("fill", colour(b));
    if (unit > 22) g.append("text").attr("class", "middle tiny").attr("x", x + unit / 2).attr("y", y + 15).style("fill", "var(--card)").attr("pointer-events", "none").text(words && b === 0 ? clip(words.slice(i * page, (i + 1) * page).join(" "), unit - 4) : `${name(b)}${i}`);
    const said = t("cache.page.told", { b: name(b), i, place: (n * stride + 2) % total, from: i * page, to: Math.min(lengths[b], (i + 1) * page) - 1 });
    panel.add(g, { key: `page ${b} ${i}`, label: said, tell: () => h("p.small", {}, said) });
  });
  return node;
}

const gcd = (a, b) => (b ? gcd(b, a % b) : a);

/** Time runs to the right: each piece begins when its processor is free, after the cost of beginning it. */
function dealt(width, { pieces, programs, unit, length, lengths, cost }, panel) {
  const node = h("div", {});
  const row = programs > 32 ? 2 : Math.min(24, 400 / programs);
  const left = programs > 32 ? 4 : 34;
  const svg = picture(node, width, Math.ceil(programs * row) + 20, t("cache.dealt", { programs }), "group");
  const x = scaleLinear([0, Math.max(1, length)], [left, width - 6]);
  const first = new Set();
  pieces.forEach(([program, b, head, from, to, at], n) => {
    const g = svg.append("g");
    const [begin, end] = [x(at + cost), x(at + cost + to - from)];
    g.append("rect").attr("class", "tile").attr("x", begin).attr("y", program * row).attr("width", Math.max(1.5, end - begin - 1)).attr("height", Math.max(1.5, row - (row > 4 ? 3 : 0.4))).attr("rx", row > 8 ? 3 : 0)
      .attr("fill", colour(b)).attr("fill-opacity", head % 2 ? 0.75 : 1);
    if (row > 14 && end - begin > 34) g.append("text").attr("class", "middle tiny").attr("pointer-events", "none").style("fill", "var(--card)").attr("x", (begin + end) / 2).attr("y", program * row + row / 2 + 3).text(`${name(b)} h${head}`);
    const said = t("cache.piece", { program, b: name(b), head, from: form.count(from * unit), to: form.count(Math.min(lengths[b], to * unit) - 1), units: to - from });
    const key = first.has(program) ? `piece ${n}` : `program ${program}`;
    first.add(program);
    panel.add(g, { key, label: said, tell: () => h("p.small", {}, said) });
  });
  if (left > 10) for (let program = 0; program < programs; program++) svg.append("text").attr("class", "tick end tiny").attr("x", left - 5).attr("y", program * row + row / 2 + 3).text(program);
  svg.append("text").attr("class", "tick end tiny").attr("x", width - 4).attr("y", programs * row + 15).text(t("cache.each", { length }));
  return node;
}
