// One head, tile by tile, through an explicit HBM and SRAM: the rules and the counts of tilewise_lab.trace.attention.
import { add, correction, scaled, scores, split, sum, times, transposed, zeros } from "./matrix.js";

/** Blocks in HBM and in SRAM, and a count of what passes between them. */
class Memory {
  constructor(hbm, itemsize) {
    Object.assign(this, { hbm, itemsize, sram: new Map(), loaded: {}, stored: {}, loads: [], stores: [], flops: 0, peak: 0 });
  }
  size = (x) => x.flat().length * this.itemsize;
  get used() {
    return sum([...this.sram.values()].map(this.size));
  }
  load(name, i) {
    const key = `${name},${i}`;
    if (!this.sram.has(key)) {
      const block = this.hbm[name][i];
      this.loaded[name] = (this.loaded[name] ?? 0) + this.size(block);
      this.loads.push([name, i]);
      this.keep(name, i, block);
    }
    return this.sram.get(key);
  }
  store(name, i, x) {
    this.hbm[name][i] = x;
    this.stored[name] = (this.stored[name] ?? 0) + this.size(x);
    this.stores.push([name, i]);
  }
  keep(name, i, x) {
    this.sram.set(`${name},${i}`, x);
    this.peak = Math.max(this.peak, this.used);
    return x;
  }
  drop(...names) {
    for (const key of [...this.sram.keys()]) if (names.includes(key.split(",")[0])) this.sram.delete(key);
  }
  multiply(rows, columns, depth) {
    this.flops += 2 * rows * columns * depth;
  }
  step(phase, i, j, values = {}) {
    const made = { phase, i, j, loads: this.loads, stores: this.stores, ...this.counts(), ...values };
    [this.loads, this.stores] = [[], []];
    return made;
  }
  counts() {
    return {
      resident: [...this.sram.keys()].map((key) => [key.split(",")[0], Number(key.split(",")[1])]),
      sram: this.used,
      loaded: sum(Object.values(this.loaded)),
      stored: sum(Object.values(this.stored)),
      flops: this.flops,
    };
  }
}

/** {q, k, v, do}: lists of rows. The result is that of the Python trace, its names too. */
export function attention({ q, k, v, do: upstream }, { rows = 2, columns = 2, order = "fa2", before = null, after = null, backward = false, itemsize = 2 } = {}) {
  const [n, d, dv] = [q.length, q[0].length, v[0].length];
  const flat = (x) => Array(n).fill(x);
  const memory = new Memory({
    q: split(q, rows), k: split(k, columns), v: split(v, columns), do: split(upstream, rows), o: split(zeros(n, dv), rows),
    m: split(flat(-Infinity), rows), l: split(flat(0), rows), lse: split(flat(0), rows), delta: split(flat(0), rows),
    dq: split(zeros(n, d), rows), dk: split(zeros(k.length, d), columns), dv: split(zeros(k.length, dv), columns),
  }, itemsize);
  const tiles = tiling(n, k.length, rows, columns, before, after);
  const steps = (order === "fa1" ? fa1 : fa2)(memory, tiles);
  if (order === "fa1") memory.hbm.lse = memory.hbm.m.map((m, i) => m.map((x, r) => x + Math.log(memory.hbm.l[i][r])));
  if (backward) steps.push(...gradients(memory, tiles));
  const outputs = { out: "o", lse: "lse", ...(backward ? { dq: "dq", dk: "dk", dv: "dv" } : {}) };
  return {
    order, rows, columns, sq: n, sk: k.length, d, dv, before, after, backward, steps, skipped: tiles.skipped,
    totals: { loaded: memory.loaded, stored: memory.stored, flops: memory.flops, visited: tiles.visited.length, skipped: tiles.skipped.length, peak: memory.peak },
    ...Object.fromEntries(Object.entries(outputs).map(([name, key]) => [name, memory.hbm[key].flat()])),
  };
}

