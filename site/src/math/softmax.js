// Online softmax, element by element, beside the version that forgets to correct: as tilewise_lab.trace.softmax.
import { correction } from "./matrix.js";

export function softmax(x) {
  const right = run(x, true);
  const { m, l } = right.steps.at(-1);
  return { x, right: { ...right, lse: m + Math.log(l) }, wrong: run(x, false), loads: { safe: 3, online: 2 } };
}

function run(x, corrected) {
  let [m, l] = [-Infinity, 0];
  const steps = x.map((xi, i) => {
    const next = Math.max(m, xi);
    const factor = corrected ? correction(m, next) : 1;
    const [kept, term] = [factor * l, correction(xi, next)];
    [m, l] = [next, kept + term];
    const most = Math.max(...x.slice(0, i + 1));
    const exact = x.slice(0, i + 1).reduce((sum, y) => sum + Math.exp(y - most), 0);
    return { i: i + 1, x: xi, m, factor, kept, term, l, ok: Math.abs(l - exact) <= 1e-8 + 1e-12 * exact };
  });
  return { steps, out: x.map((xi) => correction(xi, m) / l) };
}
