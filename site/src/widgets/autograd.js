import { form, h, picture, t } from "../core.js";
import { readouts } from "../stage.js";

export const autograd = {
  id: "autograd",
  endpoint: "autograd",
  defaults: { part: "notes", a: 2, w: 3, b: 1, seed: 0, step: 7 },
  controls: [
    { kind: "choice", key: "part", label: "autograd.part", names: "autograd.part", options: ["notes", "flash"], also: { step: 99 } },
    ...["a", "w", "b"].map((key) => ({ kind: "range", key, label: `autograd.${key}`, min: -4, max: 4, step: 0.5, when: (s) => s.part === "notes" })),
    { kind: "range", key: "seed", label: "autograd.seed", values: [0, 1, 2], when: (s) => s.part === "flash" },
  ],
  ask: ({ part, a, w, b, seed }, ask) => (part === "notes" ? ask("autograd", { a, w, b }) : ask("flash", { n: 4, d: 2, seed })),
  steps: (data) => (data.nodes ? 2 * made(data).length + 1 : ORDER.length),
  draw(figure, data, state, set) {
    figure.replaceChildren(...(data.nodes ? notes(data, state.step) : flash(data, state.step)));
  },
};

const made = (data) => data.nodes.filter((node) => node.inputs.length);

function notes(data, step) {
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
  const place = (id) => [70 + depth.get(id) * 205, 66 + rows.get(depth.get(id)).indexOf(id) * 126];

  const holder = h("div.scroll.wide", {});
  const svg = picture(holder, 760, 262, t("autograd.part.notes"));
  for (const node of ops)
    for (const { id, local } of node.inputs) {
      const [[x0, y0], [x1, y1]] = [place(id), place(node.id)];
      const back = passed.includes(node);
      const live = node === now;
      svg.append("path").attr("d", `M${x0 + 52} ${y0}C${x0 + 110} ${y0} ${x1 - 110} ${y1} ${x1 - 52} ${y1}`).attr("fill", "none")
        .attr("stroke", back ? "var(--s2)" : "var(--faint)").attr("stroke-width", live ? 3.5 : 2).attr("opacity", known.has(node.id) || live ? 1 : 0.4);
      if (back)
        svg.append("text").attr("class", "middle halo strong").attr("x", (x0 + x1) / 2).attr("y", (y0 + y1) / 2 - 8).style("fill", "var(--s2)").text(`× ${form.short(local)}`);
    }
  for (const node of data.nodes) {
    const [x, y] = place(node.id);
    const shown = known.has(node.id);
    const g = svg.append("g").attr("opacity", shown ? 1 : 0.35);
    g.append("rect").attr("x", x - 52).attr("y", y - 34).attr("width", 104).attr("height", 68).attr("rx", 12).attr("fill", "var(--wash)")
      .attr("stroke", node === now ? "var(--s0)" : "var(--rule)").attr("stroke-width", node === now ? 3 : 1.5);
    g.append("text").attr("class", "middle tick").attr("x", x).attr("y", y - 16).text(label(node, data));
    g.append("text").attr("class", "middle strong").attr("x", x).attr("y", y + 5).style("font-size", "17px").text(shown ? form.short(node.value) : "?");
    g.append("text").attr("class", "middle strong").attr("x", x).attr("y", y + 25).style("fill", "var(--s2)").attr("data-gradient", node.name)
      .text(graded.has(node.id) ? `∂ ${form.short(node.gradient)}` : "");
  }
  const find = (name) => data.nodes.find((node) => node.name === name);
  const phi = find("φ");
  return [
    readouts([
      ["autograd.phi", known.has(phi.id) ? form.short(phi.value) : "?", "phi"],
      ["autograd.dw", graded.has(find("w1").id) ? form.short(find("w1").gradient) : "?", "dw1"],
      ["autograd.da", graded.has(find("a").id) ? form.short(find("a").gradient) : "?", "da"],
      ["autograd.db", graded.has(find("b1").id) ? form.short(find("b1").gradient) : "?", "db1"],
    ]),
    h("p.formula", { html: "φ = (a w₁ + b₁)²&emsp; ∂φ/∂w₁ = <span class=new>1 · 2y₂ · 1 · a</span> = 2a(a w₁ + b₁)" }),
    holder,
    h("p.small", {}, t(step <= n ? "autograd.forward" : "autograd.backward")),
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
const PLACE = {
  q: [0, 0], k: [0, 1], v: [0, 2], do: [0, 3], s: [1.05, 0.4], dp: [1.05, 2.6], p: [2.1, 1.2], lse: [2.1, 0], o: [3.15, 0.2], delta: [3.15, 3],
  ds: [4.1, 1.75], dv: [5.2, 2.9], dk: [5.2, 1.6], dq: [5.2, 0.3],
};
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
const TITLE = { q: "Q", k: "K", v: "V", do: "dO", s: "S", dp: "dP", p: "P", lse: "lse", o: "O", delta: "δ", ds: "dS", dv: "dV", dk: "dK", dq: "dQ" };

function flash(data, step) {
  const at = Math.min(step, ORDER.length);
  const now = ORDER[at - 1];
  const known = new Set(["q", "k", "v", ...(at > 4 ? ["do"] : []), ...ORDER.slice(0, at)]);
  const holder = h("div.scroll.wide", {});
  const svg = picture(holder, 760, 448, t("autograd.part.flash"));
  const [cell, sx, sy] = [15, 128, 112];
  const corner = (name) => [14 + PLACE[name][0] * sx, 24 + PLACE[name][1] * sy * 0.98];
  const size = (name) => [data.values[name][0].length * cell, data.values[name].length * cell];
  for (const [name, [inputs]] of Object.entries(STEPS))
    for (const from of inputs) {
      if (!known.has(name)) continue;
      const [[x0, y0], [w0, h0], [x1, y1], [, h1]] = [corner(from), size(from), corner(name), size(name)];
      const live = name === now;
      const [ax, ay, bx, by] = [x0 + w0 + 5, y0 + h0 / 2, x1 - 6, y1 + h1 / 2];
      const bend = Math.max(30, Math.abs(bx - ax) / 2);
      svg.append("path").attr("d", `M${ax} ${ay}C${ax + bend} ${ay} ${bx - bend} ${by} ${bx} ${by}`).attr("fill", "none")
        .attr("stroke", live ? "var(--s3)" : "var(--faint)").attr("stroke-width", live ? 3 : 1.3).attr("opacity", live ? 1 : 0.45);
    }
  for (const name of Object.keys(PLACE)) {
    const [x, y] = corner(name);
    const [wide, tall] = size(name);
    const shown = known.has(name);
    const g = svg.append("g").attr("data-matrix", name).attr("opacity", shown ? 1 : 0.25);
    g.append("rect").attr("x", x - 5).attr("y", y - 5).attr("width", wide + 10).attr("height", tall + 10).attr("rx", 7).attr("fill", "var(--card)")
      .attr("stroke", name === now ? "var(--s3)" : "var(--soft)").attr("stroke-width", name === now ? 3 : 1.3).attr("stroke-dasharray", CHIP.has(name) ? "4 3" : "none");
    const most = Math.max(...data.values[name].flat().map(Math.abs), 1e-9);
    data.values[name].forEach((row, i) =>
      row.forEach((value, j) =>
        g.append("rect").attr("x", x + j * cell).attr("y", y + i * cell).attr("width", cell - 1.5).attr("height", cell - 1.5).attr("rx", 2.5)
          .attr("fill", shown ? (value < 0 ? "var(--s2)" : "var(--s0)") : "var(--wash)").attr("opacity", shown ? 0.12 + (0.88 * Math.abs(value)) / most : 1)
          .append("title").text(`${TITLE[name]}[${i}, ${j}] = ${form.short(value)}`)));
    svg.append("text").attr("class", "middle strong halo").attr("x", x + wide / 2).attr("y", y + tall + 20).attr("opacity", shown ? 1 : 0.5).text(TITLE[name]);
  }
  return [
    readouts([
      ["autograd.now", now ? TITLE[now] : "–", "matrix"],
      ["autograd.where", now ? t(CHIP.has(now) ? "autograd.chip" : "autograd.hbm") : "–", "where"],
      ["autograd.first", now ? form.fixed(data.values[now][0][0], 4) : "–", "first"],
      ["autograd.error", data.error.toExponential(1).replace("-", "−"), "error", "good"],
    ]),
    h("p.formula", { html: now ? STEPS[now][1] : "&nbsp;" }),
    holder,
    h("p.small", {}, t("autograd.flash.note")),
  ];
}
