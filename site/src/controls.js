// The controls of a widget, from a list; native inputs, so that a keyboard works everywhere.
import { h, t } from "./core.js";

/** One control. `spec.kind`: choice, select, range, toggle. */
export function control(id, spec, state, set) {
  return kinds[spec.kind]({
    ...spec,
    name: `${id}-${spec.key}${spec.group ?? ""}`,
    options: spec.options ?? [],
    value: state[spec.key],
    change: (value) => set({ [spec.key]: value, ...spec.also }),
  });
}

/** The state has changed, perhaps by another hand: the control shows it. */
export function follow(node, value) {
  for (const input of node.querySelectorAll("input, select"))
    if (input.type === "radio") input.checked = input.value === String(value);
    else if (input.type === "checkbox") input.checked = Boolean(Number(value));
    else if (input.type === "range") input.show(value);
    else if (input !== document.activeElement) input.value = value;
}

const label = (spec) => t(spec.label);
const named = (spec, value) => (spec.names ? t(`${spec.names}.${value}`) : String(value));

const kinds = {
  choice: (spec) =>
    h("fieldset.choice", {},
      h("legend", {}, label(spec)),
      h("div.segments", {},
        spec.options.map((value) =>
          h("label", {},
            h("input", {
              type: "radio", name: spec.name, value: String(value), checked: String(value) === String(spec.value),
              onchange: () => spec.change(value),
            }),
            h("span", {}, named(spec, value)))))),

  select: (spec) =>
    h("label.field", {}, h("span", {}, label(spec)),
      h("select", { name: spec.name, onchange: (event) => spec.change(event.target.value) },
        spec.options.map((value) =>
          h("option", { value: String(value), selected: String(value) === String(spec.value) }, named(spec, value))))),

  range: (spec) => {
    const { values } = spec;
    const at = (value) => (values ? nearest(values, value) : value);
    const output = h("output", {});
    const input = h("input", {
      type: "range", name: spec.name,
      min: values ? 0 : spec.min, max: values ? values.length - 1 : spec.max, step: values ? 1 : spec.step ?? 1,
      oninput: () => spec.change(values ? values[Number(input.value)] : Number(input.value)),
    });
    input.show = (value) => {
      input.value = at(value);
      output.textContent = String(value);
      input.setAttribute("aria-valuetext", String(value));
    };
    input.show(spec.value);
    return h("label.field.range", {}, h("span", {}, label(spec), " ", output), input);
  },

  toggle: (spec) =>
    h("label.toggle", {},
      h("input", {
        type: "checkbox", role: "switch", name: spec.name, checked: Boolean(Number(spec.value)),
        onchange: (event) => spec.change(event.target.checked ? 1 : 0),
      }),
      h("span", {}, label(spec))),
};

function nearest(values, value) {
  const distance = values.map((x) => Math.abs(x - value));
  return distance.indexOf(Math.min(...distance));
}

const ICONS = {
  first: "M3 3h2v10H3zM13 3v10L6 8z",
  back: "M11 3v10L4 8z",
  play: "M4 2.5v11L13 8z",
  pause: "M4 3h3v10H4zM9 3h3v10H9z",
  next: "M5 3v10l7-5z",
  last: "M11 3h2v10h-2zM3 3v10l7-5z",
};
const icon = (name) => `<svg viewBox="0 0 16 16" aria-hidden="true"><path d="${ICONS[name]}"/></svg>`;

/** First, back, play, forward, last, and a slider: for anything with steps. `update(step, last)` follows the state. */
export function stepper(set) {
  let step = 0;
  let last = 0;
  let timer = null;
  const go = (to) => set({ step: Math.max(0, Math.min(last, to)) });
  const stop = () => {
    clearInterval(timer);
    timer = null;
    update(step, last);
  };
  const tick = () => {
    if (!node.isConnected || step >= last) return stop();
    go(step + 1);
  };
  const play = () => {
    if (timer) return stop();
    if (step >= last) go(0);
    timer = setInterval(tick, Math.max(100, Math.min(900, 14000 / (last + 1))));
    update(step, last);
  };
  const button = (key, to) =>
    h("button", { type: "button", "data-step": key, onclick: to, html: icon(key), title: t(`step.${key}`), "aria-label": t(`step.${key}`) });
  const by = (to) => () => {
    if (timer) stop();
    go(to());
  };
  const buttons = {
    first: button("first", by(() => 0)),
    back: button("back", by(() => step - 1)),
    play: button("play", play),
    next: button("next", by(() => step + 1)),
    last: button("last", by(() => last)),
  };
  const slider = h("input", { type: "range", min: 0, "aria-label": t("step.step"), oninput: () => by(() => Number(slider.value))() });
  const count = h("output.count", {});
  const node = h("div.stepper", { role: "group", "aria-label": t("step.steps") }, Object.values(buttons), slider, count);

  function update(now, end) {
    [step, last] = [Math.min(now, end), end];
    slider.max = last;
    slider.value = step;
    count.textContent = `${step} / ${last}`;
    buttons.first.disabled = buttons.back.disabled = step === 0;
    buttons.next.disabled = buttons.last.disabled = step >= last;
    buttons.play.innerHTML = icon(timer ? "pause" : "play");
  }

  const keys = { ArrowLeft: buttons.back, ArrowRight: buttons.next, Home: buttons.first, End: buttons.last, " ": buttons.play };
  return { node, update, keys };
}
