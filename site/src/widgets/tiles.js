import { form, h, halves, t } from "../core.js";
import { D } from "../example.js";
import { attention, traffic } from "../math/attention.js";
import { sum } from "../math/matrix.js";
import { readouts } from "../stage.js";
import { Panel } from "../touch.js";
import { board, chips } from "./board.js";

export const tiles = {
  id: "tiles",
  follows: ["text", "rows", "columns", "causal"],
  defaults: { order: "fa2", step: 5, big: 16384 },
  controls: [
    { kind: "choice", key: "order", label: "tiles.order", names: "tiles.order", options: ["fa1", "fa2"] },
    { kind: "range", key: "rows", label: "thread.rows", min: 1, max: 12 },
    { kind: "range", key: "columns", label: "thread.columns", min: 1, max: 12 },
  ],
  compute(one, { order, rows, columns, causal }) {
    const run = (which) => attention(one, { rows, columns, order: which, after: causal ? 0 : null });
    return { one, trace: run(order), other: run(order === "fa1" ? "fa2" : "fa1"), naive: traffic({ n: one.n, d: D, rows, columns, causal }).naive };
  },
  steps: ({ trace }) => trace.steps.length,

  draw(figure, data, state, set) {
    const { trace } = data;
    const now = trace.steps[state.step - 1];
    const { visited, skipped, peak } = trace.totals;
    const [left] = halves(0.55);
    const panel = new Panel("tiles");
    figure.replaceChildren(
      readouts([
        ["tiles.read", form.bytes(now?.loaded ?? 0), "loaded"],
        ["tiles.written", form.bytes(now?.stored ?? 0), "stored"],
        ["tiles.flops", form.count(now?.flops ?? 0), "flops"],
        ["tiles.sram", `${form.bytes(now?.sram ?? 0)} / ${form.bytes(peak)}`, "sram"],
        ["tiles.visited", `${visited} / ${visited + skipped}`, "visited"],
      ]),
      h("div.columns", {},
        h("div", {}, board(left, { trace, one: data.one, step: state.step }, panel, set), h("p.small", {}, t("tiles.touch"))),
        h("div.side", {}, moving(now), panel.node)),
      h("div.columns.even", {}, bars("tiles.bars", { n: data.one.n, d: D, rows: trace.rows, columns: trace.columns }, small(data, state, now)), large(state, set)),
    );
  },
};

const FORMULA = {
  forward: "m′ = max(m, rowmax S)&ensp; P = e<sup>S − m′</sup><br>l ← <span class=c>e<sup>m − m′</sup></span> l + rowsum P&ensp; O ← <span class=c>e<sup>m − m′</sup></span> O + P V",
  finish: "O ← O / l&ensp; lse = m + log l<br>&nbsp;",
};

function moving(now) {
  const line = (name, blocks) => h("div.moved", {}, h("span.small", {}, `${t(`tiles.${name}`)} `), blocks?.length ? chips(blocks) : "–");
  return h("div", {},
    h("p.phase", {}, now ? t(`tiles.phase.${now.phase}`) : t("tiles.start")),
    h("p.formula.two", { html: now ? FORMULA[now.phase] : "&nbsp;<br>&nbsp;" }),
    line("load", now?.loads),
    line("store", now?.stores),
    h("div.chip", {}, h("span.small", {}, `${t("tiles.chip")} `), chips(now?.resident ?? [])));
}

const whole = ({ totals }) => sum([...Object.values(totals.loaded), ...Object.values(totals.stored)]);

function small({ trace, other, naive }, state, now) {
  return [
    [t("tiles.bar.now", { order: trace.order.toUpperCase() }), (now?.loaded ?? 0) + (now?.stored ?? 0), whole(trace), "var(--s0)", "moved"],
    [t("tiles.bar.whole", { order: trace.order.toUpperCase() }), whole(trace), whole(trace), "var(--s0)", "whole"],
    [t("tiles.bar.whole", { order: other.order.toUpperCase() }), whole(other), whole(other), "var(--s1)", "other"],
    [t("tiles.bar.naive"), naive, naive, "var(--s2)", "naive"],
  ];
}

/** The same loops at the size of a model: counted by the same rule, without the numbers. */
function large(state, set) {
  const sizes = [1024, 4096, 16384, 65536];
  const input = h("input", { type: "range", min: 0, max: sizes.length - 1, value: Math.max(0, sizes.indexOf(state.big)), "aria-valuetext": String(state.big), "data-key": "tiles-big", name: "tiles-big", oninput: () => set({ big: sizes[input.value] }) });
  const told = traffic({ n: state.big, d: 128, rows: 128, columns: 128, causal: state.causal });
  const rows = [
    [t("tiles.bar.cached"), told.cached, told.cached, "var(--s0)", "big-cached"],
    [t("tiles.bar.whole", { order: "FA2" }), told.fa2, told.fa2, "var(--s0)", "big-fa2"],
    [t("tiles.bar.whole", { order: "FA1" }), told.fa1, told.fa1, "var(--s1)", "big-fa1"],
    [t("tiles.bar.naive"), told.naive, told.naive, "var(--s2)", "big-naive"],
  ];
  return h("div", {},
    bars("tiles.bars.big", { n: form.count(state.big) }, rows),
    h("label.field.range", {}, h("span", {}, t("tiles.big"), " ", h("output", {}, form.count(state.big))), input),
    h("p.small", { html: t("tiles.big.note", { times: form.count(Math.round(told.naive / told.cached)) }) }));
}

export function bars(title, values, rows) {
  const most = Math.max(...rows.map((row) => row[2]));
  return h("div.bars", {},
    h("p.small", {}, t(title, values)),
    rows.map(([label, bytes, end, fill, name]) =>
      h("div.bar", {},
        h("span", {}, label),
        h("b", { "data-value": name }, form.bytes(bytes)),
        h("div.track", { style: `--end:${(100 * end) / most}%` }, h("div", { style: `width:${(100 * bytes) / most}%;background:${fill}` })))));
}
