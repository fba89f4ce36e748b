// Which pages come first in the search: guides and the reference, then the changelog and notes.
var Scorer = {
  score: (result) => {
    const [page, , , , score, , kind] = result;
    if (/^(CHANGELOG|CONTRIBUTING|benchmarks\/|training\/)/.test(page)) return score - 100;
    if (page.startsWith("notebooks/")) return score - 4;
    return kind === "title" ? score + 2 : score;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
