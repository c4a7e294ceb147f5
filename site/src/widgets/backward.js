import { form, h, halves, picture, small, t } from "../core.js";
import { attention } from "../math/attention.js";
import { scores, times, transposed } from "../math/matrix.js";
import { chain } from "../math/graph.js";
import { readouts } from "../stage.js";
import { Panel } from "../touch.js";
import { NAMES, board, chips, grid } from "./board.js";

export const backward = {
  id: "backward",
  follows: ["text", "rows", "columns", "causal"],
  defaults: { part: "tiles", a: 2, w: 3, b: 1, step: 5 },
  controls: [
    { kind: "choice", key: "part", label: "backward.part", names: "backward.part", options: ["tiles", "matrices", "chain"], also: { step: 99 } },
    ...["a", "w", "b"].map((key) => ({ kind: "range", key, label: `backward.${key}`, min: -4, max: 4, step: 0.5, when: (s) => s.part === "chain" })),
  ],
  compute(one, { part, a, w, b, rows, columns, causal }) {
    if (part === "chain") return chain(a, w, b);
    const trace = attention(one, { rows, columns, after: causal ? 0 : null, backward: true });
    return { one, trace, first: trace.steps.findIndex(({ phase }) => phase === "delta"), values: part === "matrices" ? matrices(one, trace, causal) : null };
  },
  steps: (data, { part }) => (part === "chain" ? 2 * made(data).length + 1 : part === "tiles" ? data.trace.steps.length - data.first : ORDER.length),
  draw(figure, data, state, set) {
    figure.replaceChildren(...({ chain: notes, tiles: walk, matrices: flow }[state.part] ?? walk)(data, state.step, figure, set));
  },
};

const FORMULA = {
  delta: "δ = rowsum(dO ∘ O)<br>&nbsp;",
  key: "P = e<sup>S − lse</sup>&ensp; dV += Pᵀ dO<br>dS = P ∘ (dO Vᵀ − δ) / √d&ensp; dK += dSᵀ Q",
  query: "P = e<sup>S − lse</sup>&ensp; dS = P ∘ (dO Vᵀ − δ) / √d<br>dQ += dS K",
  finish: "&nbsp;<br>&nbsp;",
};

function walk({ one, trace, first }, step, figure, set) {
  const now = trace.steps[first + step - 1];
  const start = trace.steps[first - 1];
  const [left] = halves(0.55);
  const panel = new Panel("backward");
  const line = (name, blocks) => h("div.moved", {}, h("span.small", {}, `${t(`tiles.${name}`)} `), blocks?.length ? chips(blocks) : "–");
  return [
    readouts([
      ["tiles.read", form.bytes(now ? now.loaded - start.loaded : 0), "loaded"],
      ["tiles.written", form.bytes(now ? now.stored - start.stored : 0), "stored"],
      ["tiles.flops", form.count(now ? now.flops - start.flops : 0), "flops"],
      ["tiles.sram", `${form.bytes(now?.sram ?? 0)} / ${form.bytes(trace.totals.peak)}`, "sram"],
    ]),
    h("div.columns", {},
      h("div", {}, board(left, { trace, one, step, first }, panel, set), h("p.small", {}, t("tiles.touch"))),
      h("div.side", {},
        h("p.phase", {}, now ? t(`tiles.phase.${now.phase}`) : t("tiles.start")),
        h("p.formula.two", { html: now ? FORMULA[now.phase] : FORMULA.finish }),
        line("load", now?.loads),
        line("store", now?.stores),
        h("div.chip", {}, h("span.small", {}, `${t("tiles.chip")} `), chips(now?.resident ?? [])),
        panel.node)),
  ];
}

