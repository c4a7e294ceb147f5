// A chapter: its words, the controls of its widget, and the figure, drawn anew whenever something changes.
import { ask, h, read, t, write } from "./core.js";
import { control, follow, stepper } from "./controls.js";
import { example, isShared, share, shared } from "./example.js";

export class Stage {
  constructor(widget, number, everyone) {
    Object.assign(this, { widget, number, everyone, turn: 0 });
    this.node = h("section", { id: widget.id, "aria-labelledby": `${widget.id}-title` });
  }

  /** The example's state and the widget's own. */
  get state() {
    return { ...shared(), ...read(this.widget.id, this.widget.defaults) };
  }

  set = (patch) => {
    const entries = Object.entries(patch);
    const common = entries.filter(([key]) => isShared(key));
    write(this.widget.id, this.widget.defaults, Object.fromEntries(entries.filter(([key]) => !isShared(key))));
    if (common.length) share(Object.fromEntries(common));
    if (common.length) this.everyone();
    else this.update();
  };

  /** Everything anew: the language has changed, or the address. */
  build() {
    const { id, controls, steps, tall } = this.widget;
    this.seen = null;
    const [state, set] = [this.state, this.set];
    this.figure = h("div.figure", tall ? { style: `min-height:${tall[innerWidth < 760 ? 1 : 0]}px` } : {});
    this.notice = h("p.notice", { role: "status", hidden: true });
    this.parts = controls.map((spec) => [spec, control(id, spec, state, set)]);
    this.stepper = steps ? stepper(set) : null;
    const card = h("div.card", { role: "group", tabindex: steps ? "0" : undefined, onkeydown: (event) => this.key(event), "aria-label": t(`${id}.title`) },
      h("div.controls", {}, this.parts.map(([, node]) => node)),
      this.stepper?.node,
      this.notice,
      this.figure);
    this.node.replaceChildren(
      h("header", {},
        h("span.number", { "aria-hidden": "true" }, String(this.number)),
        h("h2", { id: `${id}-title` }, t(`${id}.title`))),
      h("p.lead", { html: t(`${id}.lead`) }),
      card,
      h("p.after", { html: t(`${id}.after`) }));
  }

  key(event) {
    const button = event.target === event.currentTarget && this.stepper?.keys[event.key];
    if (!button) return;
    event.preventDefault();
    if (!button.disabled) button.click();
  }

  /** The example has changed: draw anew if this chapter looks at what has. */
  follow() {
    const now = shared();
    const seen = JSON.stringify((this.widget.follows ?? Object.keys(now)).map((key) => now[key]));
    if (seen === this.seen) return;
    this.seen = seen;
    this.update();
  }

  /** Draw at once where the answer is at hand, else when it comes. */
  update() {
    const state = this.state;
    const turn = ++this.turn;
    for (const [spec, node] of this.parts) {
      node.hidden = Boolean(spec.when && !spec.when(state));
      follow(node, state[spec.key]);
    }
    try {
      const answer = this.widget.ask?.(state, ask) ?? {};
      if (!(answer instanceof Promise)) return this.draw(answer, state);
      answer.then((found) => turn === this.turn && this.draw(found, state)).catch((error) => turn === this.turn && this.refuse(error));
    } catch (error) {
      this.refuse(error);
    }
  }

  draw(answer, state) {
    this.notice.hidden = true;
    const data = this.widget.compute ? this.widget.compute(example(state.text), state, answer) : answer;
    if (this.stepper) {
      const last = this.widget.steps(data, state);
      state.step = Math.min(state.step, last);
      this.stepper.update(state.step, last);
    }
    const focused = this.figure.contains(document.activeElement) && document.activeElement.dataset.key;
    this.widget.draw(this.figure, data, state, this.set);
    if (focused) this.figure.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
    this.node.dataset.ready = JSON.stringify(state);
  }

  refuse(error) {
    this.notice.hidden = false;
    this.notice.textContent = error.message;
    this.node.dataset.ready = "notice";
    if (!error.message || error instanceof TypeError || error instanceof ReferenceError) throw error;
  }
}

/** Labelled numbers: the key of a label, a text, and optionally the name under which tests find it, a tone, and
    what the label fills in. */
export function readouts(entries) {
  return h("dl.readouts", {},
    entries.map(([label, text, name, tone, values]) =>
      h(`div${tone ? `.${tone}` : ""}`, {}, h("dt", {}, t(label, values)), h("dd", name ? { "data-value": name } : {}, text))));
}
