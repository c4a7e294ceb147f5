import { scaleLinear } from "d3-scale";
import { form, h, picture, room, small, t } from "../core.js";
import { readouts } from "../stage.js";

const COLOURS = ["--s0", "--s1", "--s2", "--s3", "--s4"];
const colour = (i) => `var(${COLOURS[i % COLOURS.length]})`;

export const pipeline = {
  id: "pipeline",
  endpoint: "loop",
  defaults: { part: "loop", iterations: 7, stages: 4, count: 4, batches: 4 },
  controls: [
    { kind: "choice", key: "part", label: "pipeline.part", names: "pipeline.part", options: ["loop", "hopper", "gpus"] },
    { kind: "range", key: "iterations", label: "pipeline.iterations", min: 1, max: 8, when: (s) => s.part === "loop" },
    { kind: "range", key: "stages", label: "pipeline.stages", values: [2, 3, 4], when: (s) => s.part === "loop" },
    { kind: "range", key: "count", label: "pipeline.count", values: [2, 3, 4], when: (s) => s.part === "gpus" },
    { kind: "range", key: "batches", label: "pipeline.batches", values: [1, 2, 4, 8], when: (s) => s.part === "gpus" },
  ],
  ask({ part, iterations, stages, count, batches }, ask) {
    if (part === "loop") return ask("loop", { iterations, stages });
    return part === "gpus" ? ask("gpus", { count, batches }) : ask("hopper", {});
  },
  draw(figure, data, state) {
    figure.replaceChildren(...(data.spans ? kernel(data) : data.bubble !== undefined ? devices(data) : loop(data)));
  },
};

function gantt(plan, names, length, title, fill) {
  const [width, left, row] = [room(), 70, 30];
  const units = [...new Set(plan.slots.map(([unit]) => unit))].sort((a, b) => a - b);
  const node = h("div", {});
  const svg = picture(node, width, units.length * row + 26, title);
  const x = scaleLinear([0, length], [left, width - 4]);
  units.forEach((unit, i) => {
    svg.append("rect").attr("x", left).attr("y", i * row).attr("width", x(length) - left).attr("height", row - 4).attr("rx", 5).attr("fill", "var(--wash)");
    svg.append("text").attr("class", "end").attr("x", left - 10).attr("y", i * row + 18).text(names[unit]);
  });
  for (const [unit, iteration, start, size, phase] of plan.slots) {
    const wide = x(start + size) - x(start);
    svg.append("rect").attr("x", x(start) + 1).attr("y", unit * row).attr("width", Math.max(1, wide - 2)).attr("height", row - 4).attr("rx", 5)
      .attr("fill", fill(iteration)).attr("opacity", phase === "prologue" || phase === "epilogue" ? 0.62 : 1);
    if (wide > (plan.label ? 21 : 10)) svg.append("text").attr("class", "middle strong").attr("x", x(start) + wide / 2).attr("y", unit * row + 18).style("fill", "var(--card)").text((plan.label ?? ((i) => i + 1))(iteration));
  }
  for (let at = 0; at <= length; at += length > 20 || small() ? 4 : 1)
    svg.append("text").attr("class", "tick middle").attr("x", x(at)).attr("y", units.length * row + 16).text(at);
  return node;
}

function loop(data) {
  const { sequential, pipelined, names } = data;
  const words = names.map((name) => t(`pipeline.stage.${name}`));
  return [
    readouts([
      ["pipeline.before", String(sequential.length), "sequential", "bad"],
      ["pipeline.overlapped", String(pipelined.length), "pipelined", "good"],
      ["pipeline.busy.before", form.percent(sequential.utilisation, 0), "busy-before"],
      ["pipeline.busy.after", form.percent(pipelined.utilisation, 0), "busy-after"],
      ["pipeline.buffers", `${sequential.in_flight} → ${pipelined.in_flight}`, "buffers"],
    ]),
    h("p.phase", {}, t("pipeline.sequential")),
    gantt(sequential, words, sequential.length, t("pipeline.sequential"), colour),
    h("p.phase", {}, t("pipeline.pipelined")),
    gantt(pipelined, words, sequential.length, t("pipeline.pipelined"), colour),
    h("p.small", {}, t("pipeline.phases")),
  ];
}

