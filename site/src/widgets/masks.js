import { form, h, halves, picture, t } from "../core.js";
import { KINDS, mask, numbers } from "../math/masks.js";
import { readouts } from "../stage.js";
import { Panel } from "../touch.js";
import { clip } from "./softmax.js";

const SIZED = new Set(["window", "globals", "prefix", "dilated", "image", "blocks", "strided"]);
const CAUSAL = new Set(["causal", "strided"]); // already
const few = (state) => state.at === "example";

export const masks = {
  id: "masks",
  follows: ["text", "rows", "columns", "causal", "row"],
  defaults: { at: "example", kind: "window", near: 2, block: 16, size: 16, also: 0, q: 70 },
  controls: [
    { kind: "choice", key: "at", label: "masks.at", names: "masks.at", options: ["example", "128"] },
    { kind: "select", key: "kind", label: "masks.kind", names: "masks.kind", options: KINDS },
    { kind: "range", key: "near", label: "masks.size", min: 1, max: 6, when: (s) => few(s) && SIZED.has(s.kind) },
    { kind: "range", key: "size", label: "masks.size", values: [1, 2, 4, 8, 12, 16, 24, 32], when: (s) => !few(s) && SIZED.has(s.kind) },
    { kind: "choice", key: "block", label: "masks.block", options: [16, 32], when: (s) => !few(s) },
    { kind: "range", key: "q", label: "masks.q", min: 0, max: 127, when: (s) => !few(s) },
    { kind: "toggle", key: "also", label: "masks.causal", when: (s) => !few(s) && !CAUSAL.has(s.kind) },
  ],
  compute(one, state) {
    const { kind, block, rows, columns } = state;
    const size = few(state) ? state.near : SIZED.has(kind) ? state.size : 16;
    const causal = CAUSAL.has(kind) ? 0 : Number(few(state) ? state.causal : state.also);
    const at = few(state) ? { n: one.n, block: [rows, columns], few: true } : { n: 128, block: [block, block] };
    return { ...mask({ kind, size, causal, ...at }), words: one.words, size, causal };
  },

  draw(figure, data, state, set) {
    const { rows } = data;
    const [left] = halves(0.58);
    const q = few(state) ? state.row : Math.min(state.q, data.n - 1);
    const [empty, part, full] = data.kinds;
    const all = empty + part + full;
    const sees = rows[q].filter(Boolean).length;
    figure.replaceChildren(
      h("div.columns", {},
        few(state) ? pairs(Math.min(left, 560), data, q, set) : canvas(Math.min(left, 560), data, rows, q, set),
        h("div", {},
          readouts([
            ["masks.pairs", form.percent(data.pairs / data.n ** 2), "pairs"],
            ["masks.visited", form.percent((part + full) / all), "visited"],
            ["masks.row", form.count(sees), "sees"],
          ]),
          h("ul.legend.stacked", {},
            entry("var(--s1)", t("masks.full"), full, "full"),
            entry("var(--s2)", t("masks.part"), part, "part"),
            entry("var(--wash)", t("masks.empty"), empty, "empty")),
          h("p.small", {}, t(`masks.about.${state.kind}`, numbers(data.size, few(state)))),
          h("p.small", {}, t(few(state) ? "masks.block.own" : "masks.block.note")),
          h("pre", {}, h("code", {}, code(state.kind, data, few(state)))))),
    );
  },
};

const entry = (fill, text, count, name) => h("li", {}, h("i", { style: `background:${fill}` }), text, " ", h("b", { "data-value": name }, String(count)));

const CODE = {
  causal: () => "causal=True",
  window: ({ size }) => `window=(${size}, ${size})`,
  globals: ({ size, globals }) => `mask_mod=window_with_globals(${size}, ${globals})`,
  document: () => "mask_mod=document(cu_seqlens=ends, tokens=n)",
  prefix: ({ prefix }) => `mask_mod=prefix_lm(tensor([${prefix}]))`,
  dilated: ({ size, step }) => `mask_mod=dilated_window(${size}, ${step})`,
  image: ({ wide, near }) => `mask_mod=neighbourhood_2d(${wide}, ${near})`,
  blocks: ({ block }) => `mask_mod=block_diagonal(${block})`,
  strided: ({ size }) => `mask_mod=strided_sparse(${size})`,
};
const code = (kind, { size, causal }, few) => `attention(q, k, v, ${CODE[kind](numbers(size, few))}${causal ? ", causal=True" : ""})`;
const IS = ["masks.is.empty", "masks.is.part", "masks.is.full"];
const tileOf = ({ tiles, block }, i, j) => tiles[Math.floor(i / block[0])][Math.floor(j / block[1])];

