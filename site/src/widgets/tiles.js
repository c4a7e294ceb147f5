import { scaleLinear } from "d3-scale";
import { below, form, h, picture, t } from "../core.js";
import { readouts } from "../stage.js";

const HUE = { q: "--s0", dq: "--s0", k: "--s1", dk: "--s1", v: "--s2", dv: "--s2", o: "--s3", do: "--s3" };
const hue = (name) => `var(${HUE[name] ?? "--soft"})`;
const NAMES = { q: "Q", k: "K", v: "V", o: "O", do: "dO", dq: "dQ", dk: "dK", dv: "dV", m: "m", l: "l", lse: "lse", delta: "δ", p: "P", ds: "dS" };
const block = ([name, i]) => (name === "p" || name === "ds" ? NAMES[name] : `${NAMES[name]}${below(i + 1)}`);
const parse = (text) => (text ? text.split(" ").map((word) => word.match(/([a-z]+)(\d+)/).slice(1)).map(([name, i]) => [name, Number(i)]) : []);

export const tiles = {
  id: "tiles",
  endpoint: "tiles",
  defaults: { n: 8, rows: 2, columns: 2, order: "fa2", mask: "none", width: 2, backward: 0, step: 7 },
  controls: [
    { kind: "choice", key: "order", label: "tiles.order", names: "tiles.order", options: ["fa1", "fa2"] },
    { kind: "choice", key: "mask", label: "tiles.mask", names: "tiles.mask", options: ["none", "causal", "window"] },
    { kind: "range", key: "width", label: "tiles.width", min: 0, max: 12, when: (state) => state.mask === "window" },
    { kind: "range", key: "n", label: "tiles.n", min: 4, max: 32 },
    { kind: "range", key: "rows", label: "tiles.rows", min: 1, max: 8 },
    { kind: "range", key: "columns", label: "tiles.columns", min: 1, max: 8 },
    { kind: "toggle", key: "backward", label: "tiles.backward" },
  ],
  async ask(state, ask) {
    const { step, ...query } = state;
    if (query.mask !== "window") query.width = 2;
    query.rows = Math.min(query.rows, query.n);
    query.columns = Math.min(query.columns, query.n);
    const [fa1, fa2] = await Promise.all(["fa1", "fa2"].map((order) => ask("tiles", { ...query, order })));
    return { fa1, fa2 };
  },
  steps: (data, state) => data[state.order].steps.length,

  draw(figure, data, state) {
    const trace = data[state.order];
    const now = trace.steps[state.step - 1];
    const visited = trace.totals.visited;
    figure.replaceChildren(
      readouts([
        ["tiles.read", form.bytes(now?.loaded ?? 0), "loaded"],
        ["tiles.written", form.bytes(now?.stored ?? 0), "stored"],
        ["tiles.flops", form.count(now?.flops ?? 0), "flops"],
        ["tiles.sram", form.bytes(now?.sram ?? 0), "sram"],
        ["tiles.visited", `${visited} / ${visited + trace.totals.skipped}`, "visited"],
      ]),
      h("div.columns", {}, matrices(trace, state.step, now), side(data, state, now)),
    );
  },
};

