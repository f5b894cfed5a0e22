// Search shows chapters first, then the glossary, labs, and the reference; Sphinx's own scores
// decide within each group.
var Scorer = {
  score: function (result) {
    var page = result[0];
    if (/^book\/(index|glossary|claims|notation)$/.test(page)) return result[4] + 200;
    if (/^labs\//.test(page)) return result[4] + 100;
    if (/^book\/(api|references|clinics)/.test(page)) return result[4];
    return result[4] + 300;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2
};
