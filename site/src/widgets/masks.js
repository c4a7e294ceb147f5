import { form, h, halves, t } from "../core.js";
import { KINDS, mask } from "../math/masks.js";
import { readouts } from "../stage.js";

const SIZED = new Set(["window", "globals", "prefix", "dilated", "image", "blocks", "strided"]);

export const masks = {
  id: "masks",
  follows: [],
  defaults: { kind: "window", block: 16, size: 16, also: 0, q: 70 },
  controls: [
    { kind: "select", key: "kind", label: "masks.kind", names: "masks.kind", options: KINDS },
    { kind: "range", key: "size", label: "masks.size", values: [1, 2, 4, 8, 12, 16, 24, 32], when: (s) => SIZED.has(s.kind) },
    { kind: "choice", key: "block", label: "masks.block", options: [16, 32] },
    { kind: "range", key: "q", label: "masks.q", min: 0, max: 127 },
    { kind: "toggle", key: "also", label: "masks.causal", when: (s) => !["causal", "strided"].includes(s.kind) },
  ],
  compute(one, { kind, block, size, also }) {
    return mask({ kind, block, size: SIZED.has(kind) ? size : 16, causal: ["causal", "strided"].includes(kind) ? 0 : also });
  },

  draw(figure, data, state, set) {
    const { rows } = data;
    const [left] = halves(0.58);
    const q = Math.min(state.q, data.n - 1);
    const [empty, part, full] = data.kinds;
    const all = empty + part + full;
    const sees = rows[q].filter(Boolean).length;
    figure.replaceChildren(
      h("div.columns", {},
        canvas(Math.min(left, 560), data, rows, q, set),
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
          h("p.small", {}, t(`masks.about.${state.kind}`)),
          h("p.small", {}, t("masks.block.note")),
          h("pre", {}, h("code", {}, code(state))))),
    );
  },
};

const entry = (fill, text, count, name) => h("li", {}, h("i", { style: `background:${fill}` }), text, " ", h("b", { "data-value": name }, String(count)));

const CODE = {
  causal: () => "causal=True",
  window: ({ size }) => `window=(${size}, ${size})`,
  globals: ({ size }) => `mask_mod=window_with_globals(${size}, 4)`,
  document: () => "mask_mod=document(cu_seqlens=ends, tokens=n)",
  prefix: ({ size }) => `mask_mod=prefix_lm(tensor([${2 * size}]))`,
  dilated: ({ size }) => `mask_mod=dilated_window(${size}, 3)`,
  image: ({ size }) => `mask_mod=neighbourhood_2d(16, ${Math.max(1, Math.floor(size / 4))})`,
  blocks: ({ size }) => `mask_mod=block_diagonal(${2 * size})`,
  strided: ({ size }) => `mask_mod=strided_sparse(${size})`,
};
const code = (state) => `attention(q, k, v, ${CODE[state.kind](state)}${Number(state.also) && !["causal", "strided"].includes(state.kind) ? ", causal=True" : ""})`;

function canvas(width, data, rows, q, set) {
  const unit = 5;
  const node = h("canvas", { width: data.n * unit, height: data.n * unit, role: "img", "aria-label": t("masks.picture"), style: `width:${width}px;height:${width}px` });
  const told = h("p.small.pair", {}, t("masks.axes"));
  node.addEventListener("pointermove", (event) => {
    const [i, j] = [event.offsetY, event.offsetX].map((at) => Math.max(0, Math.min(data.n - 1, Math.floor((at / width) * data.n))));
    const kind = ["masks.is.empty", "masks.is.part", "masks.is.full"][data.tiles[Math.floor(i / data.block)][Math.floor(j / data.block)]];
    told.textContent = `${t(rows[i][j] ? "masks.sees" : "masks.hidden", { i, j })} ${t(kind)}`;
  });
  node.addEventListener("click", (event) => set({ q: Math.min(data.n - 1, Math.floor((event.offsetY / width) * data.n)) }));
  const style = getComputedStyle(document.documentElement);
  const paint = (name) => style.getPropertyValue(name);
  const at = node.getContext("2d");
  at.fillStyle = paint("--wash");
  at.fillRect(0, 0, node.width, node.height);
  const side = data.block * unit;
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
    at.fillStyle = paint(i === q ? "--ink" : tone[data.tiles[Math.floor(i / data.block)][Math.floor(j / data.block)]]);
    at.fillRect(j * unit, i * unit, unit, unit);
  }));
  at.globalAlpha = 1;
  at.strokeStyle = paint("--card");
  at.lineWidth = 2;
  for (let i = 0; i <= data.n; i += data.block)
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
