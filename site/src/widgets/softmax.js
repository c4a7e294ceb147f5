import { scaleLinear } from "d3-scale";
import { below, form, h, picture, small, t } from "../core.js";
import { readouts } from "../stage.js";

const COLOURS = ["--s0", "--s1", "--s2", "--s3", "--s4"];
const colour = (j) => `var(${COLOURS[j % COLOURS.length]})`;

export const softmax = {
  id: "softmax",
  endpoint: "softmax",
  defaults: { x: "3,2,5,1", fix: 1, step: 3 },
  controls: [
    { kind: "text", key: "x", label: "softmax.numbers", also: { step: 0 } },
    { kind: "toggle", key: "fix", label: "softmax.correction" },
  ],
  ask: (state, ask) => ask("softmax", { x: state.x.replace(/[\s,，]+/g, ",") }),
  steps: (data) => data.x.length + 1,

  draw(figure, data, state, set) {
    const n = data.x.length;
    const run = state.fix ? data.right : data.wrong;
    const seen = Math.min(state.step, n);
    const done = state.step > n;
    const now = run.steps[seen - 1];
    const tone = !now ? "" : now.ok ? "good" : "bad";
    figure.replaceChildren(
      readouts([
        ["softmax.m", now ? number(now.m) : "−∞", "m"],
        ["softmax.factor", now && state.fix ? form.fixed(now.factor) : "–", "factor"],
        ["softmax.l", form.fixed(now ? now.l : 0), "l", tone],
        ["softmax.sum", done ? form.fixed(run.out.reduce((a, b) => a + b, 0)) : "–", "sum", done ? tone : ""],
        ["softmax.lse", done && state.fix ? form.fixed(data.right.lse) : "–", "lse"],
      ]),
      h("p.formula", { html: formula(run, state.step, Boolean(state.fix)) }),
      h("div.columns", {}, drawing(data, run, seen, done), table(data, run, state, set)),
    );
  },
};

const number = (x) => form.short(x);