/** Every matrix of the example and of its gradient; what tiles never hold whole is put together from the definition. */
function matrices(one, trace, causal) {
  const s = scores(one.q, one.k).map((row, i) => row.map((x, j) => (causal && j > i ? -Infinity : x)));
  const p = s.map((row, i) => row.map((x) => Math.exp(x - trace.lse[i])));
  const dp = times(one.do, transposed(one.v));
  const delta = one.do.map((row, i) => row.reduce((sum, x, c) => sum + x * trace.out[i][c], 0));
  const ds = p.map((row, i) => row.map((x, j) => (x * (dp[i][j] - delta[i])) / Math.sqrt(one.q[0].length)));
  const column = (xs) => xs.map((x) => [x]);
  return { q: one.q, k: one.k, v: one.v, s, lse: column(trace.lse), p, o: trace.out, do: one.do, delta: column(delta), dp, ds, dq: trace.dq, dk: trace.dk, dv: trace.dv };
}

const made = (data) => data.nodes.filter((node) => node.inputs.length);

function notes(data, step, figure) {
  const ops = made(data);
  const n = ops.length;
  const known = new Set(data.nodes.filter((node) => !node.inputs.length || ops.indexOf(node) < step).map((node) => node.id));
  const passed = ops.slice().reverse().slice(0, Math.max(0, step - n - 1));
  const graded = new Set(step > n ? [ops[n - 1].id, ...passed.flatMap((node) => node.inputs.map(({ id }) => id))] : []);
  const now = step <= n ? ops[step - 1] : passed[passed.length - 1];

  const depth = new Map();
  for (const node of ops) depth.set(node.id, 1 + Math.max(...node.inputs.map(({ id }) => depth.get(id) ?? 0)));
  for (const node of ops) for (const { id } of node.inputs) if (!depth.has(id)) depth.set(id, depth.get(node.id) - 1);
  const rows = new Map();
  for (const node of [...data.nodes].sort((a, b) => b.inputs.length - a.inputs.length)) {
    const column = rows.get(depth.get(node.id)) ?? [];
    rows.set(depth.get(node.id), [...column, node.id]);
  }
  const tight = small(); // from top to bottom on a phone, else from left to right
  const half = tight ? 46 : 52;
  const [wide] = halves(1);
  const place = (id) => {
    const [at, aside] = [depth.get(id), rows.get(depth.get(id)).indexOf(id)];
    return tight ? [half + 6 + aside * (wide - 2 * half - 12), 40 + at * 104] : [70 + at * 205, 66 + aside * 126];
  };
  const bend = ([x0, y0], [x1, y1]) =>
    tight ? `M${x0} ${y0 + 34}C${x0} ${y0 + 60} ${x1} ${y1 - 60} ${x1} ${y1 - 34}` : `M${x0 + half} ${y0}C${x0 + 110} ${y0} ${x1 - 110} ${y1} ${x1 - half} ${y1}`;

  const panel = new Panel("chain");
  const holder = h("div", {});
  const svg = picture(holder, tight ? wide : 800, tight ? 400 : 262, t("backward.part.chain"), "group");
  for (const node of ops)
    for (const { id, local } of node.inputs) {
      const [[x0, y0], [x1, y1]] = [place(id), place(node.id)];
      const back = passed.includes(node);
      const live = node === now;
      svg.append("path").attr("d", bend([x0, y0], [x1, y1])).attr("fill", "none")
        .attr("stroke", back ? "var(--s2)" : "var(--faint)").attr("stroke-width", live ? 3.5 : 2).attr("opacity", known.has(node.id) || live ? 1 : 0.4);
      if (back)
        svg.append("text").attr("class", "middle halo strong").attr("x", (x0 + x1) / 2).attr("y", (y0 + y1) / 2 - 8).style("fill", "var(--s2)").text(`× ${form.short(local)}`);
    }
  for (const node of data.nodes) {
    const [x, y] = place(node.id);
    const shown = known.has(node.id);
    const g = svg.append("g").attr("opacity", shown ? 1 : 0.35);
    g.append("rect").attr("x", x - half).attr("y", y - 34).attr("width", 2 * half).attr("height", 68).attr("rx", 12).attr("fill", "var(--wash)")
      .attr("stroke", node === now ? "var(--s0)" : "var(--rule)").attr("stroke-width", node === now ? 3 : 1.5);
    g.append("text").attr("class", "middle tick").attr("x", x).attr("y", y - 16).text(label(node, data));
    g.append("text").attr("class", "middle strong").attr("x", x).attr("y", y + 5).style("font-size", "17px").text(shown ? form.short(node.value) : "?");
    g.append("text").attr("class", "middle strong").attr("x", x).attr("y", y + 25).style("fill", "var(--s2)").attr("data-gradient", node.name)
      .text(graded.has(node.id) ? `∂ ${form.short(node.gradient)}` : "");
    panel.add(g, { key: node.name, label: label(node, data), tell: () => tellNode(node, data) });
  }
  const find = (name) => data.nodes.find((node) => node.name === name);
  const phi = find("φ");
  panel.begin("φ");
  return [
    readouts([
      ["backward.phi", known.has(phi.id) ? form.short(phi.value) : "?", "phi"],
      ["backward.dw", graded.has(find("w1").id) ? form.short(find("w1").gradient) : "?", "dw1"],
      ["backward.da", graded.has(find("a").id) ? form.short(find("a").gradient) : "?", "da"],
      ["backward.db", graded.has(find("b1").id) ? form.short(find("b1").gradient) : "?", "db1"],
    ]),
    h("p.formula", { html: "φ = (a w₁ + b₁)²&emsp; ∂φ/∂w₁ = <span class=new>1 · 2y₂ · 1 · a</span> = 2a(a w₁ + b₁)" }),
    h("div.columns.wider", {}, holder, panel.node),
    h("p.small", {}, t(step <= n ? "backward.forward" : "backward.backward")),
  ];
}