function devices(data) {
  const plan = {
    slots: data.slots.map((slot) => slot.slice(0, 4)),
    label: (i) => (i < data.batches ? `F${i + 1}` : `B${i - data.batches + 1}`),
  };
  const units = [...new Set(data.slots.map(([unit]) => unit))];
  return [
    readouts([
      ["pipeline.slots", String(data.length), "length"],
      ["pipeline.busy", form.percent(data.utilisation, 1), "busy"],
      ["pipeline.bubble", form.percent(data.bubble, 1), "bubble", "bad"],
    ]),
    gantt(plan, units.map((unit) => `GPU ${unit + 1}`), data.length, t("pipeline.part.gpus"), (i) => (i < data.batches ? "var(--s0)" : "var(--s2)")),
    h("p.small", {}, t("pipeline.gpus.note")),
  ];
}

const KIND = (what) => (what.startsWith("wait") ? "wait" : what.startsWith("load") ? "load" : what.startsWith("store") ? "store" : what === "compute" ? "compute" : "mma");
const TONE = { wait: "var(--wash)", load: "var(--s1)", store: "var(--s3)", compute: "var(--s0)", mma: "var(--s2)" };

function kernel(data) {
  const spans = data.spans.filter(([unit]) => unit !== "main");
  const rank = (unit) => (unit === "copies" ? 0 : unit.startsWith("produce") ? 1 : unit === "tensor cores" ? 2 : 3);
  const units = [...new Set(spans.map(([unit]) => unit))].sort((a, b) => rank(a) - rank(b) || a.localeCompare(b));
  const lanes = units.map((unit) => stack(spans.filter((span) => span[0] === unit)));
  const [width, left, row] = [room(), 100, 26];
  const node = h("div", {});
  const tops = [];
  const height = lanes.reduce((y, lane) => (tops.push(y), y + Math.max(row, lane.depth * 13 + 4) + 4), 0);
  const svg = picture(node, width, height + 20, t("pipeline.part.hopper"));
  const x = scaleLinear([0, data.length], [left, width - 4]);
  units.forEach((unit, i) => {
    const tall = Math.max(row, lanes[i].depth * 13 + 4);
    svg.append("rect").attr("x", left).attr("y", tops[i]).attr("width", x(data.length) - left).attr("height", tall).attr("rx", 4).attr("fill", "var(--wash)").attr("opacity", 0.6);
    svg.append("text").attr("class", "end").attr("x", left - 8).attr("y", tops[i] + tall / 2 + 5).text(t(`pipeline.unit.${unit.split(" ")[0]}`, { i: unit.split(" ")[1] ?? "" }));
    for (const { span, level } of lanes[i].placed) {
      const [, what, start, end] = span;
      const kind = KIND(what);
      if (kind === "wait") continue;
      const thick = lanes[i].depth > 1 ? 12 : tall;
      svg.append("rect").attr("x", x(start)).attr("y", tops[i] + (lanes[i].depth > 1 ? 2 + level * 13 : 0)).attr("width", Math.max(1, x(end) - x(start) - 0.6)).attr("height", thick).attr("rx", 2)
        .attr("fill", TONE[kind]).append("title").text(`${unit}: ${what}, ${start}–${end}`);
    }
  });
  for (let at = 0; at <= data.length; at += small() ? 4000 : 2000) svg.append("text").attr("class", "tick middle").attr("x", x(at)).attr("y", height + 14).text(at);
  const busy = (unit) => union(spans.filter(([name, what]) => name === unit && !what.startsWith("wait"))) / data.length;
  return [
    readouts([
      ["pipeline.cycles", form.count(data.length), "cycles"],
      ["pipeline.tensor", form.percent(busy("tensor cores"), 0), "tensor", "good"],
      ["pipeline.copy", form.percent(busy("copies"), 0), "copy"],
    ]),
    node,
    h("ul.legend", {}, ["load", "mma", "compute", "store"].map((kind) => h("li", {}, h("i", { style: `background:${TONE[kind]}` }), t(`pipeline.kind.${kind}`)))),
    h("p.small", {}, t("pipeline.hopper.note")),
  ];
}

/** Spans that overlap are drawn one below the other. */
function stack(spans) {
  const ends = [];
  const placed = [...spans].sort((a, b) => a[2] - b[2]).map((span) => {
    let level = ends.findIndex((end) => end <= span[2]);
    if (level < 0) level = ends.push(0) - 1;
    ends[level] = span[3];
    return { span, level };
  });
  return { placed, depth: Math.max(1, ends.length) };
}

function union(spans) {
  let [sum, until] = [0, 0];
  for (const [, , start, end] of [...spans].sort((a, b) => a[2] - b[2])) {
    sum += Math.max(0, end - Math.max(start, until));
    until = Math.max(until, end);
  }
  return sum;
}
