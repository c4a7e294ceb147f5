// The Hopper kernel at work: a lane for every unit, to zoom into, drag and touch, with remarks on what to see.
import { scaleLinear } from "d3-scale";
import { form, h, halves, picture, small, t } from "../core.js";
import { readouts } from "../stage.js";
import { Panel } from "../touch.js";

const KIND = (what) => (what.startsWith("wait") ? "wait" : what.startsWith("load") ? "load" : what.startsWith("store") ? "store" : what === "compute" ? "compute" : "mma");
const TONE = { wait: "var(--rule)", load: "var(--s1)", store: "var(--s3)", compute: "var(--s0)", mma: "var(--s2)" };
const rank = (unit) => (unit === "copies" ? 0 : unit.startsWith("produce") ? 1 : unit === "tensor cores" ? 2 : 3);

export function timeline(figure, data, state, set) {
  const spans = data.spans.filter(([unit]) => unit !== "main");
  const units = [...new Set(spans.map(([unit]) => unit))].sort((a, b) => rank(a) - rank(b) || a.localeCompare(b));
  const [width] = halves(1);
  const [left, row] = [small() ? 84 : 112, 26];
  const wide = data.length / state.zoom;
  const from = ((data.length - wide) * state.at) / 100;
  const x = scaleLinear([from, from + wide], [left, width - 4]);
  const lanes = units.map((unit) => stack(spans.filter((span) => span[0] === unit && KIND(span[1]) !== "wait"), spans.filter((span) => span[0] === unit && KIND(span[1]) === "wait")));
  const tops = [];
  const height = lanes.reduce((y, lane) => (tops.push(y), y + Math.max(row, lane.depth * 13 + 4) + 4), 22);
  const node = h("div", {});
  const svg = picture(node, width, height + 20, t("pipeline.part.hopper"), "group");
  const panel = new Panel("hopper");
  svg.append("defs").append("clipPath").attr("id", "lanes").append("rect").attr("x", left).attr("y", 0).attr("width", width - left - 4).attr("height", height);
  const inside = svg.append("g").attr("clip-path", "url(#lanes)");
  units.forEach((unit, i) => {
    const tall = Math.max(row, lanes[i].depth * 13 + 4);
    const name = t(`pipeline.unit.${unit.split(" ")[0]}`, { i: unit.split(" ")[1] ?? "" });
    inside.append("rect").attr("x", left).attr("y", tops[i]).attr("width", width - left - 4).attr("height", tall).attr("rx", 4).attr("fill", "var(--wash)");
    svg.append("text").attr("class", "end tiny").attr("x", left - 6).attr("y", tops[i] + tall / 2 + 4).text(name);
    for (const { span, level } of lanes[i].placed) {
      const [, what, start, end] = span;
      if (end < from || start > from + wide) continue;
      const kind = KIND(what);
      const deep = lanes[i].depth > 1;
      const g = inside.append("g");
      g.append("rect").attr("class", "tile").attr("x", x(start)).attr("y", tops[i] + (kind === "wait" ? tall - 5 : deep ? 2 + level * 13 : 0)).attr("width", Math.max(1.5, x(end) - x(start) - 0.6)).attr("height", kind === "wait" ? 5 : deep ? 12 : tall).attr("rx", 2).attr("fill", TONE[kind]);
      if (kind !== "wait" && !deep && x(end) - x(start) > what.length * 7) g.append("text").attr("class", "middle tiny").style("fill", "var(--card)").attr("pointer-events", "none").attr("x", (x(start) + x(end)) / 2).attr("y", tops[i] + tall / 2 + 4).text(says(what));
      const words = t("pipeline.span", { name, what: says(what, true), start: form.count(start), end: form.count(end), length: form.count(end - start) });
      panel.add(g, { key: `${unit} ${what} ${start}`, label: words, tell: () => [h("p.small", {}, words), h("p.small", {}, t(`pipeline.about.${kind}`))] });
    }
  });
  const step = [10, 20, 50, 100, 200, 500, 1000, 2000, 4000].find((size) => wide / size <= (small() ? 4 : 9)) ?? 8000;
  for (let at = Math.ceil(from / step) * step; at <= from + wide; at += step) svg.append("text").attr("class", "tick middle tiny").attr("x", Math.min(width - 18, x(at))).attr("y", height + 14).text(form.count(at));
  const notes = remarks(spans, data.length);
  notes.forEach(({ start, end }, i) => {
    const at = x((start + end) / 2);
    if (at < left || at > width) return;
    svg.append("line").attr("x1", at).attr("x2", at).attr("y1", 18).attr("y2", height).attr("stroke", "var(--ink)").attr("stroke-dasharray", "2 3").attr("opacity", 0.6).attr("pointer-events", "none");
    svg.append("circle").attr("cx", at).attr("cy", 10).attr("r", 9).attr("fill", "var(--ink)");
    svg.append("text").attr("class", "middle tiny strong").attr("x", at).attr("y", 14).style("fill", "var(--card)").text(i + 1);
  });
  svg.style("touch-action", "pan-y").style("cursor", state.zoom > 1 ? "grab" : "default");
  if (state.zoom > 1)
    svg.on("pointerdown", (event) => {
      const [start, at] = [event.clientX, state.at];
      const move = (now) => {
        const next = Math.round(Math.max(0, Math.min(100, at - ((now.clientX - start) / (width - left)) * (100 / (state.zoom - 1)))));
        if (Math.abs(now.clientX - start) > 4) set({ at: next });
      };
      addEventListener("pointermove", move);
      addEventListener("pointerup", () => removeEventListener("pointermove", move), { once: true });
    });
  svg.on("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    const middle = x.invert(event.clientX - svg.node().getBoundingClientRect().x);
    set(focusOn(middle, Math.max(1, Math.min(16, event.deltaY < 0 ? state.zoom * 2 : state.zoom / 2)), data.length));
  });
  panel.begin([...panel.items.keys()].find((key) => key.startsWith("tensor cores")) ?? panel.items.keys().next().value);
  const busy = (unit) => union(spans.filter(([name, what]) => name === unit && !what.startsWith("wait"))) / data.length;
  return [
    readouts([
      ["pipeline.cycles", form.count(data.length), "cycles"],
      ["pipeline.tensor", form.percent(busy("tensor cores"), 0), "tensor", "good"],
      ["pipeline.copy", form.percent(busy("copies"), 0), "copy"],
    ]),
    node,
    h("ul.legend", {}, ["load", "mma", "compute", "store", "wait"].map((kind) => h("li", {}, h("i", { style: `background:${TONE[kind]}` }), t(`pipeline.kind.${kind}`)))),
    h("div.line", {}, panel.node),
    h("ol.remarks", {}, notes.map(({ start, end, key }, i) =>
      h("li", {}, h("button", { type: "button", "data-remark": i + 1, "data-key": `remark-${i}`, onclick: () => set(focusOn((start + end) / 2, 8, data.length)) }, t("pipeline.look")), " ", t(`pipeline.remark.${key}`)))),
    h("p.small", {}, t("pipeline.hopper.note")),
  ];
}

