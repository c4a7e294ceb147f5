// A chapter: its words, the controls of its widget, the figure, and what to do when an answer is not there.
import { NotHere, ask, h, offline, read, t, write } from "./core.js";
import { control, follow, stepper } from "./controls.js";

export class Stage {
  constructor(widget, number) {
    this.widget = widget;
    this.node = h("section", { id: widget.id, "aria-labelledby": `${widget.id}-title` });
    this.number = number;
    this.visible = false;
  }

  get state() {
    return read(this.widget.id, this.widget.defaults);
  }

  set = (patch) => {
    write(this.widget.id, this.widget.defaults, patch);
    this.update();
  };

  /** Everything anew: the language has changed, or the address. */
  build() {
    const { id, endpoint, controls, steps } = this.widget;
    this.figure = h("div.figure", {});
    this.notice = h("p.notice", { role: "status", hidden: true });
    this.parts = controls.map((spec) => [spec, control(id, endpoint, spec, this.state, this.set)]);
    this.stepper = steps ? stepper(this.set) : null;
    const card = h("div.card", { tabindex: steps ? "0" : undefined, onkeydown: (event) => this.key(event), "aria-label": t(`${id}.title`) },
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
    if (this.visible) this.update();
  }

  key(event) {
    const button = event.target === event.currentTarget && this.stepper?.keys[event.key];
    if (!button) return;
    event.preventDefault();
    if (!button.disabled) button.click();
  }

  show() {
    if (this.visible) return;
    this.visible = true;
    this.update();
  }

  async update() {
    const state = this.state;
    const turn = (this.turn = (this.turn ?? 0) + 1);
    for (const [spec, node] of this.parts) {
      node.hidden = Boolean(spec.when && !spec.when(state));
      follow(node, state[spec.key]);
    }
    try {
      const data = await this.widget.ask(state, ask);
      if (turn !== this.turn) return;
      this.notice.hidden = true;
      if (this.stepper) {
        const last = this.widget.steps(data, state);
        state.step = Math.min(state.step, last);
        this.stepper.update(state.step, last);
      }
      this.widget.draw(this.figure, data, state, this.set);
      this.node.dataset.ready = JSON.stringify(state);
    } catch (error) {
      if (turn !== this.turn) return;
      this.notice.hidden = false;
      if (error instanceof NotHere) this.notice.innerHTML = t("offline.missing");
      else if (offline || !(error instanceof TypeError)) this.notice.textContent = error.message;
      else this.notice.textContent = t("server.gone");
      this.node.dataset.ready = "notice";
      if (!(error instanceof NotHere) && !error.message) throw error;
    }
  }
}

/** Labelled numbers: the key of a label, a text, and optionally the name under which tests find it, a tone, and
    what the label fills in. */
export function readouts(entries) {
  return h("dl.readouts", {},
    entries.map(([label, text, name, tone, values]) =>
      h(`div${tone ? `.${tone}` : ""}`, {}, h("dt", {}, t(label, values)), h("dd", name ? { "data-value": name } : {}, text))));
}
