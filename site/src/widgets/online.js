import { scaleLinear } from "d3-scale";
import { below, form, h, halves, picture, t } from "../core.js";
import { rowOfScores } from "../example.js";
import { softmax as trace } from "../math/softmax.js";
import { sum } from "../math/matrix.js";
import { readouts } from "../stage.js";
import { Panel } from "../touch.js";
import { clip, colour } from "./softmax.js";

export const online = {
  id: "online",
  follows: ["text", "row", "causal"],
  defaults: { fix: 1, step: 3 },
  controls: [{ kind: "toggle", key: "fix", label: "online.correction" }],
  compute: (one, state) => ({ ...trace(rowOfScores(one, state.row, state.causal)), words: one.words }),
  steps: (data) => data.x.length + 1,

  draw(figure, data, state, set) {
    const n = data.x.length;
    const fix = Boolean(Number(state.fix));
    const run = fix ? data.right : data.wrong;
    const seen = Math.min(state.step, n);
    const done = state.step > n;
    const now = run.steps[seen - 1];
    const tone = !now ? "" : now.ok ? "good" : "bad";
    const [left] = halves(0.54);
    const panel = new Panel("online");
    figure.replaceChildren(
      readouts([
        ["online.m", now ? number(now.m) : "−∞", "m"],
        ["online.factor", now && fix ? form.fixed(now.factor) : "–", "factor"],
        ["online.l", form.fixed(now ? now.l : 0), "l", tone],
        ["online.sum", done ? form.fixed(sum(run.out)) : "–", "sum", done ? tone : ""],
        ["online.lse", done && fix ? form.fixed(data.right.lse) : "–", "lse"],
      ]),
      h("p.formula.held", { html: formula(run, state.step, fix) }),
      h("div.columns", {}, h("div", {}, drawing(left, data, run, seen, done, panel, set), panel.node), table(data, run, state, set)),
    );
    panel.begin(Math.max(0, seen - 1));
  },
};

const number = (x) => form.short(x);

function formula(run, step, fix) {
  const n = run.steps.length;
  if (step === 0) return "m₀ = −∞,&ensp; l₀ = 0";
  if (step > n) return `p<sub>i</sub> = e<sup>x<sub>i</sub> − m${below(n)}</sup> / l${below(n)} = e<sup>x<sub>i</sub> − ${sign(run.steps[n - 1].m)}</sup> / ${form.fixed(run.steps[n - 1].l)}`;
  const { m, x, l, term, kept } = run.steps[step - 1];
  const before = run.steps[step - 2] ?? { m: -Infinity, l: 0 };
  const [k, j] = [below(step), below(step - 1)];
  const last = `<span class="new">e<sup>${number(x)} − ${sign(m)}</sup></span>`;
  if (!fix)
    return `l${k} = l${j} + <span class="new">e<sup>x${k} − m${k}</sup></span> = ${form.fixed(kept)} + ${last} = ${form.fixed(kept)} + ${form.fixed(term)} = <b>${form.fixed(l)}</b>`;
  return (
    `l${k} = l${j} · <span class="c">e<sup>m${j} − m${k}</sup></span> + <span class="new">e<sup>x${k} − m${k}</sup></span> = ` +
    `${form.fixed(before.l)} · <span class="c">e<sup>${number(before.m)} − ${sign(m)}</sup></span> + ${last} = ` +
    `${form.fixed(kept)} + ${form.fixed(term)} = <b>${form.fixed(l)}</b>`
  );
}

const sign = (x) => (x < 0 ? `(${number(x)})` : number(x));

/** The terms of l after `seen` elements: each correction shrinks all that came before. */
function terms(run, seen) {
  return run.steps.slice(0, seen).reduce((sizes, { factor, term }) => [...sizes.map((size) => size * factor), term], []);
}

