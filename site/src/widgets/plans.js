import { scaleLinear } from "d3-scale";
import { form, h, halves, picture, small, t } from "../core.js";
import { readouts } from "../stage.js";
import { Panel } from "../touch.js";

export const plans = {
  id: "plans",
  follows: [],
  tall: [727, 968],
  defaults: { tokens: "1M", ranks: 64, mask: "causal", machine: "8xH200+400G", strategy: "", back: 0 },
  controls: [
    { kind: "choice", key: "tokens", label: "plans.tokens", options: ["128k", "1M"] },
    { kind: "choice", key: "ranks", label: "plans.ranks", options: [8, 16, 64] },
    { kind: "choice", key: "mask", label: "plans.mask", names: "plans.mask", options: ["full", "causal", "window"] },
    { kind: "select", key: "machine", label: "plans.machine", options: ["8xH200+400G", "8xH100+200G"] },
    { kind: "toggle", key: "back", label: "plans.back" },
  ],
  ask: ({ tokens, ranks, mask, machine }, ask) => ask("plans", { tokens, ranks, mask, machine }),
  draw(figure, data, state, set) {
    const chosen = data.strategies.find(({ name }) => name === state.strategy) ?? data.strategies.find(({ name }) => name === data.advice);
    const best = data.strategies.find(({ name }) => name === data.advice);
    const [width] = halves(1);
    const panel = new Panel("plans");
    const back = Number(state.back);
    const longest = Math.max(...data.strategies.map(({ passes }) => passes[back].time)) * 1e6;
    figure.replaceChildren(
      readouts([
        ["plans.advice", best.name, "advice", "good"],
        ["plans.time", form.seconds(best.time), "time"],
        ["plans.efficiency", form.percent(best.efficiency, 0), "efficiency"],
        ["plans.sent", form.bytes(best.sent), "sent"],
        ["plans.memory", form.bytes(best.memory), "memory"],
      ]),
      h("div.choices", { role: "radiogroup", "aria-label": t("plans.strategy") }, data.strategies.map((one) => row(one, chosen, data, longest, back, set))),
      h("p.phase", {}, t("plans.gantt", { name: chosen.name, layout: chosen.layout, pass: t(back ? "plans.pass.backward" : "plans.pass.forward") })),
      gantt(width, chosen, Math.max(1, chosen.passes[back].time * 1e6), back, panel, state.ranks),
      h("div.line", {}, panel.node),
    );
    panel.begin("0");
  },
};

/** One strategy: a bar as long as its pass, what of it is waiting, and why it would not do. */
function row(one, chosen, data, longest, back, set) {
  const time = one.passes[back].time * 1e6;
  return h(`button.choice${one.refusal ? ".refused" : ""}`, { type: "button", role: "radio", "aria-checked": String(one === chosen), "data-key": `plan-${one.name}`, "data-strategy": one.name, onclick: () => set({ strategy: one.name }) },
    h("span", {}, one.name, one.name === data.advice ? h("b", {}, ` ${t("plans.advised")}`) : ""),
    h("span.amount", {}, `${form.seconds(time / 1e6)}, ${form.percent(one.efficiency, 0)}`),
    h("span.track", { style: "--end:0%" }, h("span", { style: `width:${(100 * time) / longest}%` })),
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
  for (let i = 0; i <= 4; i++) svg.append("text").attr("class", `tick tiny ${i === 4 ? "end" : i ? "middle" : ""}`).attr("x", x((length * i) / 4)).attr("y", stations * line + 14).text(form.seconds((length * i) / 4e6));
  return h("div", {}, node, h("ul.legend", {},
    h("li", {}, h("i", { style: "background:var(--s0)" }), t("plans.own")),
    h("li", {}, h("i", { style: "background:var(--s2)" }), t("plans.others")),
    h("li", {}, t("plans.shown", { shown: stations, ranks }))));
}