function tellNode(node, data) {
  const users = data.nodes.flatMap((one) => one.inputs.filter(({ id }) => id === node.id).map(({ local }) => [one, local]));
  return [
    h("p.phase", {}, `${label(node, data)} = ${form.short(node.value)}`),
    h("p.formula", {}, users.length ? users.map(([one, local]) => `∂φ/∂${pretty(node.name)} = ${form.short(one.gradient)} · ${form.short(local)} = ${form.short(node.gradient)}`).join("; ") : "∂φ/∂φ = 1"),
    h("p.small", {}, t("backward.node")),
  ];
}

const pretty = (name) => name.replace(/\d/, (digit) => "₀₁₂₃₄₅₆₇₈₉"[digit]);

function label(node, data) {
  const names = node.inputs.map(({ id }) => pretty(data.nodes[id].name));
  if (!names.length) return pretty(node.name);
  return `${pretty(node.name)} = ${names.length > 1 ? names.join(` ${node.op} `) : `${names[0]}${node.op.replace("^2", "²")}`}`;
}

// Where each matrix is drawn, what it is made from and how, and whether it ever lies in HBM.
const CHIP = new Set(["s", "p", "dp", "ds"]);
const ROWS = [["q", "k", "v"], ["s", "lse", "p"], ["o", "do", "delta"], ["dp", "ds"], ["dq", "dk", "dv"]];
const STEPS = {
  s: [["q", "k"], "S = Q Kᵀ / √d"],
  lse: [["s"], "lse = log Σ<sub>j</sub> e<sup>S<sub>ij</sub></sup>"],
  p: [["s", "lse"], "P = e<sup>S − lse</sup>"],
  o: [["p", "v"], "O = P V"],
  delta: [["o", "do"], "δ = rowsum(dO ∘ O) = rowsum(P ∘ dP)"],
  dp: [["do", "v"], "dP = dO Vᵀ"],
  ds: [["p", "dp", "delta"], "dS = P ∘ (dP − δ) / √d"],
  dv: [["p", "do"], "dV = Pᵀ dO"],
  dk: [["ds", "q"], "dK = dSᵀ Q"],
  dq: [["ds", "k"], "dQ = dS K"],
};
const ORDER = Object.keys(STEPS);

