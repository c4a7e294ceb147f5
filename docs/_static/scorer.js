// Guides first, then the reference, the course, how kernels work, and measurements last. Of pages of a kind the one whose title has
// more of the words comes first; a function's own name leads to the reference.
const KINDS = [
  [/^(results\/|benchmark$)/, 0.2],
  [/^(hopper|portable-kernels)/, 0.4],
  [/^course\//, 0.6],
  [/^(reference\/|index$|distributed$)/, 1],
];
function inTitle(title) {
  const query = new URLSearchParams(window.location.search).get("q") ?? "";
  const words = query.toLowerCase().match(/[\p{L}\p{N}_]+/gu) ?? [];
  const found = words.filter((word) => title.toLowerCase().includes(word.replace(/(ing|s)$/, "")));
  return words.length ? found.length / words.length : 0;
}
var Scorer = {
  objNameMatch: 60,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
  score: ([page, title, , , score, , kind]) => {
    if (kind === "object") return /^tilewise\.((mods|sparse|distributed)\.)?\w+$/.test(title) ? score : score / 4;
    return (score + 20 * inTitle(title)) * (KINDS.find(([pages]) => pages.test(page))?.[1] ?? 1.6);
  },
};
