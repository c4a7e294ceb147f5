// The example at the top, and the strip that carries it along: tokens to choose a query from, blocks, causal.
import { h, t } from "./core.js";
import { PRESETS, SHARED, example, share, shared, tokens } from "./example.js";
import { unpin } from "./touch.js";

export function opening(change) {
  const problem = h("p.notice", { role: "status", id: "example-problem" });
  const input = h("input", {
    type: "text", id: "example-text", autocomplete: "off", spellcheck: "false", value: shared().text, "aria-describedby": "example-problem example-about",
    oninput: () => accept(input.value),
  });
  const accept = (text) => {
    const found = tokens(text);
    problem.textContent = found.problem ?? "";
    if (found.problem) return;
    unpin();
    share({ text: text.trim(), row: SHARED.row });
    change();
  };
  const presets = Object.entries(PRESETS).map(([name, text]) =>
    h("button", { type: "button", "data-preset": name, onclick: () => ((input.value = text), accept(text)) }, t(`example.preset.${name}`)));
  return h("div.card.example", {},
    h("label.field", {}, h("span", {}, t("example.text")), input),
    h("div.presets", { role: "group", "aria-label": t("example.presets") }, presets),
    problem,
    h("p.small", { id: "example-about", html: t("example.about") }));
}

/** Redrawn with every change; the focus stays on the token it was on. */
export function strip(node, change) {
  const state = shared();
  const one = example(state.text);
  const focused = node.contains(document.activeElement) && document.activeElement.dataset.key;
  const set = (patch) => (share(patch), change());
  const choose = (row) => {
    set({ row });
    node.querySelector(`[data-key=token-${row}]`)?.focus();
  };
  const chip = (word, i) =>
    h("button.token", {
      type: "button", role: "radio", "aria-checked": String(i === state.row), tabindex: i === state.row ? 0 : -1, "data-key": `token-${i}`, onclick: () => set({ row: i }),
      onkeydown: (event) => {
        const to = { ArrowLeft: i - 1, ArrowRight: i + 1, Home: 0, End: one.n - 1 }[event.key];
        if (to === undefined) return;
        event.preventDefault();
        choose((to + one.n) % one.n);
      },
    }, word);
  const size = (key) =>
    h("select", { "aria-label": t(`thread.${key}`), title: t(`thread.${key}`), "data-key": key, onchange: (event) => set({ [key]: Number(event.target.value) }) },
      Array.from({ length: one.n }, (_, i) => h("option", { value: i + 1, selected: i + 1 === state[key] }, String(i + 1))));
  node.replaceChildren(
    h("span.small.query", { id: "thread-query" }, t("thread.query")),
    h("div.tokens", { role: "radiogroup", "aria-labelledby": "thread-query" }, one.words.map(chip)),
    h("span.blocks", {}, h("span.small", {}, t("thread.blocks")), size("rows"), "×", size("columns")),
    h("label.toggle", {}, h("input", { type: "checkbox", role: "switch", name: "causal", checked: Boolean(state.causal), "data-key": "causal", onchange: (event) => set({ causal: event.target.checked ? 1 : 0 }) }), h("span", {}, t("thread.causal"))));
  const list = node.querySelector(".tokens"); // on a phone it scrolls: the chosen one is seen
  const [seen, chosen] = [list, list.querySelector('[aria-checked="true"]')].map((one) => one?.getBoundingClientRect());
  if (chosen && chosen.right > seen.right) list.scrollLeft += chosen.right - seen.right + 6;
  if (focused) node.querySelector(`[data-key="${focused}"]`)?.focus({ preventScroll: true });
}
