import { scaleLinear } from "d3-scale";
import { form, h, halves, picture, small, t } from "../core.js";
import { ring } from "../math/ring.js";
import { readouts } from "../stage.js";
import { Panel } from "../touch.js";
import { clip, colour } from "./softmax.js";

export const plans = {
  id: "plans",
  follows: ["text", "causal"],
  tall: [1007, 1340],
  defaults: { few: 4, split: "zigzag", tokens: "1M", ranks: 64, mask: "causal", machine: "8xH200+400G", strategy: "", back: 0 },
  controls: [
    { kind: "choice", key: "few", label: "plans.few", options: [2, 3, 4] },
    { kind: "choice", key: "split", label: "plans.split", names: "plans.split", options: ["contiguous", "zigzag"] },
    { kind: "choice", key: "tokens", label: "plans.tokens", options: ["128k", "1M"] },
    { kind: "choice", key: "ranks", label: "plans.ranks", options: [8, 16, 64] },
    { kind: "choice", key: "mask", label: "plans.mask", names: "plans.mask", options: ["full", "causal", "window"] },
    { kind: "select", key: "machine", label: "plans.machine", options: ["8xH200+400G", "8xH100+200G"] },
    { kind: "toggle", key: "back", label: "plans.back" },
  ],
  ask: ({ tokens, ranks, mask, machine }, ask) => ask("plans", { tokens, ranks, mask, machine }),
  compute: (one, { few, split, causal }, told) => ({ ...told, words: one.words, own: ring({ n: one.n, ranks: Number(few), layout: split, causal }) }),
  draw(figure, data, state, set) {
    const chosen = data.strategies.find(({ name }) => name === state.strategy) ?? data.strategies.find(({ name }) => name === data.advice);
    const best = data.strategies.find(({ name }) => name === data.advice);
    const [width] = halves(1);
    const panel = new Panel("plans");
    const back = Number(state.back);
    const longest = Math.max(...data.strategies.map(({ time }) => time));
    figure.replaceChildren(
      own(width, data, state.causal, panel),
      h("p.phase", {}, t("plans.big", { tokens: state.tokens, ranks: state.ranks })),
      readouts([
        ["plans.advice", best.name, "advice", "good"],
        ["plans.time", form.seconds(best.time), "time"],
        ["plans.efficiency", form.percent(best.efficiency, 0), "efficiency"],
        ["plans.sent", form.bytes(best.sent), "sent"],
        ["plans.memory", form.bytes(best.memory), "memory"],
      ]),
      reason(data, best),
      h("div.choices", { role: "radiogroup", "aria-label": t("plans.strategy") }, data.strategies.map((one) => row(one, chosen, data, longest, set))),
      h("p.phase", {}, t("plans.gantt", { name: chosen.name, layout: chosen.layout, pass: t(back ? "plans.pass.backward" : "plans.pass.forward") })),
      gantt(width, chosen, Math.max(1, chosen.passes[back].time * 1e6), back, panel, state.ranks),
      h("div.line", {}, panel.node),
    );
    panel.begin("0");
  },
};

/** The example on a few GPUs: the tokens of each, and the pairs that it computes at each step of the ring. */
function own(width, { words, own: { held, pairs, length } }, causal, panel) {
  const ranks = held.length;
  const [left, line] = [small() ? 44 : 56, 30];
  const wide = Math.floor((width - left - 8) * (small() ? 0.5 : 0.56));
  const chip = wide / Math.max(...held.map((tokens) => tokens.length), 1);
  const step = (width - left - wide - 20) / ranks;
  const total = pairs.map((row) => row.reduce((a, b) => a + b, 0));
  const most = Math.max(1, ...pairs.flat());
  const node = h("div", {});
  const svg = picture(node, width, (ranks + 1) * line + 4, t("plans.own.picture"), "group");
  svg.append("text").attr("class", "tick tiny").attr("x", left).attr("y", 16).text(t("plans.held"));
  for (let s = 0; s < ranks; s++) svg.append("text").attr("class", "tick tiny middle").attr("x", left + wide + 12 + (s + 0.5) * step).attr("y", 16).text(small() ? s + 1 : t("plans.step", { s: s + 1 }));
  held.forEach((tokens, r) => {
    const y = (r + 1) * line - 4;
    svg.append("text").attr("class", "end tiny").attr("x", left - 6).attr("y", y + 17).text(t("plans.rank", { n: r }));
    tokens.forEach((i, at) => {
      svg.append("rect").attr("x", left + at * chip + 1).attr("y", y).attr("width", chip - 2).attr("height", line - 5).attr("rx", 4).attr("fill", colour(r));
      svg.append("text").attr("class", "middle tiny").attr("x", left + (at + 0.5) * chip).attr("y", y + 17).style("fill", "var(--card)").attr("pointer-events", "none").text(clip(words[i], chip - 4));
    });
    pairs[r].forEach((count, s) => {
      const from = (r - s + ranks) % ranks;
      const g = svg.append("g");
      const x = left + wide + 12 + s * step;
      g.append("rect").attr("class", "tile").attr("x", x + 1).attr("y", y).attr("width", step - 2).attr("height", line - 5).attr("rx", 4).attr("fill", "var(--wash)");
      g.append("rect").attr("x", x + 1).attr("y", y).attr("width", Math.max(0, ((step - 2) * count) / most)).attr("height", line - 5).attr("rx", 4).attr("fill", colour(from)).attr("fill-opacity", 0.35).attr("pointer-events", "none");
      g.append("text").attr("class", "middle tiny strong").attr("x", x + step / 2).attr("y", y + 17).attr("pointer-events", "none").text(count);
      const said = t(s ? "plans.pairs" : "plans.pairs.own", { r, from, s: s + 1, count });
      panel.add(g, { key: `own ${r},${s}`, label: said, tell: () => h("p.small", {}, said) });
    });
  });
  return h("div", {},
    h("p.phase", {}, t("plans.own.title", { n: words.length, ranks })), node,
    h("p.small", {}, t(causal ? "plans.own.causal" : "plans.own.full", { most: Math.max(...total), least: Math.min(...total), length })));
}

