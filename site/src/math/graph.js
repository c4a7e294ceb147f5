// φ = (a w₁ + b₁)², with its gradients: the small graph of tilewise_lab.trace.graph.

export function chain(a, w1, b1) {
  const y1 = a * w1;
  const y2 = y1 + b1;
  const node = (id, name, op, value, gradient, inputs = []) => ({ id, name, op, value, gradient, inputs: inputs.map(([from, local]) => ({ id: from, local })) });
  return {
    nodes: [
      node(0, "a", "", a, 2 * y2 * w1),
      node(1, "w1", "", w1, 2 * y2 * a),
      node(2, "y1", "×", y1, 2 * y2, [[0, w1], [1, a]]),
      node(3, "b1", "", b1, 2 * y2),
      node(4, "y2", "+", y2, 2 * y2, [[2, 1], [3, 1]]),
      node(5, "φ", "^2", y2 * y2, 1, [[4, 2 * y2]]),
    ],
  };
}