/** From Q, K and V at the top to their gradients at the bottom; a matrix shows its numbers when touched. */
function flow({ one, values }, step, figure) {
  const at = Math.min(step, ORDER.length);
  const now = ORDER[at - 1];
  const known = new Set(["q", "k", "v", ...(at > 4 ? ["do"] : []), ...ORDER.slice(0, at)]);
  const [width] = halves(0.55);
  const cell = Math.min(13, Math.floor((width - 90) / (2 * one.n + 2)));
  const holder = h("div", {});
  const tall = one.n * cell + 40;
  const svg = picture(holder, width, ROWS.length * tall, t("backward.part.matrices"), "group");
  const panel = new Panel("matrices");
  const size = (name) => [values[name][0].length * cell, values[name].length * cell];
  const corner = {};
  ROWS.forEach((names, row) => {
    const free = width - names.reduce((sum, name) => sum + size(name)[0], 0);
    let x = free / (2 * names.length);
    for (const name of names) {
      corner[name] = [x, row * tall + 8];
      x += size(name)[0] + free / names.length;
    }
  });
  const middle = (name) => [corner[name][0] + size(name)[0] / 2, corner[name][1] + size(name)[1] / 2];
  for (const [name, [inputs]] of Object.entries(STEPS))
    for (const from of inputs) {
      if (!known.has(name)) continue;
      const [[x0, y0], [x1, y1]] = [middle(from), middle(name)];
      const live = name === now;
      svg.append("path").attr("d", `M${x0} ${y0}C${x0} ${(y0 + y1) / 2} ${x1} ${(y0 + y1) / 2} ${x1} ${y1}`).attr("fill", "none")
        .attr("stroke", live ? "var(--s3)" : "var(--faint)").attr("stroke-width", live ? 3 : 1.2).attr("opacity", live ? 1 : 0.35);
    }
  for (const name of ROWS.flat()) {
    const [[x, y], [wide, high]] = [corner[name], size(name)];
    const shown = known.has(name);
    const g = svg.append("g").attr("data-matrix", name).attr("opacity", shown ? 1 : 0.35);
    g.append("rect").attr("x", x - 5).attr("y", y - 5).attr("width", wide + 10).attr("height", high + 10).attr("rx", 7).attr("fill", "var(--card)")
      .attr("stroke", name === now ? "var(--s3)" : "var(--soft)").attr("stroke-width", name === now ? 3 : 1.3).attr("stroke-dasharray", CHIP.has(name) ? "4 3" : "none");
    const most = Math.max(...values[name].flat().filter(Number.isFinite).map(Math.abs), 1e-9);
    values[name].forEach((row, i) => row.forEach((value, j) =>
      g.append("rect").attr("x", x + j * cell).attr("y", y + i * cell).attr("width", cell - 1.5).attr("height", cell - 1.5).attr("rx", 2)
        .attr("fill", !shown || !Number.isFinite(value) ? "var(--wash)" : value < 0 ? "var(--s2)" : "var(--s0)").attr("opacity", shown && Number.isFinite(value) ? 0.12 + (0.88 * Math.abs(value)) / most : 1)));
    g.append("text").attr("class", "middle strong halo").attr("x", x + wide / 2).attr("y", y + high + 19).text(NAMES[name]);
    panel.add(g, { key: name, label: `${NAMES[name]}. ${t(CHIP.has(name) ? "backward.chip" : "backward.hbm")}`, tell: () => tellMatrix(one, values, name) });
  }
  panel.begin(now ?? "q");
  return [
    readouts([
      ["backward.now", now ? NAMES[now] : "–", "matrix"],
      ["backward.where", now ? t(CHIP.has(now) ? "backward.chip" : "backward.hbm") : "–", "where"],
      ["backward.first", now ? form.fixed(values[now][0][0], 4) : "–", "first"],
    ]),
    h("p.formula", { html: now ? STEPS[now][1] : "&nbsp;" }),
    h("div.columns", {}, holder, h("div.side", {}, panel.node)),
    h("p.small", {}, t("backward.flash.note")),
  ];
}

function tellMatrix(one, values, name) {
  const square = ["s", "p", "dp", "ds"].includes(name);
  const heads = square ? one.words : values[name][0].map((_, c) => String(c + 1));
  return [
    h("p.phase", { html: STEPS[name]?.[1] ?? NAMES[name] }),
    h("p.small", {}, t(CHIP.has(name) ? "backward.chip" : "backward.hbm")),
    grid([NAMES[name], ...heads], values[name].map((row, i) => [one.words[i], ...row]), { label: NAMES[name] }),
  ];
}
