// Matrices as lists of rows: all that one head of attention needs.

export const dot = (a, b) => a.reduce((sum, x, i) => sum + x * b[i], 0);
export const add = (a, b) => a.map((row, i) => row.map((x, j) => x + b[i][j]));
export const zeros = (rows, columns) => Array.from({ length: rows }, () => Array(columns).fill(0));
export const transposed = (a) => a[0].map((_, j) => a.map((row) => row[j]));
export const times = (a, b) => a.map((row) => b[0].map((_, j) => row.reduce((sum, x, i) => sum + x * b[i][j], 0)));
export const sum = (xs) => xs.reduce((a, b) => a + b, 0);
export const scaled = (factors, a) => a.map((row, i) => row.map((x) => factors[i] * x));
export const split = (a, size) => Array.from({ length: Math.ceil(a.length / size) }, (_, i) => a.slice(i * size, (i + 1) * size));

/** S = Q Kᵀ / √D */
export const scores = (q, k) => q.map((a) => k.map((b) => dot(a, b) / Math.sqrt(a.length)));

/** exp(old − new): 1 where the maximum stays; 0 where there was none, though −∞ − (−∞) is no number. */
export const correction = (old, now) => Math.exp(old - (now === -Infinity ? 0 : now));