function formula(run, step, fix) {
  const n = run.steps.length;
  if (step === 0) return "m₀ = −∞,&ensp; l₀ = 0";
  if (step > n) return `p<sub>i</sub> = e<sup>x<sub>i</sub> − m${below(n)}</sup> / l${below(n)} = e<sup>x<sub>i</sub> − ${sign(run.steps[n - 1].m)}</sup> / ${form.fixed(run.steps[n - 1].l)}`;
  const { m, x, l, term, kept } = run.steps[step - 1];
  const before = run.steps[step - 2] ?? { m: "-inf", l: 0 };
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

const sign = (x) => (typeof x === "number" && x < 0 ? `(${number(x)})` : number(x));

/** The terms of l after `seen` elements: each correction shrinks all that came before. */
function terms(run, seen) {
  return run.steps.slice(0, seen).reduce((sizes, { factor, term }) => [...sizes.map((size) => size * factor), term], []);
}

function drawing(data, run, seen, done) {
  const n = data.x.length;
  const [width, top, bottom] = [small() ? 380 : 560, 26, 168];
  const finite = data.x.filter((x) => typeof x === "number");
  const y = scaleLinear([Math.min(0, ...finite), Math.max(1, ...finite)], [bottom, top]);
  const slot = width / n;
  const bar = Math.min(64, slot * 0.62);
  const node = h("div", {});
  const svg = picture(node, width, 292, t("softmax.picture"));
  svg.append("line").attr("x1", 0).attr("x2", width).attr("y1", y(0)).attr("y2", y(0)).attr("stroke", "var(--rule)");
  data.x.forEach((x, i) => {
    const at = slot * (i + 0.5);
    const height = typeof x === "number" ? x : 0;
    svg.append("rect").attr("x", at - bar / 2).attr("width", bar).attr("rx", 5)
      .attr("y", Math.min(y(0), y(height))).attr("height", Math.max(1.5, Math.abs(y(height) - y(0))))
      .attr("fill", colour(i)).attr("opacity", i < seen ? (i === seen - 1 && !done ? 1 : 0.55) : 0.14);
    svg.append("text").attr("class", `middle ${i === seen - 1 ? "strong" : ""}`).attr("x", at)
      .attr("y", height < 0 ? y(height) + 16 : y(height) - 8).text(number(x)).attr("opacity", i < seen ? 1 : 0.5);
  });
  const m = run.steps[seen - 1]?.m;
  if (typeof m === "number") {
    svg.append("line").attr("x1", 0).attr("x2", slot * seen).attr("y1", y(m)).attr("y2", y(m))
      .attr("stroke", "var(--ink)").attr("stroke-dasharray", "5 4").attr("stroke-width", 1.5);
    svg.append("text").attr("class", "halo strong").attr("x", 2).attr("y", y(m) + 16).text(`m${below(seen)}`);
  }

  const parts = done ? run.out : terms(run, seen);
  const most = done ? Math.max(1, total(run.out)) : Math.max(...[data.right, data.wrong].flatMap(({ steps }) => steps.map(({ l }) => l)));
  const w = scaleLinear([0, most], [0, width]);
  svg.append("text").attr("class", "tick").attr("x", 0).attr("y", 214).text(done ? t("softmax.outputs") : t("softmax.bar", { i: below(seen) }));
  svg.append("rect").attr("x", 0).attr("y", 224).attr("width", width).attr("height", 40).attr("rx", 6).attr("fill", "var(--wash)");
  let from = 0;
  parts.forEach((size, j) => {
    const wide = w(size);
    svg.append("rect").attr("x", w(from)).attr("y", 224).attr("height", 40).attr("width", Math.max(0, wide - 1.5)).attr("rx", 4).attr("fill", colour(j)).attr("opacity", 0.88);
    if (wide > 46) svg.append("text").attr("class", "middle strong").attr("x", w(from) + wide / 2).attr("y", 249).style("fill", "var(--card)").text(form.fixed(size, 3));
    from += size;
  });
  const right = data.right.steps[seen - 1]?.l;
  if (!done && seen && !run.steps[seen - 1].ok) {
    const at = w(right);
    svg.append("line").attr("x1", at).attr("x2", at).attr("y1", 216).attr("y2", 272).attr("stroke", "var(--good)").attr("stroke-width", 2.5);
    svg.append("text").attr("class", "middle strong").attr("x", at).attr("y", 287).style("fill", "var(--good)").text(t("softmax.should", { l: form.fixed(right) }));
  }
  return node;
}

const total = (xs) => xs.reduce((a, b) => a + b, 0);

function table(data, run, state, set) {
  const n = data.x.length;
  const heads = ["i", "x", "m", t("softmax.col.factor"), "l", "p"];
  const rows = run.steps.map((row, i) => {
    const shown = i < state.step;
    return h(`tr${i + 1 === state.step ? ".now" : shown ? "" : ".later"}`, { onclick: () => set({ step: i + 1 }), style: "cursor:pointer" },
      h("td", {}, String(i + 1)),
      h("td", {}, number(row.x)),
      h("td", {}, shown ? number(row.m) : ""),
      h("td", {}, shown && state.fix ? form.fixed(row.factor, 4) : ""),
      h(`td${row.ok ? "" : ".wrong"}`, {}, shown ? form.fixed(row.l) : ""),
      h(`td${run.steps[n - 1].ok ? "" : ".wrong"}`, { "data-value": `p${i}` }, state.step > n ? form.fixed(run.out[i]) : ""));
  });
  return h("div.scroll", {},
    h("table", {}, h("thead", {}, h("tr", {}, heads.map((head) => h("th", {}, head)))), h("tbody", {}, rows)),
    h("p.small", { html: t("softmax.passes", { safe: data.loads.safe * n, online: data.loads.online * n }) }));
}
