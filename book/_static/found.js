/* Whoever comes from the search arrives at the passage that was looked for.

Sphinx would mark the words of the search, but takes every page for the search's, since
the theme has a search on each. The passage is the block of text with the rarest of them. */
"use strict";

(() => {
  const BLOCK = "p, li, dt, dd, td, th, pre, figcaption, h1, h2, h3, h4";

  function arrive() {
    const marks = [...document.querySelectorAll("article span.highlighted")];
    const wordOf = (mark) => mark.textContent.toLowerCase();
    const counts = new Map();
    marks.forEach((mark) => counts.set(wordOf(mark), 1 + (counts.get(wordOf(mark)) ?? 0)));
    const blocks = new Map(); // of each, its marks of different words
    for (const mark of marks) {
      const block = mark.closest(BLOCK) ?? mark;
      if (!blocks.has(block)) blocks.set(block, new Map());
      blocks.get(block).set(wordOf(mark), mark);
    }
    // A word counts the more, the fewer marks it has on the page.
    const weight = (word) => 1 / counts.get(word);
    const worth = (words) => [...words.keys()].reduce((sum, word) => sum + weight(word), 0);
    const [passage] = [...blocks.values()].sort((a, b) => worth(b) - worth(a));
    const [[, rarest]] = [...passage].sort(([a], [b]) => weight(b) - weight(a));
    unfold(rarest);
    rarest.scrollIntoView({ block: "center" });
  }

  function unfold(mark) {
    mark.dispatchEvent(new Event("reveal", { bubbles: true })); // see guess.js
    for (let e = mark.closest("details"); e; e = e.parentElement.closest("details")) {
      e.open = true;
    }
    mark.closest(".toggle-hidden")?.querySelector(".toggle-button")?.click();
  }

  if (document.getElementById("search-results")) return;
  const observer = new MutationObserver(() => {
    if (!document.querySelector("article span.highlighted")) return;
    observer.disconnect();
    if (!location.hash) arrive();
  });
  observer.observe(document.body, { childList: true, subtree: true });
  // Once all that folds has been folded.
  addEventListener("load", () => SphinxHighlight.highlightSearchWords());
})();