/** Why a strategy is advised although another one is faster. */
function reason({ strategies }, best) {
  const first = strategies.filter(({ refusal }) => !refusal).reduce((a, b) => (b.time < a.time ? b : a), best);
  if (first === best) return "";
  return h("p.small", {}, t("plans.reason", { name: best.name, other: first.name, slower: form.percent(best.time / first.time - 1), less: form.percent(1 - best.memory / first.memory, 0) }));
}

/** One strategy: a bar as long as its forward and backward, what of it is waiting, and why it cannot be used. */
function row(one, chosen, data, longest, set) {
  return h(`button.choice${one.refusal ? ".refused" : ""}`, { type: "button", role: "radio", "aria-checked": String(one === chosen), "data-key": `plan-${one.name}`, "data-strategy": one.name, onclick: () => set({ strategy: one.name }) },
    h("span", {}, one.name, one.name === data.advice ? h("b", {}, ` ${t("plans.advised")}`) : ""),
    h("span.amount", {}, `${form.seconds(one.time)}, ${form.percent(one.efficiency, 0)}`),
    h("span.track", { style: "--end:0%" }, h("span", { style: `width:${(100 * one.time) / longest}%` })),
    h("span.why", {}, one.refusal ? h("span", { lang: "en" }, one.refusal) : t("plans.more", { sent: form.bytes(one.sent), memory: form.bytes(one.memory), wait: form.seconds(one.exposed) })));
}

function gantt(width, one, length, back, panel, ranks) {
  const { bars } = one.passes[back];
  const stations = Math.max(...bars.map(([station]) => station)) + 1;
  const [left, line] = [small() ? 56 : 70, 22];
  const node = h("div", {});
  const svg = picture(node, width, 8 * line + 26, t("plans.picture"), "group");
  const x = scaleLinear([0, length], [left, width - 8]);
  for (let station = 0; station < stations; station++) {
    svg.append("text").attr("class", "end tiny").attr("x", left - 6).attr("y", station * line + 14).text(t(one.width > 1 ? "plans.node" : "plans.rank", { n: station }));
    svg.append("rect").attr("x", left).attr("y", station * line).attr("width", width - left - 8).attr("height", line - 4).attr("fill", "var(--wash)").attr("rx", 3);
  }
  bars.forEach(([station, hops, start, end], n) => {
    const g = svg.append("g");
    g.append("rect").attr("class", "tile").attr("x", x(start)).attr("y", station * line).attr("width", Math.max(1, x(end) - x(start) - 0.5)).attr("height", line - 4).attr("rx", 1.5)
      .attr("fill", hops ? "var(--s2)" : "var(--s0)").attr("fill-opacity", hops % 2 ? 1 : 0.8);
    const words = t(hops ? "plans.bar" : "plans.bar.own", { station: t(one.width > 1 ? "plans.node" : "plans.rank", { n: station }), hops, from: form.seconds(start / 1e6), length: form.seconds((end - start) / 1e6) });
    panel.add(g, { key: String(n), label: words, tell: () => h("p.small", {}, words) });
  });
  for (let i = 0; i <= 4; i += small() ? 2 : 1) svg.append("text").attr("class", `tick tiny ${i === 4 ? "end" : i ? "middle" : ""}`).attr("x", x((length * i) / 4)).attr("y", stations * line + 14).text(form.seconds((length * i) / 4e6));
  return h("div", {}, node, h("ul.legend", {},
    h("li", {}, h("i", { style: "background:var(--s0)" }), t("plans.own")),
    h("li", {}, h("i", { style: "background:var(--s2)" }), t("plans.others")),
    h("li", {}, t("plans.shown", { shown: stations, ranks }))));
}
