import { axisBottom, axisLeft } from "d3-axis";
import { scaleLog } from "d3-scale";
import { line } from "d3-shape";
import { form, h, picture, room, small, t } from "../core.js";
import { readouts } from "../stage.js";

const DEVICES = ["A100", "A100-40GB", "H100", "H200", "RTX 4090", "L4", "B200"];
const LENGTHS = [128, 256, 512, 1024, 2048, 2049, 4096, 8192, 16384, 32768, 65536];

export const roof = {
  id: "roof",
  endpoint: "roof",
  defaults: { device: "H200", s: 4096, b: 4, h: 16, d: 128, causal: 0, backward: 0 },
  controls: [
    { kind: "select", key: "device", label: "roof.device", options: DEVICES },
    { kind: "range", key: "s", label: "roof.s", values: LENGTHS },
    { kind: "range", key: "b", label: "roof.b", values: [1, 2, 4, 8, 16, 32] },
    { kind: "range", key: "h", label: "roof.h", values: [1, 4, 8, 16, 32, 64] },
    { kind: "range", key: "d", label: "roof.d", values: [32, 64, 100, 128, 192, 256] },
    { kind: "toggle", key: "causal", label: "roof.causal" },
    { kind: "toggle", key: "backward", label: "roof.backward" },
  ],
  async ask(state, ask) {
    const [told, measured] = await Promise.all([ask("roof", state), ask("measured", { device: state.device })]);
    return { ...told, measured: state.backward ? [] : measured.points, when: measured.when };
  },

  draw(figure, data, state) {
    const flops = data.flops.forward + data.flops.backward;
    const same = data.measured.find((point) => ["b", "s", "h", "d", "causal"].every((key) => point[key] === state[key]));
    figure.replaceChildren(
      readouts([
        ["roof.flops", form.si(flops, "FLOP"), "flops"],
        ["roof.naive", form.bytes(data.bytes.naive), "naive", "bad"],
        ["roof.tiled", form.bytes(data.bytes.tiled), "tiled", "good"],
        ["roof.binds", t(`roof.roof.${data.binding}`), "binding"],
        ["roof.time.on", form.seconds(data.seconds.call), "seconds", "", data],
        ...(same ? [["roof.measured.on", form.seconds(same.seconds), "measured", "", same]] : []),
      ]),
      chart(data, state, flops, same),
      legend(data),
      h("p.small", {}, t("roof.grid", grid(data))),
      data.advice.length ? h("ul.advice", {}, data.advice.map(({ text, gain }) => h("li", { lang: "en" }, text, gain ? h("b", {}, ` ${gain.toFixed(2)}×`) : ""))) : "",
    );
  },
};

const grid = ({ kernels }) => {
  const [first] = kernels;
  return { programs: form.count(first.programs), slots: form.count(first.slots), waves: first.waves, share: form.percent(first.wave_efficiency, 0) };
};

