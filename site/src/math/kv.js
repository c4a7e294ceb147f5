// Who streams which keys of a cache: the rule of tilewise's plan kernel, for one query of every sequence.

/** An item is a tile of one sequence's rows; items, KV heads and units of keys lie on one axis, and every program takes
    an equal stretch of it. `cost`: what it takes to begin a row set, in units. */
export function plan({ lengths, heads, programs, unit, cost = 1 }) {
  const items = lengths.map((length, b) => ({ b, length, units: Math.ceil(length / unit) }));
  const begins = [];
  let total = 0;
  for (const { units } of items) {
    begins.push(total);
    total += Math.max(units + cost, 1) * heads;
  }
  const each = Math.max(Math.ceil(total / programs), 1);
  const place = (program) => {
    const x = program * each;
    const item = begins.findLastIndex((begin) => begin <= x);
    if (x >= total) return { item: items.length, head: 0, unit: 0 };
    const per = Math.max(items[item].units + cost, 1);
    const offset = x - begins[item];
    return { item, head: Math.floor(offset / per), unit: Math.max((offset % per) - cost, 0) };
  };
  const work = Array.from({ length: programs + 1 }, (_, program) => place(program));
  return { items, total, each, work, pieces: pieces(items, heads, work), divided: divided(work, programs) };
}

/** What each program streams: [program, item, head, first unit, past the last]. */
function pieces(items, heads, work) {
  const found = [];
  for (let program = 0; program + 1 < work.length; program++) {
    let { item, head, unit } = work[program];
    const end = work[program + 1];
    while (item < items.length && (item < end.item || (item === end.item && (head < end.head || (head === end.head && unit < end.unit))))) {
      const last = item === end.item && head === end.head ? end.unit : items[item].units;
      if (last > unit || items[item].units === 0) found.push([program, item, head, unit, last]);
      [head, unit] = [head + 1, 0];
      if (head === heads) [item, head] = [item + 1, 0];
    }
  }
  return found;
}

/** Row sets that more than one program streams, and whose parts must be merged. */
function divided(work, programs) {
  const seen = new Set();
  for (let program = 1; program < programs; program++) if (work[program].unit > 0) seen.add(`${work[program].item},${work[program].head}`);
  return seen.size;
}
