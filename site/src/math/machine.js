// Strides, lines of memory, loops of stages, waves of blocks: the rules of tilewise_lab.machine and costs.waves.
import { sum } from "./matrix.js";

const product = (xs) => xs.reduce((a, b) => a * b, 1);
export const rowMajor = (shape) => ({ shape, strides: shape.map((_, i) => product(shape.slice(i + 1))) });

export function transpose({ shape, strides }) {
  const swap = (xs) => [...xs.slice(0, -2), xs.at(-1), xs.at(-2)];
  return { shape: swap(shape), strides: swap(strides) };
}

/** Where an element of the logical order lies: Σ index · stride. */
export function indexOf(shape, at) {
  const index = [];
  shape.reduceRight((rest, size) => (index.unshift(rest % size), Math.floor(rest / size)), at);
  return index;
}

export function offsets({ shape, strides }) {
  return Array.from({ length: product(shape) }, (_, at) => sum(indexOf(shape, at).map((i, axis) => i * strides[axis])));
}

/** A row-major tensor, seen as it is, with its last axes swapped, or in another shape. */
export function layout(shape, view) {
  const before = rowMajor(shape);
  const after = view === "same" ? before : view === "transpose" ? transpose(before) : rowMajor(view);
  const places = offsets(after);
  return { before, ...after, offsets: places, contiguous: places.every((offset, i) => offset === i) };
}

export const [WARP, LINE, SECTOR] = [32, 128, 32];

/** One load of a warp from a row-major matrix: its lanes share a row, or each thread has a row of its own. */
export function coalescing({ pattern, columns, itemsize, instant }) {
  const elements = Array.from({ length: WARP }, (_, lane) => (pattern === "thread" ? lane * columns + instant : ((instant * WARP) % columns) + lane));
  const bytes = new Set(elements.flatMap((e) => Array.from({ length: itemsize }, (_, b) => e * itemsize + b)));
  const distinct = (size) => new Set([...bytes].map((b) => Math.floor(b / size))).size;
  const sectors = distinct(SECTOR);
  return { elements, lines: distinct(LINE), sectors, efficiency: bytes.size / (SECTOR * sectors) };
}

export const STAGES = ["load", "scores", "softmax", "values"];
const phase = (at, iterations, stages) => (at < stages - 1 ? "prologue" : at < iterations ? "steady" : "epilogue");

export function pipelined(iterations, stages) {
  const slots = [];
  for (let i = 0; i < iterations; i++) for (let s = 0; s < stages; s++) slots.push([s, i, i + s, 1, phase(i + s, iterations, stages)]);
  return told(slots);
}

export function sequential(iterations, stages) {
  const slots = [];
  for (let i = 0; i < iterations; i++) for (let s = 0; s < stages; s++) slots.push([s, i, i * stages + s, 1, ""]);
  return told(slots);
}

/** Layers on devices: all forwards, then all backwards the other way. */
export function forwardBackward(devices, batches) {
  const forward = pipelined(batches, devices).slots;
  const turn = batches + devices - 1;
  const back = forward.map(([unit, i, start, size]) => [devices - 1 - unit, batches + i, turn + start, size, ""]);
  return { ...told([...forward, ...back]), batches, bubble: (devices - 1) / (batches + devices - 1) };
}

function told(slots) {
  const length = Math.max(...slots.map(([, , start, size]) => start + size));
  const spans = new Map();
  for (const [, i, start, size] of slots) {
    const [a, b] = spans.get(i) ?? [start, start + size];
    spans.set(i, [Math.min(a, start), Math.max(b, start + size)]);
  }
  const units = new Set(slots.map(([unit]) => unit)).size;
  const flying = Array.from({ length }, (_, at) => [...spans.values()].filter(([a, b]) => a <= at && at < b).length);
  return { slots, length, utilisation: sum(slots.map((slot) => slot[3])) / (units * length), in_flight: Math.max(...flying) };
}

/** How full a machine of so many places is while it runs so many blocks, a wave at a time. */
export function waves(blocks, places) {
  const count = Math.ceil(blocks / places);
  return { blocks, waves: count, efficiency: blocks / (count * places) };
}

/** For an n × n product: [n, blocks, waves, efficiency] wherever one of them changes, and where a wave is added. */
export function matmulWaves(tile, places, low = 256, high = 4096) {
  return growing((n) => Math.ceil(n / tile[0]) * Math.ceil(n / tile[1]), tile, places, low, high);
}

/** The same for attention of n tokens: one block for each head and block of queries. */
export function tokenWaves(rows, heads, places, low = 1, high = 24) {
  return growing((n) => heads * Math.ceil(n / rows), [rows, rows], places, low, high);
}

function growing(blocksOf, tile, places, low, high) {
  const [steps, cliffs] = [[], []];
  for (let n = low; n <= high; n++) {
    const now = waves(blocksOf(n), places);
    const old = steps.at(-1);
    if (old && old[2] < now.waves) cliffs.push([n, old[1], now.blocks]);
    if (!old || old[1] !== now.blocks) steps.push([n, now.blocks, now.waves, now.efficiency]);
  }
  return { sms: places, tile, low, high, steps, cliffs };
}
