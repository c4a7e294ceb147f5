import { scaleLinear } from "d3-scale";
import { below, form, h, halves, picture, t } from "../core.js";
import { rowOfScores } from "../example.js";
import { softmax as trace } from "../math/softmax.js";
import { sum } from "../math/matrix.js";
import { readouts } from "../stage.js";
import { Panel, draggable } from "../touch.js";

const COLOURS = ["--s0", "--s1", "--s2", "--s3", "--s4"];
export const colour = (j) => `var(${COLOURS[j % COLOURS.length]})`;
const LARGEST = { 16: 65504, 32: 3.4028235e38 };

export const softmax = {
  id: "softmax",
  follows: ["text", "row", "causal"],
  defaults: { safe: 1, bits: 16 },
  controls: [
    { kind: "toggle", key: "safe", label: "softmax.safe" },
    { kind: "choice", key: "bits", label: "softmax.bits", names: "softmax.bits", options: [16, 32], when: (s) => !Number(s.safe) },
  ],
  compute(one, state) {
    const x = rowOfScores(one, state.row, state.causal);
    const m = Math.max(...x);
    const held = (y) => (y > LARGEST[state.bits] ? Infinity : y);
    const e = x.map((y) => (Number(state.safe) ? Math.exp(y - m) : held(Math.exp(y))));
    const l = Number(state.safe) ? sum(e) : held(sum(e));
    return { one, x, m, e, l, p: e.map((y) => y / l), right: trace(x).right, mine: Boolean(one.numbers) && state.row === one.n - 1 };
  },
  draw(figure, data, state, set) {
    const [left] = halves(0.62);
    const { l, m, x, p } = data;
    const broken = !p.every(Number.isFinite);
    const panel = new Panel("softmax");
    figure.replaceChildren(
      readouts([
        ["softmax.max", form.short(m), "max"],
        ["softmax.sum", form.short(l), "l", Number.isFinite(l) ? "" : "bad"],
        ["softmax.total", broken ? "NaN" : form.fixed(sum(p)), "total", broken ? "bad" : "good"],
        ["softmax.entropy", broken ? "NaN" : form.fixed(Math.exp(-sum(p.map((y) => (y ? y * Math.log(y) : 0)))), 2), "entropy"],
      ]),
      h("div.columns.wider", {}, bars(left, data, state, set, panel), panel.node),
    );
    panel.begin(x.indexOf(m));
  },
};

function bars(width, data, state, set, panel) {
  const { one, x, e, l, p, m, mine } = data;
  const node = h("div", {});
  const [top, middle, low] = [24, 150, 300];
  const svg = picture(node, width, low + 24, t("softmax.picture"), "group");
  const slot = width / x.length;
  const bar = Math.min(64, slot * 0.66);
  const y = scaleLinear([Math.min(0, ...x), Math.max(1, ...x)], [middle - 10, top]);
  const z = scaleLinear([0, 1], [low, middle + 66]);
  svg.append("text").attr("class", "tick").attr("x", 0).attr("y", 12).text(t("softmax.scores", { q: one.words[state.row] }));
  svg.append("text").attr("class", "tick").attr("x", 0).attr("y", middle + 44).text(t("softmax.weights"));
  svg.append("line").attr("x1", 0).attr("x2", width).attr("y1", y(0)).attr("y2", y(0)).attr("stroke", "var(--faint)");
  svg.append("line").attr("x1", 0).attr("x2", width).attr("y1", low).attr("y2", low).attr("stroke", "var(--faint)");
  const digits = slot > 46 ? 3 : 2;
  x.forEach((value, j) => {
    const centre = slot * (j + 0.5);
    const g = svg.append("g");
    g.append("rect").attr("x", centre - slot / 2).attr("y", top - 6).attr("width", slot).attr("height", low - top + 30).attr("fill", "transparent");
    const tall = Number.isFinite(p[j]) ? Math.max(1.5, low - z(p[j])) : 0;
    g.append("rect").attr("class", "moves").attr("x", centre - bar / 2).attr("width", bar).attr("rx", 4).attr("y", low - tall).attr("height", tall).attr("fill", colour(j));
    g.append("text").attr("class", "middle").attr("x", centre).attr("y", low - tall - 5).text(Number.isFinite(p[j]) ? p[j].toFixed(digits) : "NaN");
    g.append("text").attr("class", "middle tick").attr("x", centre).attr("y", low + 17).text(clip(one.words[j], slot));
    panel.add(g, {
      key: j, label: t("softmax.bar.label", { word: one.words[j], x: form.short(value), p: form.fixed(p[j], 3) }),
      tell: () => tell(data, state, j),
    });
    const handle = svg.append("g");
    handle.append("rect").attr("x", centre - bar / 2).attr("width", bar).attr("rx", 4).attr("y", Math.min(y(0), y(value))).attr("height", Math.max(2, Math.abs(y(value) - y(0))))
      .attr("fill", colour(j)).attr("opacity", value === m ? 1 : 0.72).attr("pointer-events", mine ? "auto" : "none");
    handle.append("text").attr("class", "middle strong").attr("x", centre).attr("y", value < 0 ? y(value) + 14 : y(value) - 5).attr("pointer-events", "none").text(form.short(Number(value.toPrecision(3))));
    if (!mine) return;
    handle.append("rect").attr("x", centre - 14).attr("y", y(value) - 3).attr("width", 28).attr("height", 6).attr("rx", 3).attr("fill", "var(--ink)").attr("pointer-events", "none");
    handle.style("cursor", "ns-resize");
    draggable(handle, {
      key: `softmax-x${j}`, label: t("softmax.drag", { word: j + 1 }), value, min: -20, max: 20, step: 1,
      at: (event) => y.invert(event.clientY - svg.node().getBoundingClientRect().y),
      set: (next) => set({ text: one.numbers.map((old, i) => (i === j ? next : old)).join(" ") }),
    });
    handle.node().addEventListener("pointerenter", () => panel.show(j));
    handle.node().addEventListener("focus", () => panel.show(j));
  });
  return node;
}

export const clip = (word, room) => (word.length * 7.5 > room ? `${word.slice(0, Math.max(1, Math.floor(room / 7.5) - 1))}…` : word);

function tell({ one, x, e, l, p, m, mine }, state, j) {
  const safe = Number(state.safe);
  const power = safe ? `e<sup>${form.short(x[j])} − ${form.short(m)}</sup>` : `e<sup>${form.short(x[j])}</sup>`;
  return [
    h("p.phase", {}, t("softmax.one", { word: one.words[j], q: one.words[state.row] })),
    h("p.formula", { html: `s${below(j + 1)} = ${form.fixed(x[j], 4)}` }),
    h("p.formula", { html: `${power} = ${form.short(e[j])}` }),
    h("p.formula", { html: `p${below(j + 1)} = ${form.short(e[j])} / ${form.short(l)} = <b>${form.fixed(p[j])}</b>` }),
    h("p.small", {}, t(Number.isFinite(p[j]) ? (mine ? "softmax.drag.hint" : "softmax.dot.hint") : "softmax.overflow", { bits: state.bits })),
  ];
}
