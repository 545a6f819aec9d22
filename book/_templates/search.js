// How the search ranks pages; Sphinx puts this into `language_data.js`.

// What readers ask for in words that the pages that answer do not use, or not often.
const KEYWORDS = {
  "book/index": "cite citation report bug issue contact long time own data corpus prerequisites",
  "book/setup": "install installation uninstall remove requirements python pip windows wsl"
    + " mac macos linux docker conda proxy offline cpu prerequisites start open run chapter"
    + " notebook jupyter update",
  "book/programs": "license licence copyright download code source",
  "book/own": "own write template start system example pickle lock thread threads log"
    + " logging print stdout debug debugger breakpoint pdb dataloader num_workers trace"
    + " profile profiler checkpoint save deadlock timeout",
  "book/gpu": "install cuda gpu gpus nvidia nccl run device memory oom",
  "book/browser": "colab binder online kaggle",
  "book/publish": "publish deploy host github pages",
  "book/choose": "choose method compare recommend",
  "book/layers": "own my model layer supported",
  "book/rpc": "alternatives deprecated replacement",
  "book/results": "benchmark results speed faster",
  "book/moves": "update upgrade version pytorch release change parameter",
  "book/hosts": "multiple machines nodes cluster cloud aws firewall port interface",
  "book/jobs": "slurm kubernetes cluster",
  "book/network": "security reach workers firewall port private token attack",
  "book/errors": "error failed crash hang stuck timeout deadlock debug memory killed bug",
  "book/messages": "error address use connection refused timeout hang deadlock memory",
  "book/glossary": "definition meaning term",
  "book/api": "api reference function class method",
  "book/contributing": "contribute add chapter",
  "notebooks/03_constraint_dissolving": "copying memory orthogonal",
  "notebooks/06_shards": "tensor parallel sharded",
  "notebooks/07_hosts": "multiple machines nodes checkpoint restart failure recovery",
  "notebooks/09_costs": "cost estimate capacity plan latency bandwidth straggler",
};

// Pages come before objects of the reference.
var Scorer = {
  objNameMatch: 2, objPartialMatch: 1, objPrio: {}, objPrioDefault: 0, title: 15,
};

// Words with which questions begin.
stopwords.push(...("can could do does from get how i me my need should use what when"
  + " where which who why you").split(" "));

// A pasted message has numbers that no page has.
var splitQuery = (query) => {
  const words = query.split(/[^\p{L}\p{N}_]+/u).filter((word) => word);
  const named = words.filter((word) => !/^\d/.test(word));
  return named.length ? named : words;
};

// A page need not have every word: a word counts the more, the fewer pages have it; in a
// title three times, and five times if the page is the one for it.
const rankPages = (words) => {
  const {terms, titleterms, docnames, titles, filenames} = Search._index;
  const stem = (word) => new Stemmer().stemWord(word), scores = new Map();
  const pages = Object.entries(KEYWORDS).map(([page, keywords]) =>
    [docnames.indexOf(page), keywords.split(" ").map(stem)]);
  let whole = 0;
  for (const word of words) {
    const weights = new Map();
    const note = (files, weight) => [files ?? []].flat().forEach((file) =>
      weights.set(file, Math.max(weight, weights.get(file) ?? 0)));
    // A word may be the name of a method of every object.
    if (Object.hasOwn(terms, word)) note(terms[word], 1);
    if (Object.hasOwn(titleterms, word)) note(titleterms[word], 3);
    for (const [file, keywords] of pages) {
      if (file >= 0 && keywords.includes(word)) note(file, 5);
    }
    if (!weights.size && word.length > 2) {  // a part of a longer word
      for (const term in terms) if (term.includes(word)) note(terms[term], 0.5);
    }
    const rarity = weights.size ? Math.log(docnames.length / weights.size) : 0;
    weights.forEach((weight, file) =>
      scores.set(file, (scores.get(file) ?? 0) + weight * rarity));
    whole += rarity;
  }
  const scale = (file) => /^(book.api.|_modules)/.test(docnames[file]) ? 5 : 10;
  return [...scores].filter(([, score]) => score >= whole / 2).map(([file, score]) =>
    [docnames[file], titles[file], "", null, scale(file) * score, filenames[file]]);
};
// Before the page is ready, and asks for what its address has; `Search` is there already.
if (typeof Search === "object") Search.performTermsSearch = rankPages;
