// What can be touched says what it is: by mouse, finger or keys, in a panel beside the picture.
import { h, t } from "./core.js";

const pinned = new Map(); // panel -> key of what was chosen there; survives a redraw

export class Panel {
  constructor(id, hint) {
    this.id = id;
    this.items = new Map();
    this.node = h("div.panel", { "aria-live": "polite", "data-panel": id }, h("p.small", {}, hint ?? t("touch.hint")));
  }

  /** Make an SVG element of a d3 selection touchable. `tell()`: nodes for the panel; `press()`: what a click does more. */
  add(selection, { key, label, tell, press, keys }) {
    const node = selection.node();
    const one = { node, tell, press };
    this.items.set(key, one);
    selection.attr("tabindex", this.items.size > 1 ? -1 : 0).attr("role", "button").attr("aria-label", label).attr("data-key", `${this.id}/${key}`).classed("touch", true);
    const choose = () => {
      pinned.set(this.id, key);
      this.show(key);
      press?.();
    };
    node.addEventListener("pointerenter", (event) => event.pointerType === "mouse" && this.show(key));
    node.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && this.show());
    node.addEventListener("focus", () => this.show(key));
    node.addEventListener("click", choose);
    node.addEventListener("keydown", (event) => {
      if (keys?.(event)) return event.preventDefault();
      if (event.key === "Enter" || event.key === " ") choose();
      else if (event.key in ARROWS) this.move(node, ARROWS[event.key]);
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
    return selection;
  }

  /** What is chosen, or this for now. */
  show(key = pinned.get(this.id)) {
    const one = this.items.get(key) ?? this.items.get(this.first);
    if (!one) return;
    for (const { node } of this.items.values()) node.classList.toggle("touched", node === one.node);
    this.node.replaceChildren(...[one.tell()].flat(9));
  }

  /** To begin with: what was chosen before the redraw, or `first`. */
  begin(first) {
    this.first = first;
    this.show();
  }

  move(from, [dx, dy]) {
    const centre = (node) => {
      const box = node.getBoundingClientRect();
      return [box.x + box.width / 2, box.y + box.height / 2];
    };
    const [x, y] = centre(from);
    let [best, least] = [null, Infinity];
    for (const { node } of this.items.values()) {
      const [a, b] = centre(node);
      const [along, aside] = dx ? [(a - x) * dx, Math.abs(b - y)] : [(b - y) * dy, Math.abs(a - x)];
      if (along > 1 && along + 3 * aside < least) [best, least] = [node, along + 3 * aside];
    }
    if (!best) return;
    from.setAttribute("tabindex", -1);
    best.setAttribute("tabindex", 0);
    best.focus();
  }
}

const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

/** A new choice of tokens: what was pinned is no more. */
export const unpin = () => pinned.clear();

/** An SVG element that can be dragged, or moved by keys, along a scale of numbers. */
export function draggable(selection, { key, label, value, min, max, step = 1, at, set }) {
  const node = selection.node();
  const bound = (x) => Math.max(min, Math.min(max, Math.round(x / step) * step));
  selection.attr("tabindex", 0).attr("role", "slider").attr("aria-label", label).attr("aria-valuemin", min).attr("aria-valuemax", max)
    .attr("aria-valuenow", value).attr("data-key", key).style("touch-action", "none");
  node.addEventListener("pointerdown", (event) => {
    event.preventDefault();
    let last = value;
    const move = (now) => {
      const next = bound(at(now));
      if (next !== last) set((last = next));
    };
    const stop = () => ["pointermove", "pointerup", "pointercancel"].forEach((name) => removeEventListener(name, name === "pointermove" ? move : stop));
    addEventListener("pointermove", move);
    addEventListener("pointerup", stop);
    addEventListener("pointercancel", stop);
  });
  node.addEventListener("keydown", (event) => {
    const by = { ArrowUp: step, ArrowRight: step, ArrowDown: -step, ArrowLeft: -step, PageUp: 5 * step, PageDown: -5 * step }[event.key];
    if (!by) return;
    event.preventDefault();
    event.stopPropagation();
    set(bound(value + by));
  });
  return selection;
}
