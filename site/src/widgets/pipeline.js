import { scaleLinear } from "d3-scale";
import { form, h, halves, picture, small, t } from "../core.js";
import { tiling } from "../math/attention.js";
import { STAGES, forwardBackward, pipelined, sequential } from "../math/machine.js";
import { readouts } from "../stage.js";
import { Panel } from "../touch.js";
import { colour } from "./softmax.js";
import { timeline } from "./timeline.js";

const MOST = 12; // tiles that are drawn

export const pipeline = {
  id: "pipeline",
  follows: ["text", "rows", "columns", "causal"],
  tall: [537, 721],
  defaults: { part: "loop", count: 4, batches: 4, zoom: 1, at: 0 },
  controls: [
    { kind: "choice", key: "part", label: "pipeline.part", names: "pipeline.part", options: ["loop", "hopper", "gpus"] },
    { kind: "range", key: "count", label: "pipeline.count", min: 2, max: 8, when: (s) => s.part === "gpus" },
    { kind: "range", key: "batches", label: "pipeline.batches", values: [1, 2, 4, 8, 16], when: (s) => s.part === "gpus" },
    { kind: "range", key: "zoom", label: "pipeline.zoom", values: [1, 2, 4, 8, 16], when: (s) => s.part === "hopper" },
    { kind: "range", key: "at", label: "pipeline.at", min: 0, max: 100, when: (s) => s.part === "hopper" && s.zoom > 1 },
  ],
  ask: ({ part }, ask) => (part === "hopper" ? ask("hopper") : {}),
  compute(one, { part, rows, columns, causal, count, batches }, told) {
    if (part === "hopper") return told;
    if (part === "gpus") return forwardBackward(count, batches);
    const { visited } = tiling(one.n, one.n, rows, columns, null, causal ? 0 : null);
    const tiles = visited.slice(0, MOST);
    return { sequential: sequential(tiles.length, STAGES.length), pipelined: pipelined(tiles.length, STAGES.length), tiles, all: visited.length };
  },
  draw(figure, data, state, set) {
    figure.replaceChildren(...(data.spans ? timeline(figure, data, state, set) : data.slots ? devices(figure, data) : loop(figure, data)));
  },
};

function gantt(width, plan, names, length, title, fill, panel, tell) {
  const [left, row] = [small() ? 60 : 76, 30];
  const units = [...new Set(plan.slots.map(([unit]) => unit))].sort((a, b) => a - b);
  const node = h("div", {});
  const svg = picture(node, width, units.length * row + 26, title, "group");
  const x = scaleLinear([0, length], [left, width - 6]);
  units.forEach((unit, i) => {
    svg.append("rect").attr("x", left).attr("y", i * row).attr("width", x(length) - left).attr("height", row - 4).attr("rx", 5).attr("fill", "var(--wash)");
    svg.append("text").attr("class", "end").attr("x", left - 8).attr("y", i * row + 18).text(names[unit]);
  });
  plan.slots.forEach((slot, i) => {
    const [unit, iteration, start, size, phase] = slot;
    const wide = x(start + size) - x(start);
    const g = svg.append("g");
    g.append("rect").attr("class", "tile").attr("x", x(start) + 0.5).attr("y", unit * row).attr("width", Math.max(1, wide - 1)).attr("height", row - 4).attr("rx", 4)
      .attr("fill", fill(iteration)).attr("fill-opacity", phase === "prologue" || phase === "epilogue" ? 0.78 : 1);
    const text = (plan.label ?? ((n) => String(n + 1)))(iteration);
    if (wide > text.length * 8 + 2) g.append("text").attr("class", "middle strong tiny").attr("x", x(start) + wide / 2).attr("y", unit * row + 18).style("fill", "var(--card)").text(text);
    const words = tell(slot, names[unit], text);
    panel.add(g, { key: `${title} ${i}`, label: words, tell: () => h("p.small", {}, words) });
  });
  const every = Math.max(1, Math.ceil(length / (small() ? 7 : 20)));
  for (let at = 0; at <= length; at += every) svg.append("text").attr("class", "tick middle").attr("x", x(at)).attr("y", units.length * row + 16).text(at);
  return node;
}

function loop(figure, data) {
  const { sequential: before, pipelined: after, tiles, all } = data;
  const [width] = halves(1);
  const panel = new Panel("loop");
  const words = STAGES.map((name) => t(`pipeline.stage.${name}`));
  const tell = ([, iteration, start, , phase], name) =>
    t("pipeline.slot", { name, i: tiles[iteration].i + 1, j: tiles[iteration].j + 1, start }) + (phase ? ` ${t(`pipeline.phase.${phase}`)}` : "");
  const charts = [[before, "pipeline.sequential"], [after, "pipeline.pipelined"]].map(([plan, title]) =>
    [h("p.phase", {}, t(title)), gantt(width, plan, words, before.length, t(title), colour, panel, tell)]);
  panel.begin(`${t("pipeline.pipelined")} 0`);
  return [
    readouts([
      ["pipeline.before", String(before.length), "sequential", "bad"],
      ["pipeline.overlapped", String(after.length), "pipelined", "good"],
      ["pipeline.busy.before", form.percent(before.utilisation, 0), "busy-before"],
      ["pipeline.busy.after", form.percent(after.utilisation, 0), "busy-after"],
      ["pipeline.buffers", `${before.in_flight} → ${after.in_flight}`, "buffers"],
    ]),
    ...charts.flat(),
    h("div.line", {}, panel.node),
    h("p.small", {}, t(all > tiles.length ? "pipeline.first" : "pipeline.all", { shown: tiles.length, all }), " ", t("pipeline.phases")),
  ];
}

function devices(figure, data) {
  const plan = { slots: data.slots, label: (i) => (i < data.batches ? `F${i + 1}` : `B${i - data.batches + 1}`) };
  const units = [...new Set(data.slots.map(([unit]) => unit))];
  const panel = new Panel("gpus");
  const [width] = halves(1);
  const tell = ([unit, , start], name, text) => t("pipeline.device", { name, text, start });
  const chart = gantt(width, plan, units.map((unit) => `GPU ${unit + 1}`), data.length, t("pipeline.part.gpus"), (i) => (i < data.batches ? "var(--s0)" : "var(--s2)"), panel, tell);
  panel.begin(`${t("pipeline.part.gpus")} 0`);
  return [
    readouts([
      ["pipeline.slots", String(data.length), "length"],
      ["pipeline.busy", form.percent(data.utilisation, 1), "busy"],
      ["pipeline.bubble", form.percent(data.bubble, 1), "bubble", "bad"],
    ]),
    chart,
    h("div.line", {}, panel.node),
    h("p.small", {}, t("pipeline.gpus.note")),
  ];
}
