// Which program reads which keys of a cache: the rule of tilewise's schedule kernel, for one query of every sequence.
import { sum } from "./matrix.js";

const CLASSES = 16; // of lengths: work items are ordered by class, from long to short

/** A sequence is a work item; its keys are chunks of `unit`. A split is a range of its chunks, with one program for each
    KV head. `resident` splits run at once; the GPU starts them in the order of `splits`. `quarters` of the splits that
    run at once: as many work items are few. `factor`: splits of sequences of different lengths, for each that runs at
    once. `cost`: of beginning a split, in chunks. `shortest`: a sequence with more keys is divided, into splits
    of at least half as many. */
export function plan({ lengths, heads, programs: most, unit, quarters = 2, factor = 3, cost = 1, shortest = 512 }) {
  const resident = Math.max(1, Math.floor(most / heads));
  const least = Math.max(1, Math.floor((resident * quarters) / 4));
  const target = resident * factor;
  const items = lengths.map((length, b) => ({ b, length, chunks: Math.ceil(length / unit) })).filter(({ chunks }) => chunks);
  const longest = Math.max(0, ...items.map(({ chunks }) => chunks));
  const { counts, limit } = divide(items, longest, { resident, least, target, cost, min: Math.max(1, Math.floor(shortest / unit)) });
  const ordered = order(items, counts, Math.min(longest, limit));
  const splits = ordered.flatMap(({ item, count }) =>
    Array.from({ length: count }, (_, i) => [item.b, cut(item.chunks, i, count), cut(item.chunks, i + 1, count)]));
  const run = started(splits, resident, cost);
  const whole = started(order(items, items.map(() => 1), longest).map(({ item }) => [item.b, 0, item.chunks]), resident, cost);
  const shared = ordered.filter(({ count }) => count > 1);
  return {
    resident, least, target, items, splits, cost, programs: resident * heads,
    each: Math.max(0, ...splits.map(([, from, to]) => to - from)),
    divided: shared.length * heads,
    parts: sum(shared.map(({ count }) => count)) * heads,
    length: run.length, alone: whole.length,
    pieces: run.placed.flatMap(([team, b, from, to, at]) => Array.from({ length: heads }, (_, head) => [team * heads + head, b, head, from, to, at])),
  };
}

const cut = (chunks, i, count) => Math.floor((chunks * i) / count);

/** Into how many splits each work item is divided, and the most chunks of one that is not. Of about equal lengths, only
    those are divided that would otherwise run alone at the end. */
function divide(items, longest, { resident, least, target, cost, min }) {
  const chunks = sum(items.map((item) => item.chunks));
  const worth = Math.ceil(min / 2); // a program
  const splits = (item, most) => (item.chunks > min ? Math.ceil(item.chunks / most) : 1);
  if (longest * items.length * 4 <= chunks * 5) {
    const pieces = Math.floor(resident / Math.max(items.length % resident, 1));
    const remainder = pieces > 1 ? items.length % resident : 0;
    return { counts: items.map((item, n) => (n < remainder ? Math.min(splits(item, worth), pieces) : 1)), limit: longest };
  }
  const shares = items.length <= least ? Math.max(resident - items.length, least) : target;
  const limit = Math.max(Math.ceil((chunks + items.length * cost) / shares), worth);
  return { counts: items.map((item) => splits(item, limit)), limit };
}

/** Divided work items first, then from long to short. */
function order(items, counts, longest) {
  const rank = (item, count) => (count > 1 ? 0 : Math.min(1 + Math.floor((Math.max(longest - item.chunks, 0) * (CLASSES - 1)) / longest), CLASSES - 1));
  return items.map((item, n) => ({ item, count: counts[n], rank: rank(item, counts[n]) })).sort((a, b) => a.rank - b.rank);
}

/** Each split on the team of programs that is free first: [team, sequence, first chunk, past the last, when]. */
function started(splits, teams, cost) {
  const free = Array(teams).fill(0);
  const placed = splits.map(([b, from, to]) => {
    const team = free.indexOf(Math.min(...free));
    const at = free[team];
    free[team] += to - from + cost;
    return [team, b, from, to, at];
  });
  return { placed, length: Math.max(0, ...free) };
}
