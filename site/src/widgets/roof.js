import { axisBottom, axisLeft } from "d3-axis";
import { scaleLog } from "d3-scale";
import { line } from "d3-shape";
import { form, h, halves, picture, small, t } from "../core.js";
import { readouts } from "../stage.js";
import { Panel } from "../touch.js";

export const DEVICES = ["A100", "A100-40GB", "H100", "H200", "RTX 4090", "L4", "B200"];
const WIDE = 2048; // heads times their dim

export const roof = {
  id: "roof",
  follows: ["causal"],
  tall: [550, 908],
  defaults: { device: "H200", s: 4096, b: 4, d: 128, backward: 0 },
  controls: [
    { kind: "select", key: "device", label: "roof.device", options: DEVICES },
    { kind: "range", key: "s", label: "roof.s", values: [256, 1024, 4096, 16384] },
    { kind: "choice", key: "b", label: "roof.b", options: [1, 4] },
    { kind: "choice", key: "d", label: "roof.d", options: [64, 128] },
    { kind: "toggle", key: "causal", label: "roof.causal" },
    { kind: "toggle", key: "backward", label: "roof.backward" },
  ],
  ask({ device, s, b, d, causal, backward }, ask) {
    const all = [ask("roof", { device, s, b, d, causal, backward }), ask("measured", { device }), ask("gpus")];
    const told = ([one, measured, gpus]) => ({ ...one, ...gpus[device], measured: backward ? [] : measured.points, when: measured.when });
    return all.some((one) => one instanceof Promise) ? Promise.all(all).then(told) : told(all);
  },

  draw(figure, data, state) {
    const heads = WIDE / state.d;
    const same = data.measured.find((point) => point.h === heads && ["b", "s", "d", "causal"].every((key) => point[key] === Number(state[key])));
    const panel = new Panel("roof");
    const [wide] = halves(1);
    const holder = h("div.chart", {});
    figure.replaceChildren(
      readouts([
        ["roof.flops", form.si(data.flops, "FLOP"), "flops"],
        ["roof.naive", form.bytes(data.naive), "naive", "bad"],
        ["roof.tiled", form.bytes(data.tiled), "tiled", "good"],
        ["roof.binds", t(`roof.roof.${data.binding}`), "binding"],
        ["roof.time.on", form.seconds(data.seconds), "seconds", "", data],
        ["roof.measured.on", same ? form.seconds(same.seconds) : "–", "measured", "", { backend: data.backend }],
      ]),
      holder,
      legend(data),
      h("p.small", {}, t("roof.shape", { heads }), " ", t("roof.grid", grid(data.grid))),
      data.advice.length ? h("ul.advice", {}, data.advice.map(advice)) : "",
    );
    chart(holder, small() ? wide : wide - 260, data, same, panel); // in place already: labels are measured
    holder.append(panel.node);
    panel.begin("tiled");
  },
};

const grid = ([programs, slots, waves, share]) => ({ programs: form.count(programs), slots: form.count(slots), waves, share: form.percent(share, 0) });

const ADVICE = [
  [/^(\d+) programs on (\d+) slots/, "roof.advice.batch"],
  [/^the host takes longer/, "roof.advice.host"],
  [/^memory binds, and K and V/, "roof.advice.grouped"],
];

/** The library's sentence, in the reader's language where the page knows it. */
function advice([text, gain]) {
  const [, key] = ADVICE.find(([known]) => known.test(text)) ?? [];
  const [, programs, slots] = text.match(/^(\d+) programs on (\d+)/) ?? [];
  return h("li", { lang: key ? undefined : "en" }, key ? t(key, { programs, slots }) : text, gain ? h("b", {}, ` ${gain.toFixed(2)}×`) : "");
}