/** "load k" or "consume 0 S" in the reader's words; `whole`, with whose product it is. */
function says(what, whole = false) {
  const kind = KIND(what);
  const [, group, product] = what.match(/^consume (\d) (.*)$/) ?? [];
  if (kind === "mma") return whole && group ? `${product} (${t("pipeline.unit.consume", { i: group })})` : product ?? what;
  return t(`pipeline.does.${kind}`, { x: what.replace(/^\w+ ?/, "").toUpperCase().split(" ")[0] });
}

/** The state in which this cycle is in the middle. */
function focusOn(cycle, zoom, length) {
  const wide = length / zoom;
  return { zoom, at: zoom === 1 ? 0 : Math.round(100 * Math.max(0, Math.min(1, (cycle - wide / 2) / (length - wide)))) };
}

/** What there is to see, found in the timeline itself. */
function remarks(spans, length) {
  const products = spans.filter(([unit]) => unit === "tensor cores").sort((a, b) => a[2] - b[2]);
  const found = [{ key: "prologue", start: 0, end: products[0][2] }];
  let best = 0;
  let where = null;
  for (const [unit, what, a, b] of spans.filter(([unit, what]) => unit.startsWith("consume") && what === "compute"))
    for (const [, of, c, d] of products) {
      const [start, end] = [Math.max(a, c), Math.min(b, d)];
      if (!of.startsWith(unit) && end - start > best) [best, where] = [end - start, { key: "overlap", start, end }];
    }
  if (where) found.push(where);
  const ahead = spans.find(([unit, what, a, b]) => unit === "copies" && /load [kv]/.test(what) && products.some(([, , c, d]) => c > products[0][2] && c < b && d > a));
  if (ahead) found.push({ key: "ahead", start: ahead[2], end: Math.min(ahead[3], length) });
  const stores = spans.filter(([, what]) => what.startsWith("store")).sort((a, b) => a[2] - b[2]);
  const under = stores.find(([, , a, b]) => products.some(([, , c, d]) => c < b && d > a));
  if (under) found.push({ key: "stored", start: under[2], end: under[3] });
  const last = stores.at(-1);
  if (last && last[2] >= products.at(-1)[3]) found.push({ key: "epilogue", start: last[2], end: last[3] });
  return found;
}

/** Spans that overlap are drawn one below the other; waits go to the foot of the lane. */
function stack(spans, waits) {
  const ends = [];
  const placed = [...spans].sort((a, b) => a[2] - b[2]).map((span) => {
    let level = ends.findIndex((end) => end <= span[2]);
    if (level < 0) level = ends.push(0) - 1;
    ends[level] = span[3];
    return { span, level };
  });
  return { placed: [...waits.map((span) => ({ span, level: 0 })), ...placed], depth: Math.max(1, ends.length) };
}

function union(spans) {
  let [sum, until] = [0, 0];
  for (const [, , start, end] of [...spans].sort((a, b) => a[2] - b[2])) {
    sum += Math.max(0, end - Math.max(start, until));
    until = Math.max(until, end);
  }
  return sum;
}
