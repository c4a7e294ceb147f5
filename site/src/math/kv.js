// Who streams which keys of a cache: the rule of tilewise's plan kernel, for one query of every sequence.

/** An item is a tile of one sequence's rows; items and units of keys lie on one axis, and every team of programs takes an
    equal stretch of it, each of its programs with a KV head of its own. `cost`: what it takes to begin an item, in
    units. `shortest`: keys that are worth a stretch; if no item has more and there are teams for all, each has its own. */
export function plan({ lengths, heads, programs: most, unit, cost = 1, shortest = 512 }) {
  const teams = Math.max(1, Math.floor(most / heads));
  const items = lengths.map((length, b) => ({ b, length, units: Math.ceil(length / unit) })).filter(({ units }) => units);
  const begins = [];
  let total = 0;
  for (const { units } of items) {
    begins.push(total);
    total += units + cost;
  }
  const least = Math.max(1, Math.floor(shortest / unit));
  const longest = Math.max(0, ...items.map(({ units }) => units));
  const own = items.length <= teams && longest <= least;
  const each = own ? longest + cost : Math.max(Math.ceil(total / teams), least);
  const place = (team) => {
    const x = own ? (begins[team] ?? total) : Math.min(team * each, total);
    if (x >= total) return { item: items.length, unit: 0 };
    const item = begins.findLastIndex((begin) => begin <= x);
    return { item, unit: Math.max(x - begins[item] - cost, 0) };
  };
  const work = Array.from({ length: teams + 1 }, (_, team) => place(team));
  const programs = teams * heads;
  return { items, total, each, programs, work, pieces: pieces(items, heads, work), divided: divided(work, teams) * heads };
}

/** What each program streams: [program, sequence, head, first unit, past the last]. */
function pieces(items, heads, work) {
  const found = [];
  for (let team = 0; team + 1 < work.length; team++) {
    let { item, unit } = work[team];
    const end = work[team + 1];
    while (item < items.length && (item < end.item || (item === end.item && unit < end.unit))) {
      const last = item === end.item ? end.unit : items[item].units;
      for (let head = 0; head < heads; head++) found.push([team * heads + head, items[item].b, head, unit, last]);
      [item, unit] = [item + 1, 0];
    }
  }
  return found;
}

/** Items that more than one team streams, and whose parts must be merged. */
function divided(work, teams) {
  const seen = new Set();
  for (let team = 1; team < teams; team++) if (work[team].unit > 0) seen.add(work[team].item);
  return seen.size;
}
