// Who sees whom, by name: the masks of tilewise.mods that the page shows, for n tokens with one size of their own.

/** The numbers of each mask, for the reader's few tokens or for 128. */
export const numbers = (size, few) =>
  few
    ? { size, wide: 4, globals: 1, step: 2, near: size, prefix: size, block: size }
    : { size, wide: 16, globals: 4, step: 3, near: Math.max(1, Math.floor(size / 4)), prefix: 2 * size, block: 2 * size };

const RULES = {
  causal: () => (i, j) => j <= i,
  window: (n, { size }) => (i, j) => Math.abs(i - j) <= size,
  globals: (n, { size, globals }) => (i, j) => Math.abs(i - j) <= size || i < globals || j < globals,
  document: (n) => {
    const ends = [Math.floor((n * 3) / 8), Math.floor((n * 5) / 8), n];
    const of = (i) => ends.findIndex((end) => i < end);
    return (i, j) => of(i) === of(j);
  },
  prefix: (n, { prefix }) => (i, j) => j <= i || j < prefix,
  dilated: (n, { size, step }) => (i, j) => Math.abs(i - j) <= size * step && (i - j) % step === 0,
  image: (n, { wide, near }) => (i, j) => Math.abs(Math.floor(i / wide) - Math.floor(j / wide)) <= near && Math.abs((i % wide) - (j % wide)) <= near,
  blocks: (n, { block }) => (i, j) => Math.floor(i / block) === Math.floor(j / block),
  strided: (n, { size }) => (i, j) => j <= i && (i - j < size || j % size === size - 1),
};
export const KINDS = Object.keys(RULES);

/** Rows of pairs, and for every tile 0 (no pair is visible), 1 (some are) or 2 (all). */
export function mask({ kind, n = 128, block = [16, 16], size = 16, causal = 0, few = false }) {
  const rule = RULES[kind](n, numbers(size, few));
  const range = [...Array(n).keys()];
  const rows = range.map((i) => range.map((j) => rule(i, j) && (!causal || j <= i)));
  const tiles = Array.from({ length: Math.ceil(n / block[0]) }, (_, i) =>
    Array.from({ length: Math.ceil(n / block[1]) }, (_, j) => {
      const pairs = rows.slice(i * block[0], (i + 1) * block[0]).flatMap((row) => row.slice(j * block[1], (j + 1) * block[1]));
      const seen = pairs.filter(Boolean).length;
      return seen === 0 ? 0 : seen === pairs.length ? 2 : 1;
    }));
  const kinds = [0, 1, 2].map((which) => tiles.flat().filter((one) => one === which).length);
  return { n, block, rows, tiles, kinds, pairs: rows.flat().filter(Boolean).length };
}
