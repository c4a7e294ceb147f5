// One sequence on several GPUs: which tokens each holds, and the pairs it computes while keys travel in a ring.

const evenly = (n, parts) => Array.from({ length: parts + 1 }, (_, i) => Math.floor((n * i) / parts));
const range = (from, to) => Array.from({ length: to - from }, (_, i) => from + i);

/** The tokens of each rank. Zigzag: of 2R stretches, rank r holds number r and number 2R − 1 − r. */
export function shards(n, ranks, layout) {
  const at = evenly(n, layout === "zigzag" ? 2 * ranks : ranks);
  return Array.from({ length: ranks }, (_, r) => {
    const other = 2 * ranks - 1 - r;
    return layout === "zigzag" ? [...range(at[r], at[r + 1]), ...range(at[other], at[other + 1])] : range(at[r], at[r + 1]);
  });
}

/** At step s rank r has the keys of rank r − s: how many pairs of query and key it sees there. */
export function ring({ n, ranks, layout, causal }) {
  const held = shards(n, ranks, layout);
  const pairs = held.map((queries, r) =>
    held.map((_, s) => held[(r - s + ranks) % ranks].reduce((total, j) => total + queries.filter((i) => !causal || j <= i).length, 0)));
  return { held, pairs, length: range(0, ranks).reduce((total, s) => total + Math.max(...pairs.map((row) => row[s])), 0) };
}
