// Scores of search results: Sphinx's, and then by the type of the page and by the words in its title.
const queryWords = (new URLSearchParams(location.search).get("q") || "").toLowerCase().match(/\w{3,}/g) || [];

var Scorer = {
  score: ([page, title, anchor, description, score, file, kind]) => {
    if (kind === "index") return score;
    const [folder] = page.split("/"), words = title.toLowerCase();
    const matches = queryWords.filter((word) => words.includes(word.replace(/(ing|s)$/, ""))).length;
    const weights = { docs: 1.2, commands: 1.1, kinds: 1.1, code: 0.3, tools: 0.3, CHANGELOG: 0.3, CONTRIBUTING: 0.3 };
    return (weights[folder] || 1) * (score + (matches ? (10 * matches) / queryWords.length : 0));
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