function matrices(trace, step, now) {
  const [size, band, gap] = [300, 30, 8];
  const both = trace.backward;
  const edge = both ? 2 * (band + gap) + 8 : band + gap + 22;
  const [left, top] = [edge, edge];
  const node = h("div", {});
  const svg = picture(node, size + 2 * edge + 14, size + 2 * edge, t("tiles.picture"));
  const unit = scaleLinear([0, trace.sq], [0, size]);
  const past = trace.steps.slice(0, step);
  const written = new Set(past.flatMap(({ stores }) => parse(stores).map(String)));
  const loads = new Set(parse(now?.loads).map(String));
  const stores = new Set(parse(now?.stores).map(String));
  const resident = new Set(parse(now?.resident).map(String));

  const rows = (i) => [unit(i * trace.rows), unit(Math.min((i + 1) * trace.rows, trace.sq))];
  const columns = (j) => [unit(j * trace.columns), unit(Math.min((j + 1) * trace.columns, trace.sk))];
  const [tall, wide] = [Math.ceil(trace.sq / trace.rows), Math.ceil(trace.sk / trace.columns)];

  const strip = (name, vertical, at, thick = band) => {
    for (let i = 0; i < (vertical ? tall : wide); i++) {
      const [from, to] = vertical ? rows(i) : columns(i);
      const key = String([name, i]);
      const here = resident.has(key);
      const is = ["q", "k", "v", "do"].includes(name) || written.has(key);
      const rect = svg.append("rect").attr("rx", 3).attr("fill", hue(name))
        .attr("opacity", here ? 1 : is ? 0.3 : 0.1)
        .attr("stroke", stores.has(key) ? "var(--ink)" : loads.has(key) ? hue(name) : "none").attr("stroke-width", 3).attr("paint-order", "stroke");
      if (vertical) rect.attr("x", at).attr("width", thick).attr("y", top + from + 1).attr("height", to - from - 2);
      else rect.attr("y", at).attr("height", thick).attr("x", left + from + 1).attr("width", to - from - 2);
      if (to - from > 17 && thick > 20)
        svg.append("text").attr("class", "middle").style("font-size", "11px").style("fill", here ? "var(--card)" : hue(name))
          .attr("x", vertical ? at + thick / 2 : left + (from + to) / 2).attr("y", vertical ? top + (from + to) / 2 + 4 : at + thick / 2 + 4)
          .attr("pointer-events", "none").text(block([name, i]));
    }
    // Labels go round the corners: K at the upper left, O at the upper right, V at the lower right, Q at the lower left.
    const [x, y] = vertical ? [at + thick / 2, at < left ? top + size + 16 : top - 8] : [at < top ? left - 8 : left + size + 8, at + thick / 2 + 5];
    svg.append("text").attr("class", `strong ${vertical ? "middle" : at < top ? "end" : ""}`).style("fill", hue(name)).attr("x", x).attr("y", y)
      .text(vertical ? NAMES[name] : `${NAMES[name]}ᵀ`);
  };

  const near = gap + band;
  strip("q", true, left - near);
  strip("k", false, top - near);
  strip("v", false, top + size + gap);
  strip("o", true, left + size + gap);
  if (both) {
    strip("dq", true, left - 2 * near);
    strip("dk", false, top - 2 * near);
    strip("dv", false, top + size + gap + near);
    strip("do", true, left + size + gap + near);
  }
  strip("lse", true, left + size + gap + near * (both ? 2 : 1) + 2, 9);

  const skipped = new Set(trace.skipped.map(String));
  const seen = new Map(past.filter(({ j, i }) => i !== null && j !== null).map((one) => [String([one.i, one.j]), one]));
  for (let i = 0; i < tall; i++)
    for (let j = 0; j < wide; j++) {
      const key = String([i, j]);
      const [y0, y1] = rows(i);
      const [x0, x1] = columns(j);
      const current = now && now.i === i && now.j === j;
      svg.append("rect").attr("x", left + x0 + 1).attr("y", top + y0 + 1).attr("width", x1 - x0 - 2).attr("height", y1 - y0 - 2).attr("rx", 3)
        .attr("data-tile", key)
        .attr("fill", skipped.has(key) ? "none" : current ? "var(--s4)" : seen.has(key) ? "var(--soft)" : "var(--wash)")
        .attr("opacity", seen.has(key) && !current ? 0.32 : 1)
        .attr("stroke", skipped.has(key) ? "var(--rule)" : "none").attr("stroke-dasharray", "3 3");
      if (current && x1 - x0 > 22 && y1 - y0 > 16)
        svg.append("text").attr("class", "middle strong").attr("x", left + (x0 + x1) / 2).attr("y", top + (y0 + y1) / 2 + 5).style("fill", "var(--card)").text("S");
    }
  for (let i = 0; i < trace.sq; i++) {
    const hide = (a, b) => b > a && svg.append("rect").attr("x", left + unit(a)).attr("width", unit(b) - unit(a)).attr("y", top + unit(i)).attr("height", unit(1)).attr("fill", "var(--card)").attr("opacity", 0.62);
    if (trace.before !== null) hide(0, Math.min(i - trace.before, trace.sk));
    if (trace.after !== null) hide(Math.max(0, i + trace.after + 1), trace.sk);
  }
  return node;
}

const FORMULA = {
  forward: "m′ = max(m, rowmax S)&ensp; P = e<sup>S − m′</sup>&ensp; l ← <span class=c>e<sup>m − m′</sup></span> l + rowsum P&ensp; O ← <span class=c>e<sup>m − m′</sup></span> O + P V",
  delta: "δ = rowsum(dO ∘ O)",
  key: "P = e<sup>S − lse</sup>&ensp; dV += Pᵀ dO&ensp; dS = P ∘ (dO Vᵀ − δ)&ensp; dK += dSᵀ Q",
  query: "P = e<sup>S − lse</sup>&ensp; dS = P ∘ (dO Vᵀ − δ)&ensp; dQ += dS K",
};
const FINISH = { o: "O ← O / l&ensp; lse = m + log l", dk: "dK, dV", dq: "dQ" };

function side(data, state, now) {
  const trace = data[state.order];
  const moved = (name, words) => words && h("div", {}, h("span.small", {}, `${t(`tiles.${name}`)} `), chips(parse(words)));
  const text = !now ? t("tiles.start") : t(`tiles.phase.${now.phase}`);
  const finish = now?.phase === "finish" && FINISH[parse(now.stores)[0][0]];
  return h("div.side", {},
    h("p.phase", {}, text),
    h("p.formula", { html: (now && (finish || FORMULA[now.phase])) ?? "&nbsp;", style: "font-size:15px" }),
    now && moved("load", now.loads),
    now && moved("store", now.stores),
    h("p.small", {}, t("tiles.chip")),
    h("div.chip", {}, chips(parse(now?.resident))),
    bars(data, state, now, trace));
}

function chips(blocks) {
  return h("span.chips", {}, blocks.map((one) => h("i", { style: `--hue:${hue(one[0])}` }, block(one))));
}

function bars(data, state, now, trace) {
  const whole = (one) => Object.values(one.totals.loaded).concat(Object.values(one.totals.stored)).reduce((a, b) => a + b, 0);
  const other = state.order === "fa1" ? "fa2" : "fa1";
  const rows = [
    ["tiles.bar.now", state.order.toUpperCase(), (now?.loaded ?? 0) + (now?.stored ?? 0), whole(trace), "var(--s0)", "moved"],
    ["tiles.bar.other", other.toUpperCase(), whole(data[other]), whole(data[other]), "var(--faint)", "other"],
    ["tiles.bar.naive", "", trace.naive, trace.naive, "var(--faint)", "naive"],
  ];
  const most = Math.max(...rows.map((row) => row[3]));
  return h("div.bars", {},
    h("p.small", {}, t("tiles.bars")),
    rows.map(([label, order, bytes, end, fill, name]) =>
      h("div.bar", {},
        h("span", {}, t(label, { order })),
        h("b", { "data-value": name }, form.bytes(bytes)),
        h("div.track", { style: `--end:${(100 * end) / most}%` }, h("div", { style: `width:${(100 * bytes) / most}%;background:${fill}` })))));
}