function drawing(width, data, run, seen, done, panel, set) {
  const n = data.x.length;
  const [top, bottom] = [26, 150];
  const y = scaleLinear([Math.min(0, ...data.x), Math.max(1, ...data.x)], [bottom, top]);
  const slot = width / n;
  const bar = Math.min(60, slot * 0.62);
  const node = h("div", {});
  const svg = picture(node, width, 270, t("online.picture"), "group");
  svg.append("line").attr("x1", 0).attr("x2", width).attr("y1", y(0)).attr("y2", y(0)).attr("stroke", "var(--rule)");
  const parts = done ? run.out : terms(run, seen);
  data.x.forEach((x, i) => {
    const at = slot * (i + 0.5);
    const g = svg.append("g");
    g.append("rect").attr("x", at - slot / 2).attr("y", 4).attr("width", slot).attr("height", bottom + 24).attr("fill", "transparent");
    g.append("rect").attr("x", at - bar / 2).attr("width", bar).attr("rx", 4)
      .attr("y", Math.min(y(0), y(x))).attr("height", Math.max(1.5, Math.abs(y(x) - y(0))))
      .attr("fill", colour(i)).attr("opacity", i < seen ? (i === seen - 1 && !done ? 1 : 0.6) : 0.2);
    g.append("text").attr("class", `middle ${i === seen - 1 ? "strong" : ""}`).attr("x", at).attr("y", x < 0 ? y(x) + 14 : y(x) - 6).text(form.short(Number(x.toPrecision(3))));
    g.append("text").attr("class", "middle tick").attr("x", at).attr("y", bottom + 24).text(clip(data.words[i], slot));
    panel.add(g, { key: i, label: t("online.element", { i: i + 1, x: number(x) }), tell: () => tell(data, run, i, seen, done, parts), press: () => set({ step: i + 1 }) });
  });
  const m = run.steps[seen - 1]?.m;
  if (m !== undefined) {
    svg.append("line").attr("x1", 0).attr("x2", slot * seen).attr("y1", y(m)).attr("y2", y(m))
      .attr("stroke", "var(--ink)").attr("stroke-dasharray", "5 4").attr("stroke-width", 1.5).attr("pointer-events", "none");
    svg.append("text").attr("class", "halo strong").attr("x", 2).attr("y", y(m) + 15).attr("pointer-events", "none").text(`m${below(seen)}`);
  }

  const most = done ? Math.max(1, sum(run.out)) : Math.max(...[data.right, data.wrong].flatMap(({ steps }) => steps.map(({ l }) => l)));
  const w = scaleLinear([0, most], [0, width]);
  svg.append("text").attr("class", "tick").attr("x", 0).attr("y", 200).text(done ? t("online.outputs") : t("online.bar", { i: below(seen) }));
  svg.append("rect").attr("x", 0).attr("y", 208).attr("width", width).attr("height", 34).attr("rx", 6).attr("fill", "var(--wash)");
  let from = 0;
  parts.forEach((size, j) => {
    const wide = w(size);
    svg.append("rect").attr("x", w(from)).attr("y", 208).attr("height", 34).attr("width", Math.max(0, wide - 1.5)).attr("rx", 4).attr("fill", colour(j));
    if (wide > 44) svg.append("text").attr("class", "middle strong").attr("x", w(from) + wide / 2).attr("y", 230).style("fill", "var(--card)").text(form.fixed(size, 3));
    from += size;
  });
  const right = data.right.steps[seen - 1]?.l;
  if (!done && seen && !run.steps[seen - 1].ok) {
    const at = w(right);
    svg.append("line").attr("x1", at).attr("x2", at).attr("y1", 202).attr("y2", 250).attr("stroke", "var(--good)").attr("stroke-width", 2.5);
    svg.append("text").attr("class", `strong ${at > width - 70 ? "end" : at < 70 ? "" : "middle"}`).attr("x", at).attr("y", 264).style("fill", "var(--good)").text(t("online.should", { l: form.fixed(right, 4) }));
  }
  return node;
}

function tell(data, run, i, seen, done, parts) {
  const { x, m, factor, term, l } = run.steps[i];
  if (i >= seen) return [h("p.phase", {}, t("online.element", { i: i + 1, x: number(x) })), h("p.small", {}, t("online.later"))];
  return [
    h("p.phase", {}, t("online.element", { i: i + 1, x: number(x) })),
    h("p.small", { html: t("online.story", { m: number(m), factor: form.fixed(factor, 4), term: form.fixed(term, 4), l: form.fixed(l, 4) }) }),
    h("p.small", { html: t(done ? "online.share" : "online.left", { part: form.fixed(parts[i], 4) }) }),
  ];
}

function table(data, run, state, set) {
  const n = data.x.length;
  const fix = Boolean(Number(state.fix));
  const heads = ["i", "x", "m", t("online.col.factor"), "l", "p"];
  const rows = run.steps.map((row, i) => {
    const shown = i < state.step;
    return h(`tr${i + 1 === state.step ? ".now" : shown ? "" : ".later"}`, { onclick: () => set({ step: i + 1 }) },
      h("td", {}, String(i + 1)),
      h("td", {}, number(row.x)),
      h("td", {}, shown ? number(row.m) : ""),
      h("td", {}, shown && fix ? form.fixed(row.factor, 4) : ""),
      h(`td${row.ok ? "" : ".wrong"}`, {}, shown ? form.fixed(row.l, 4) : ""),
      h(`td${run.steps[n - 1].ok ? "" : ".wrong"}`, { "data-value": `p${i}` }, state.step > n ? form.fixed(run.out[i], 4) : ""));
  });
  return h("div", {},
    h("table", {}, h("thead", {}, h("tr", {}, heads.map((head) => h("th", {}, head)))), h("tbody", {}, rows)),
    h("p.small", { html: t("online.passes", { safe: data.loads.safe * n, online: data.loads.online * n }) }));
}
