// Guides first, then the reference, the course, how kernels work, and measurements last. A title counts more than words.
const KINDS = [
  [/^(results\/|benchmark$)/, 0.2],
  [/^(hopper|portable-kernels)/, 0.4],
  [/^course\//, 0.6],
  [/^reference\//, 1],
];
var Scorer = {
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
  score: ([page, , , , score]) => score * (KINDS.find(([kind]) => kind.test(page))?.[1] ?? 1.6),
};