function chart(holder, width, data, same, panel) {
  const [height, left, right, top, bottom] = [small() ? 320 : 380, 46, 14, 26, 46];
  const svg = picture(holder, width, height, t("roof.picture"), "group");
  const [ridge, peak, rate] = [data.peak / data.bandwidth, data.peak, data.flops / data.seconds];
  const intensity = { naive: data.flops / data.naive, tiled: data.flops / data.tiled };
  const attainable = Math.min(peak, intensity.naive * data.bandwidth);
  const curve = [[0.5, 0.5 * data.bandwidth], [ridge, peak], [16384, peak]];
  const x = scaleLog([0.5, 16384], [left, width - right]);
  const y = scaleLog([2e11, 4e15], [height - bottom, top]).clamp(true);
  const powers = small() ? [1, 16, 256, 4096] : [1, 4, 16, 64, 256, 1024, 4096, 16384];
  svg.append("g").attr("transform", `translate(0 ${height - bottom})`).call(axisBottom(x).tickValues(powers).tickFormat((v) => String(v)).tickSizeInner(top + bottom - height).tickSizeOuter(0));
  svg.append("g").attr("transform", `translate(${left} 0)`).call(axisLeft(y).tickValues([1e12, 1e13, 1e14, 1e15]).tickFormat((v) => form.si(v, "")).tickSizeInner(left + right - width).tickSizeOuter(0));
  svg.append("text").attr("class", "tick middle").attr("x", (left + width) / 2).attr("y", height - 8).text(t("roof.x"));
  svg.append("text").attr("class", "tick").attr("x", 4).attr("y", 10).text(t("roof.y"));

  const path = line().x((point) => x(point[0])).y((point) => y(point[1]));
  const area = `${path(curve)}L${x(16384)} ${height - bottom}L${x(0.5)} ${height - bottom}Z`;
  svg.append("path").attr("d", area).attr("fill", "var(--s0w)").attr("opacity", 0.5);
  svg.append("path").attr("d", path(curve)).attr("fill", "none").attr("stroke", "var(--s0)").attr("stroke-width", 3).attr("stroke-linejoin", "round");
  svg.append("line").attr("x1", x(ridge)).attr("x2", x(ridge)).attr("y1", y(peak)).attr("y2", height - bottom).attr("stroke", "var(--s0)").attr("stroke-dasharray", "3 4");
  const dots = [];
  const dot = (at, high, fill, r, name, tip, tell) => {
    const g = svg.append("g");
    g.append("circle").attr("cx", x(at)).attr("cy", y(high)).attr("r", r).attr("fill", fill).attr("stroke", "var(--card)").attr("stroke-width", 1.5).attr("data-point", name);
    dots.push({ x: x(at) - r - 2, y: y(high) - r - 2, width: 2 * r + 4, height: 2 * r + 4 });
    panel.add(g, { key: tip, label: tip, tell: () => [h("p.phase", {}, tip), ...tell.map((text) => h("p.small", {}, text))] });
    return { x: x(at), y: y(high) };
  };
  const from = { x: x(intensity.naive), y: y(attainable) };
  const to = { x: x(intensity.tiled), y: y(rate) };
  svg.append("path").attr("d", `M${from.x} ${from.y}L${to.x} ${to.y}`).attr("stroke", "var(--soft)").attr("stroke-dasharray", "2 4").attr("fill", "none");
  const of = (at, high) => [`${form.si(high, "FLOP/s")}`, t("roof.at", { intensity: at.toFixed(0), share: form.percent(high / peak, 0) })];
  for (const point of data.measured) {
    const tip = `${t("roof.measured")}: B ${point.b}, S ${point.s}, H ${point.h}, D ${point.d}${point.causal ? `, ${t("roof.causal")}` : ""}`;
    dot(point.intensity, point.rate, "var(--s1)", point === same ? 8 : 4.5, "measured", tip, [...of(point.intensity, point.rate), t("roof.both", { measured: form.seconds(point.seconds), predicted: form.seconds(point.predicted) })]);
  }
  dot(intensity.naive, attainable, "var(--bad)", 8, "naive", t("roof.legend.naive"), [...of(intensity.naive, attainable), form.bytes(data.naive)]);
  panel.items.set("tiled", null);
  dot(intensity.tiled, rate, "var(--s2)", 8, "tiled", t("roof.legend.tiled"), [...of(intensity.tiled, rate), form.seconds(data.seconds)]);
  panel.items.set("tiled", panel.items.get(t("roof.legend.tiled")));

  // A label goes where it hides neither a point nor another label.
  const label = (text, fill, places, classes = "") => {
    const one = svg.append("text").attr("class", `halo strong ${classes}`).attr("data-label", "").attr("pointer-events", "none").style("fill", fill).text(text);
    const { width: wide, height: high } = one.node().getBBox();
    const fits = places.map(([ax, ay]) => ({ x: Math.max(left + 2, Math.min(width - right - wide, ax)), y: Math.max(top - 12, Math.min(height - bottom - high, ay)), width: wide, height: high }));
    const box = fits.find((a) => dots.every((b) => a.x + a.width < b.x || b.x + b.width < a.x || a.y + a.height < b.y || b.y + b.height < a.y));
    if (!box) return one.remove();
    one.attr("x", box.x).attr("y", box.y + box.height * 0.78);
    dots.push(box);
  };
  const around = ({ x: ax, y: ay }, wide, shares = [-0.5, 0.1, -1.1]) => [26, -34, 44, -52, 62, 80, 98, 120, -70, 150].flatMap((dy) => shares.map((share) => [ax + share * wide, ay + dy - 8]));
  label(`${t("roof.point.tiled")} ${form.si(rate, "FLOP/s")}`, "var(--s2)", around(to, 150));
  label(t("roof.point.naive"), "var(--bad)", around(from, 90, [0.1, -0.5, -1.1])); // right of the slope, which it would cross
  label(form.si(peak, "FLOP/s"), "var(--s0)", [[width, y(peak) - 24], [x(ridge) + 10, y(peak) - 24]]);
  label(t("roof.ridge", { ridge: ridge.toFixed(0) }), "var(--soft)", [[x(ridge) + 6, height - bottom - 22], [x(ridge) - 90, height - bottom - 22], [x(ridge) + 6, height - bottom - 44]]);
  const slope = Math.sqrt(0.5 * ridge);
  label(`${form.bytes(data.bandwidth)}/s`, "var(--s0)", [[x(slope) - 88, y(slope * data.bandwidth) - 30], [x(slope) + 10, y(slope * data.bandwidth) + 14], [x(1), y(1 * data.bandwidth) - 30]]);
}

function legend(data) {
  const entry = (fill, text) => h("li", {}, h("i", { style: `background:${fill};border-radius:50%` }), text);
  return h("ul.legend", {},
    entry("var(--bad)", t("roof.legend.naive")),
    entry("var(--s2)", t("roof.legend.tiled")),
    data.measured.length ? entry("var(--s1)", t("roof.legend.measured", { when: data.when, backend: data.measured[0].backend })) : "");
}