function chart(data, state, flops, same) {
  const [width, height, left, right, top, bottom] = [room(), small() ? 320 : 350, 46, 14, 22, 46];
  const node = h("div", {});
  const svg = picture(node, width, height, t("roof.picture"));
  const x = scaleLog([0.5, 16384], [left, width - right]);
  const y = scaleLog([2e11, 4e15], [height - bottom, top]).clamp(true);
  const powers = small() ? [1, 16, 256, 4096] : [1, 4, 16, 64, 256, 1024, 4096, 16384];
  svg.append("g").attr("transform", `translate(0 ${height - bottom})`).call(axisBottom(x).tickValues(powers).tickFormat((v) => String(v)).tickSizeInner(top + bottom - height).tickSizeOuter(0));
  svg.append("g").attr("transform", `translate(${left} 0)`).call(axisLeft(y).tickValues([1e12, 1e13, 1e14, 1e15]).tickFormat((v) => form.si(v, "")).tickSizeInner(left + right - width).tickSizeOuter(0));
  svg.append("text").attr("class", "tick middle").attr("x", (left + width) / 2).attr("y", height - 8).text(t("roof.x"));
  svg.append("text").attr("class", "tick").attr("x", 4).attr("y", 10).text(t("roof.y"));

  const path = line().x((point) => x(point[0])).y((point) => y(point[1]));
  const area = `${path(data.curve)}L${x(16384)} ${height - bottom}L${x(0.5)} ${height - bottom}Z`;
  svg.append("path").attr("d", area).attr("fill", "var(--s0w)").attr("opacity", 0.5);
  svg.append("path").attr("d", path(data.curve)).attr("fill", "none").attr("stroke", "var(--s0)").attr("stroke-width", 3).attr("stroke-linejoin", "round");
  const [ridge, peak] = [data.intensity.ridge, data.peak];
  svg.append("line").attr("x1", x(ridge)).attr("x2", x(ridge)).attr("y1", y(peak)).attr("y2", height - bottom).attr("stroke", "var(--s0)").attr("stroke-dasharray", "3 4");
  svg.append("text").attr("class", "halo").attr("x", x(ridge) + 6).attr("y", height - bottom - 8).text(t("roof.ridge", { ridge: ridge.toFixed(0) }));
  svg.append("text").attr("class", "halo end strong").style("fill", "var(--s0)").attr("x", width - right).attr("y", y(peak) - 8).text(form.si(peak, "FLOP/s"));
  const slope = Math.sqrt(0.5 * ridge);
  const angle = (Math.atan2(y(slope * 10 * data.bandwidth) - y(slope * data.bandwidth), x(slope * 10) - x(slope)) * 180) / Math.PI;
  svg.append("text").attr("class", "middle strong").style("fill", "var(--s0)").attr("transform", `translate(${x(slope)} ${y(slope * data.bandwidth) - 9}) rotate(${angle})`).text(form.bytes(data.bandwidth) + "/s");

  const dot = (at, rate, fill, r, tip, name) => {
    const one = svg.append("circle").attr("cx", x(at)).attr("cy", y(rate)).attr("r", r).attr("fill", fill).attr("stroke", "var(--card)").attr("stroke-width", 1.5);
    if (name) one.attr("data-point", name);
    one.append("title").text(tip);
  };
  for (const point of data.measured)
    dot(point.intensity, point.rate, "var(--s1)", point === same ? 8 : 4, `${t("roof.measured")}: B ${point.b}, S ${point.s}, H ${point.h}, D ${point.d}${point.causal ? ", causal" : ""}: ${form.si(point.rate, "FLOP/s")}`, "measured");
  const rate = flops / data.seconds.call;
  const from = { x: x(data.intensity.naive), y: y(data.attainable) };
  const to = { x: x(data.intensity.tiled), y: y(rate) };
  svg.append("path").attr("d", `M${from.x} ${from.y}L${to.x} ${to.y}`).attr("stroke", "var(--soft)").attr("stroke-dasharray", "2 4").attr("fill", "none");
  dot(data.intensity.naive, data.attainable, "var(--bad)", 8, `${t("roof.legend.naive")}: ${form.si(data.attainable, "FLOP/s")}`, "naive");
  dot(data.intensity.tiled, rate, "var(--s2)", 8, `${t("roof.legend.tiled")}: ${form.si(rate, "FLOP/s")}`, "tiled");
  const label = (at, low, text, fill, anchor) => svg.append("text").attr("class", `halo strong ${anchor}`).attr("x", at.x).attr("y", at.y + (low ? 44 : 24)).style("fill", fill).text(text);
  if (!small()) label(from, false, t("roof.point.naive"), "var(--bad)", from.x < 130 ? "" : "middle");
  label(to, small(), `${t("roof.point.tiled")} ${form.si(rate, "FLOP/s")}`, "var(--s2)", to.x > width - 170 ? "end" : "middle");
  return node;
}

function legend(data) {
  const entry = (fill, text) => h("li", {}, h("i", { style: `background:${fill};border-radius:50%` }), text);
  return h("ul.legend", {},
    entry("var(--bad)", t("roof.legend.naive")),
    entry("var(--s2)", t("roof.legend.tiled")),
    data.measured.length ? entry("var(--s1)", t("roof.legend.measured", { when: data.when, backend: data.measured[0].backend })) : "");
}
