import { axisBottom, axisLeft } from "d3-axis";
import { scaleLinear } from "d3-scale";
import { form, h, halves, picture, small, t } from "../core.js";
import { matmulWaves, tokenWaves } from "../math/machine.js";
import { draggable } from "../touch.js";
import { DEVICES } from "./roof.js";
import { readouts } from "../stage.js";

export const waves = {
  id: "waves",
  follows: ["text", "rows"],
  tall: [494, 848],
  defaults: { what: "example", slots: 6, own: 4, device: "A100", tile: "256x128", heads: 16, n: 1793 },
  controls: [
    { kind: "choice", key: "what", label: "waves.what", names: "waves.what", options: ["example", "attention", "matmul"] },
    { kind: "choice", key: "slots", label: "waves.sms.attention", options: [4, 6, 8, 16], when: (s) => s.what === "example" },
    { kind: "choice", key: "own", label: "roof.h", options: [1, 2, 4, 8], when: (s) => s.what === "example" },
    { kind: "select", key: "device", label: "roof.device", options: DEVICES, when: (s) => s.what !== "example" },
    { kind: "choice", key: "tile", label: "waves.tile", options: ["256x128", "128x128", "128x64", "64x64"], when: (s) => s.what === "matmul" },
    { kind: "range", key: "heads", label: "roof.h", values: [8, 16, 32], when: (s) => s.what === "attention" },
    { kind: "range", key: "n", label: "waves.n", min: 256, max: 4096, when: (s) => s.what !== "example" },
  ],
  ask: ({ what, device, heads }, ask) => (what === "example" ? {} : ask(...(what === "matmul" ? ["gpus"] : ["grid", { device, heads }]))),
  compute(one, { what, device, tile, rows, own, slots }, told) {
    if (what === "example") return { ...tokenWaves(rows, Number(own), Number(slots)), n: one.n };
    return what === "matmul" ? matmulWaves(tile.split("x").map(Number), told[device].sms) : told;
  },

  draw(figure, data, state, set) {
    const n = data.n ?? Math.max(data.low, Math.min(data.high, state.n));
    const [, blocks, waves, efficiency] = data.steps.findLast(([from]) => from <= n);
    const last = blocks - (waves - 1) * data.sms;
    figure.replaceChildren(
      readouts([
        ["waves.blocks", form.count(blocks), "blocks"],
        [`waves.sms.${state.what === "matmul" ? "matmul" : "attention"}`, String(data.sms), "sms"],
        ["waves.waves", String(waves), "waves"],
        ["waves.efficiency", form.percent(efficiency), "efficiency", efficiency < 0.7 ? "bad" : efficiency > 0.85 ? "good" : ""],
        ["waves.idle", String(data.sms - last), "idle"],
      ]),
      chart(halves(1)[0], data, n, efficiency, set, t(`waves.x.${state.what}`)),
      ...(state.what === "matmul" ? [] : [h("p.small", {}, t(`waves.about.${state.what}`, { tile: data.tile[0], n, heads: state.own }))]),
      h("div.waves", {}, machines(data, waves, last)),
      cliffs(data, n, set),
    );
  },
};

function chart(width, data, n, efficiency, set, words) {
  const [height, left, top, bottom] = [220, 46, 14, 40];
  const node = h("div", {});
  const svg = picture(node, width, height, t("waves.picture"), "group");
  const x = scaleLinear([data.low, data.high], [left, width - 14]);
  const y = scaleLinear([0, 1], [height - bottom, top]);
  svg.append("g").attr("transform", `translate(0 ${height - bottom})`).call(axisBottom(x).tickValues(Array.from({ length: small() ? 4 : 8 }, (_, i, count = small() ? 4 : 8) => ((i + 1) * data.high) / count)).tickFormat(String).tickSizeOuter(0));
  svg.append("g").attr("transform", `translate(${left} 0)`).call(axisLeft(y).tickValues([0, 0.25, 0.5, 0.75, 1]).tickFormat((v) => `${100 * v} %`).tickSizeInner(left + 12 - width).tickSizeOuter(0));
  svg.append("text").attr("class", "tick middle").attr("x", (left + width) / 2).attr("y", height - 6).text(words);
  const points = data.steps.map(([from, , , share], i) => `${i ? "H" : "M"}${x(from)}${i ? "V" : " "}${y(share)}`).join("");
  svg.append("path").attr("d", `${points}H${x(data.high)}V${y(0)}H${x(data.low)}Z`).attr("fill", "var(--s0w)");
  svg.append("path").attr("d", `${points}H${x(data.high)}`).attr("fill", "none").attr("stroke", "var(--s0)").attr("stroke-width", 2);
  svg.append("line").attr("x1", x(n)).attr("x2", x(n)).attr("y1", top).attr("y2", height - bottom).attr("stroke", "var(--s2)").attr("stroke-width", 2);
  const grip = svg.append("circle").attr("cx", x(n)).attr("cy", y(efficiency)).attr("r", data.n ? 6 : 9).attr("fill", "var(--s2)");
  const end = x(n) > width - 60;
  svg.append("text").attr("class", `halo strong ${end ? "end" : ""}`).attr("x", x(n) + (end ? -8 : 8)).attr("y", top + 10).style("fill", "var(--s2)").text(`n = ${n}`);
  if (data.n) return node; // the example's own length
  draggable(grip.attr("class", "grip").style("cursor", "ew-resize"), {
    key: "waves-n", label: words, value: n, min: data.low, max: data.high, at: (place) => x.invert(place.x), set: (value) => set({ n: value }),
  });
  svg.style("cursor", "crosshair").on("click", (event) => {
    const at = x.invert(event.clientX - svg.node().getBoundingClientRect().x);
    if (!event.target.classList.contains("grip")) set({ n: Math.round(Math.max(data.low, Math.min(data.high, at))) });
  });
  return node;
}

/** One square per SM for the first wave, the last, and what lies between as a word. */
function machines(data, waves, last) {
  const shown = waves <= 3 ? [...Array(waves).keys()].map((i) => i + 1) : [1, waves - 1, waves];
  const columns = Math.ceil(Math.sqrt(data.sms * 1.7));
  return shown.map((wave) => {
    const busy = wave === waves ? last : data.sms;
    const figure = h("figure", {}, h("figcaption", {}, t("waves.wave", { wave, busy, sms: data.sms })));
    const rows = Math.ceil(data.sms / columns);
    const svg = picture(figure, columns * 14, rows * 14, t("waves.wave", { wave, busy, sms: data.sms }));
    for (let i = 0; i < data.sms; i++)
      svg.append("rect").attr("x", (i % columns) * 14).attr("y", Math.floor(i / columns) * 14).attr("width", 11).attr("height", 11).attr("rx", 2.5)
        .attr("fill", i < busy ? (wave === waves && waves > 1 ? "var(--s2)" : "var(--s0)") : "var(--wash)").attr("stroke", i < busy ? "none" : "var(--rule)");
    return figure;
  });
}

function cliffs(data, n, set) {
  return h("p.small.cliffs", {}, t("waves.cliffs"), " ",
    data.cliffs.slice(0, 8).map(([at, before, after]) =>
      data.n ? h("b", {}, ` ${at - 1} → ${at}`) : h("button", { type: "button", "data-cliff": at, onclick: () => set({ n: n === at ? at - 1 : at }), title: `${before} → ${after}` }, `${at - 1} → ${at}`)));
}
