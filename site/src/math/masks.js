// Who sees whom, by name: the masks of tilewise.mods that the page shows, at length n with one size of their own.

const RULES = {
  causal: () => (i, j) => j <= i,
  window: (n, size) => (i, j) => Math.abs(i - j) <= size,
  globals: (n, size) => (i, j) => Math.abs(i - j) <= size || i < 4 || j < 4,
  document: (n) => {
    const ends = [Math.floor((n * 3) / 8), Math.floor((n * 5) / 8), n];
    const of = (i) => ends.findIndex((end) => i < end);
    return (i, j) => of(i) === of(j);
  },
  prefix: (n, size) => (i, j) => j <= i || j < 2 * size,
  dilated: (n, size) => (i, j) => Math.abs(i - j) <= size * 3 && (i - j) % 3 === 0,
  image: (n, size) => {
    const near = Math.max(1, Math.floor(size / 4));
    return (i, j) => Math.abs((i >> 4) - (j >> 4)) <= near && Math.abs((i & 15) - (j & 15)) <= near;
  },
  blocks: (n, size) => (i, j) => Math.floor(i / (2 * size)) === Math.floor(j / (2 * size)),
  strided: (n, size) => (i, j) => j <= i && (i - j < size || j % size === size - 1),
};
export const KINDS = Object.keys(RULES);

/** Rows of pairs, and for every tile 0 (nobody sees anything), 1 (partly) or 2 (all). */
export function mask({ kind, n = 128, block = 16, size = 16, causal = 0 }) {
  const rule = RULES[kind](n, size);
  const range = [...Array(n).keys()];
  const rows = range.map((i) => range.map((j) => rule(i, j) && (!causal || j <= i)));
  const tiles = Array.from({ length: n / block }, (_, i) =>
    Array.from({ length: n / block }, (_, j) => {
      const seen = rows.slice(i * block, (i + 1) * block).flatMap((row) => row.slice(j * block, (j + 1) * block)).filter(Boolean).length;
      return seen === 0 ? 0 : seen === block * block ? 2 : 1;
    }));
  const kinds = [0, 1, 2].map((which) => tiles.flat().filter((one) => one === which).length);
  return { n, block, rows, tiles, kinds, pairs: rows.flat().filter(Boolean).length };
}