/** Which tiles there are, which are visited, and which pairs each hides. */
export function tiling(sq, sk, rows, columns, before, after) {
  const hidden = (i, j) => (before !== null && j < i + sk - sq - before) || (after !== null && j > i + sk - sq + after);
  const [visited, skipped] = [[], []];
  for (let i = 0; i * rows < sq; i++)
    for (let j = 0; j * columns < sk; j++) {
      const hide = Array.from({ length: Math.min(rows, sq - i * rows) }, (_, r) =>
        Array.from({ length: Math.min(columns, sk - j * columns) }, (_, c) => hidden(i * rows + r, j * columns + c)));
      const pairs = hide.flat();
      if (pairs.every(Boolean)) skipped.push([i, j]);
      else visited.push({ i, j, hide, masked: pairs.some(Boolean) });
    }
  return { tall: Math.ceil(sq / rows), wide: Math.ceil(sk / columns), visited, skipped };
}

const nothing = (rows, dv) => ({ m: Array(rows).fill(-Infinity), l: Array(rows).fill(0), o: zeros(rows, dv) });
const inverse = (l) => l.map((x) => 1 / (x === 0 ? 1 : x));

/** Queries outside: (m, l, o) stay in SRAM until their rows are done. */
function fa2(memory, tiles) {
  const steps = [];
  for (let i = 0; i < tiles.tall; i++) {
    const q = memory.load("q", i);
    let state = nothing(q.length, memory.hbm.v[0][0].length);
    for (const tile of tiles.visited.filter((one) => one.i === i)) {
      const [next, step] = visit(memory, state, tile);
      state = next;
      steps.push(step);
      memory.drop("k", "v");
    }
    memory.store("o", i, scaled(inverse(state.l), state.o));
    memory.store("lse", i, state.m.map((m, r) => m + Math.log(state.l[r])));
    steps.push(memory.step("finish", i, null, { m: state.m, l: state.l, o: memory.hbm.o[i], lse: memory.hbm.lse[i] }));
    memory.drop("q", "o", "m", "l");
  }
  return steps;
}

/** Keys outside: o, m and l of every row travel to HBM and back for each block of keys. */
function fa1(memory, tiles) {
  const steps = [];
  for (let j = 0; j < tiles.wide; j++) {
    for (const tile of tiles.visited.filter((one) => one.j === j)) {
      const { i } = tile;
      const [m, l] = [memory.load("m", i), memory.load("l", i)];
      const [next, step] = visit(memory, { m, l, o: scaled(l, memory.load("o", i)) }, tile);
      const o = scaled(inverse(next.l), next.o);
      for (const [name, x] of [["m", next.m], ["l", next.l], ["o", o]]) memory.store(name, i, memory.keep(name, i, x));
      steps.push({ ...step, stores: memory.stores, ...memory.counts(), o });
      memory.stores = [];
      memory.drop("q", "o", "m", "l");
    }
    memory.drop("k", "v");
  }
  return steps;
}

/** One more block of keys for a block of rows: what was summed under the old maximum is corrected to the new one. */
function visit(memory, old, { i, j, hide, masked }) {
  const [q, k, v] = [memory.load("q", i), memory.load("k", j), memory.load("v", j)];
  const s = scores(q, k).map((row, r) => row.map((x, c) => (hide[r][c] ? -Infinity : x)));
  const m = old.m.map((x, r) => Math.max(x, ...s[r]));
  const p = s.map((row, r) => row.map((x) => correction(x, m[r])));
  const factor = old.m.map((x, r) => correction(x, m[r]));
  const l = old.l.map((x, r) => factor[r] * x + sum(p[r]));
  const o = add(scaled(factor, old.o), times(p, v));
  memory.multiply(q.length, k.length, q[0].length);
  memory.multiply(q.length, k.length, v[0].length);
  memory.keep("p", 0, p);
  for (const [name, x] of [["m", m], ["l", l], ["o", o]]) memory.keep(name, i, x);
  const step = memory.step("forward", i, j, { masked, m, l, factor, s, p, o });
  memory.drop("p");
  return [{ m, l, o }, step];
}

