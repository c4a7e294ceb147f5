// The one example that every chapter is about: the reader's numbers or words, the block sizes, causal or not.
import { read, t, write } from "./core.js";
import { scores } from "./math/matrix.js";

export const [D, MOST] = [4, 12];
export const PRESETS = {
  sentence: "the animal slept because it was so tired",
  characters: "小猫太累了所以睡着了",
  numbers: "3 2 5 1 4 0 6 2",
  rising: "1 2 3 4 5 6",
  equal: "2 2 2 2 2 2 2 2",
  large: "100 101 99 102",
};
export const SHARED = { text: PRESETS.sentence, rows: 4, columns: 4, causal: 0, row: MOST };

/** Words, or numbers; characters of a language without spaces. If the text cannot be used, a sentence that says why. */
export function tokens(text) {
  const found = text.replace(/([\u3400-\u9fff\u3040-\u30ff\uac00-\ud7af])/g, " $1 ").split(/[\s,，、。;；]+/).filter(Boolean);
  if (!found.length) return { problem: t("example.empty") };
  if (found.length > MOST) return { problem: t("example.many", { n: found.length, most: MOST }) };
  const numbers = found.map((word) => Number(word.replace("−", "-")));
  if (!numbers.every(Number.isFinite)) return { words: found };
  if (numbers.some((x) => Math.abs(x) > 1e4)) return { problem: t("example.huge") };
  return { words: found, numbers };
}

/** A number between −spread and spread with one digit, always the same for the same text. */
function drawn(text, spread) {
  let seed = 2166136261;
  for (const letter of text) seed = Math.imul(seed ^ letter.codePointAt(0), 16777619);
  seed = Math.imul(seed ^ (seed >>> 15), 0x2c1b3c6d);
  seed = Math.imul(seed ^ (seed >>> 12), 0x297a2d39);
  const unit = ((seed ^ (seed >>> 15)) >>> 0) / 4294967296;
  return Math.round((2 * unit - 1) * spread * 10) / 10;
}
const vector = (salt, word, spread) => Array.from({ length: D }, (_, c) => drawn(`${salt} ${word} ${c}`, spread));

/** Q, K, V and the upstream gradient of the example. Numbers are the scores of the last query: its q is (√D, 0, …), and
    number j is the first entry of k_j. Words get vectors drawn from their letters: no model was trained. */
export function example(text) {
  const { words, numbers } = tokens(text);
  const n = words.length;
  const q = words.map((word, i) => (numbers ? vector("q", i, 0.9) : vector("q", word, 2)));
  const k = words.map((word, i) => (numbers ? [numbers[i], ...vector("k", i, 1).slice(1)] : vector("k", word, 2)));
  if (numbers) q[n - 1] = [Math.sqrt(D), 0, 0, 0];
  return { words, numbers, n, q, k, v: words.map((word, i) => vector("v", `${word} ${numbers ? i : ""}`, 2)), do: words.map((_, i) => vector("g", i, 1)) };
}

/** The shared state, made fit: a text that can be used, blocks no larger than the example, a row that exists. */
export function shared() {
  const state = read("", SHARED);
  if (tokens(state.text).problem) state.text = SHARED.text;
  const n = tokens(state.text).words.length;
  const fit = (x) => Math.max(1, Math.min(n, Math.round(x)));
  return { ...state, rows: fit(state.rows), columns: fit(state.columns), row: Math.max(0, Math.min(n - 1, state.row)), causal: Number(state.causal) ? 1 : 0 };
}

export const share = (patch) => write("", SHARED, patch);
export const isShared = (key) => key in SHARED;

/** The scores of one query; with a causal mask, those of the keys it sees. */
export function rowOfScores(one, row, causal) {
  return scores([one.q[row]], one.k)[0].slice(0, causal ? row + 1 : one.n);
}