/** The reader's tokens: a square for every pair, tiles as wide as the blocks of the example. */
function pairs(width, data, q, set) {
  const { n, rows, words, block } = data;
  const [left, top] = [Math.min(86, width / 4), 24];
  const unit = Math.min(46, Math.floor((width - left) / n));
  const node = h("div.matrix", {});
  const svg = picture(node, left + n * unit + 2, top + n * unit + 2, t("masks.picture"), "group");
  const panel = new Panel("masks");
  words.forEach((word, i) => {
    svg.append("text").attr("class", `end tiny ${i === q ? "strong" : ""}`).attr("x", left - 6).attr("y", top + i * unit + unit / 2 + 4).text(clip(word, left - 6));
    svg.append("text").attr("class", "middle tiny").attr("x", left + (i + 0.5) * unit).attr("y", top - 8).text(clip(word, unit));
  });
  rows.forEach((row, i) => row.forEach((sees, j) => {
    const kind = tileOf(data, i, j);
    const g = svg.append("g");
    g.append("rect").attr("class", "tile").attr("x", left + j * unit + 1).attr("y", top + i * unit + 1).attr("width", unit - 2).attr("height", unit - 2).attr("rx", 4)
      .attr("fill", sees ? `var(--s${3 - kind})` : "var(--wash)").attr("fill-opacity", sees && i !== q ? 0.62 : 1);
    const said = `${t(sees ? "masks.sees" : "masks.hidden", { i: `“${words[i]}”`, j: `“${words[j]}”` })} ${t(IS[kind])}`;
    panel.add(g, { key: `${i},${j}`, label: said, tell: () => h("p.small", {}, said), press: () => set({ row: i }) });
  }));
  for (let i = 0; i < n; i += block[0])
    for (let j = 0; j < n; j += block[1])
      svg.append("rect").attr("x", left + j * unit).attr("y", top + i * unit).attr("width", Math.min(block[1], n - j) * unit).attr("height", Math.min(block[0], n - i) * unit)
        .attr("fill", "none").attr("stroke", "var(--soft)").attr("pointer-events", "none");
  panel.begin(`${q},0`);
  node.append(h("div.line", {}, panel.node));
  return node;
}

function canvas(width, data, rows, q, set) {
  const unit = 5;
  const node = h("canvas", { width: data.n * unit, height: data.n * unit, role: "img", "aria-label": t("masks.picture"), style: `width:${width}px;height:${width}px` });
  const told = h("p.small.pair", {}, t("masks.axes"));
  node.addEventListener("pointermove", (event) => {
    const [i, j] = [event.offsetY, event.offsetX].map((at) => Math.max(0, Math.min(data.n - 1, Math.floor((at / width) * data.n))));
    const kind = IS[tileOf(data, i, j)];
    told.textContent = `${t(rows[i][j] ? "masks.sees" : "masks.hidden", { i, j })} ${t(kind)}`;
  });
  node.addEventListener("click", (event) => set({ q: Math.min(data.n - 1, Math.floor((event.offsetY / width) * data.n)) }));
  const style = getComputedStyle(document.documentElement);
  const paint = (name) => style.getPropertyValue(name);
  const at = node.getContext("2d");
  at.fillStyle = paint("--wash");
  at.fillRect(0, 0, node.width, node.height);
  const side = data.block[0] * unit;
  const tone = { 1: "--s2", 2: "--s1" };
  data.tiles.forEach((line, i) => line.forEach((kind, j) => {
    if (!kind) return;
    at.globalAlpha = 0.16;
    at.fillStyle = paint(tone[kind]);
    at.fillRect(j * side, i * side, side, side);
  }));
  rows.forEach((row, i) => row.forEach((sees, j) => {
    if (!sees) return;
    at.globalAlpha = i === q ? 1 : 0.62;
    at.fillStyle = paint(i === q ? "--ink" : tone[tileOf(data, i, j)]);
    at.fillRect(j * unit, i * unit, unit, unit);
  }));
  at.globalAlpha = 1;
  at.strokeStyle = paint("--card");
  at.lineWidth = 2;
  for (let i = 0; i <= data.n; i += data.block[0])
    for (const [x0, y0, x1, y1] of [[i, 0, i, data.n], [0, i, data.n, i]]) {
      at.beginPath();
      at.moveTo(x0 * unit, y0 * unit);
      at.lineTo(x1 * unit, y1 * unit);
      at.stroke();
    }
  at.strokeStyle = paint("--ink");
  at.strokeRect(0, q * unit, data.n * unit, unit);
  return h("div.matrix", {}, node, told);
}