/** δ row by row; then dK and dV by the owners of keys, dQ by the owners of queries: no block has two writers. */
function gradients(memory, tiles) {
  const steps = [];
  for (let i = 0; i < tiles.tall; i++) {
    const [g, o] = [memory.load("do", i), memory.load("o", i)];
    const delta = g.map((row, r) => row.reduce((total, x, c) => total + x * o[r][c], 0));
    memory.store("delta", i, delta);
    steps.push(memory.step("delta", i, null, { delta }));
    memory.drop("do", "o");
  }
  for (let j = 0; j < tiles.wide; j++) {
    const [k, v] = [memory.load("k", j), memory.load("v", j)];
    let [dk, dv] = [zeros(k.length, k[0].length), zeros(v.length, v[0].length)];
    for (const tile of tiles.visited.filter((one) => one.j === j)) {
      const { s, p, dp, ds, q, g } = tileGradient(memory, tile, [2, 2]);
      [dk, dv] = [add(dk, times(transposed(ds), q)), add(dv, times(transposed(p), g))];
      memory.keep("dk", j, dk);
      memory.keep("dv", j, dv);
      steps.push(memory.step("key", tile.i, j, { masked: tile.masked, s, p, dp, ds, dk, dv }));
      memory.drop("q", "do", "lse", "delta", "dq");
    }
    memory.store("dk", j, dk);
    memory.store("dv", j, dv);
    steps.push(memory.step("finish", null, j, { dk, dv }));
    memory.drop("k", "v", "dk", "dv");
  }
  for (let i = 0; i < tiles.tall; i++) {
    let dq = zeros(memory.load("q", i).length, memory.hbm.q[0][0].length);
    for (const tile of tiles.visited.filter((one) => one.i === i)) {
      const { s, p, dp, ds, k } = tileGradient(memory, tile, [2, 1]);
      dq = memory.keep("dq", i, add(dq, times(ds, k)));
      steps.push(memory.step("query", i, tile.j, { masked: tile.masked, s, p, dp, ds, dq }));
      memory.drop("k", "v");
    }
    memory.store("dq", i, dq);
    steps.push(memory.step("finish", i, null, { dq }));
    memory.drop("q", "do", "lse", "delta", "dq");
  }
  return steps;
}

/** P = exp(S − lse) and dS = P ∘ (dP − δ) / √D of one tile. */
function tileGradient(memory, { i, j, hide }, [ofQ, ofV]) {
  const [q, g, lse, delta] = ["q", "do", "lse", "delta"].map((name) => memory.load(name, i));
  const [k, v] = ["k", "v"].map((name) => memory.load(name, j));
  const s = scores(q, k).map((row, r) => row.map((x, c) => (hide[r][c] ? -Infinity : x)));
  const p = s.map((row, r) => row.map((x) => correction(x, lse[r])));
  const dp = times(g, transposed(v));
  const ds = p.map((row, r) => row.map((x, c) => (x * (dp[r][c] - delta[r])) / Math.sqrt(q[0].length)));
  for (const [count, depth] of [[ofQ, q[0].length], [ofV, v[0].length]]) for (let n = 0; n < count; n++) memory.multiply(q.length, k.length, depth);
  memory.keep("p", 0, p);
  memory.keep("ds", 0, ds);
  memory.drop("p", "ds");
  return { s, p, dp, ds, q, k, g };
}

/** Bytes that each way moves for n tokens, counted without computing: as `attention` counts, for any size. */
export function traffic({ n, d, rows, columns, causal = false, backward = false, itemsize = 2 }) {
  const [tall, wide] = [Math.ceil(n / rows), Math.ceil(n / columns)];
  const matrix = n * d;
  let [keys, visits, queries] = [0, 0, 0]; // rows of K over all Q blocks; tiles; rows of Q over all tiles
  for (let i = 0; i < tall; i++) {
    const high = Math.min(n, (i + 1) * rows);
    const seen = causal ? Math.min(wide, Math.ceil(high / columns)) : wide;
    visits += seen;
    keys += Math.min(n, seen * columns);
    queries += seen * (high - i * rows);
  }
  const passes = 4 + (causal ? 2 : 0) + (backward ? 7 + (causal ? 2 : 0) : 0);
  const more = backward ? 8 : 0;
  return {
    naive: itemsize * (passes * n * n + (4 + more) * matrix),
    fa1: itemsize * (2 * matrix + queries * (3 * d + 4)),
    fa2: itemsize * (2 * matrix + 2 * keys * d + n),
    cached: itemsize * (4 * matrix + n), // if a cache keeps K and V: each comes from HBM once
    visits,
  };
}
