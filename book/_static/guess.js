/* Questions whose answer is locked until the reader has entered a guess.

`show.guess` puts the measured answer on the page, folded, in the output of the cell that
measured it. Here the question, a paragraph that begins with "Predict", gets a form, and
what follows in its section stays hidden until the form was sent, or a link leads there. A
guess is kept in this browser, and nowhere else. */
"use strict";

(() => {
  const stored = {
    key: (name) => `guess ${name}`,
    get(name) {
      try { return localStorage.getItem(this.key(name)); } catch { return null; }
    },
    set(name, value) {
      try { localStorage.setItem(this.key(name), value); } catch { /* not kept, then */ }
    },
    remove(name) {
      try { localStorage.removeItem(this.key(name)); } catch { /* nor here */ }
    },
  };
  const SKIPPED = "";
  const locked = new Map(); // of each open question: where its form is, and what opens it

  function element(tag, properties = {}, ...children) {
    const made = Object.assign(document.createElement(tag), properties);
    made.append(...children);
    return made;
  }

  /* Where the form belongs: before the first cell behind the question, which is the
     last paragraph before the answer that begins with "Predict". */
  function placeOf(answer) {
    const inside = [...(answer.closest("section")?.children ?? [])];
    const at = inside.findIndex((child) => child.contains(answer));
    const asks = (child) => child.matches("p") && /^Predict\b/.test(child.textContent);
    const question = inside.slice(0, at).findLastIndex(asks);
    return question < 0 ? null : inside.find((c, i) => i > question && c.matches("div.cell"));
  }

  /* What follows in the section, but for its subsections. */
  function* behind(place) {
    for (let e = place.nextElementSibling; e?.matches(":not(section)"); e = e.nextElementSibling) {
      yield e;
    }
  }

  const NUMBER = "[\\-+]?(\\d+\\.?\\d*|\\.\\d+)([eE][\\-+]?\\d+)?";

  /* One sentence on the difference. */
  function compare(guess, { value, shown, choices }) {
    if (choices) return guess === value ? "That is what was measured." : "It came out otherwise.";
    const [mine, measured] = [Number(guess), Number(value)];
    const gap = Math.abs(mine - measured);
    if (gap === 0 || mine === Number(shown.replaceAll(",", ""))) return "Exactly.";
    const way = mine > measured ? "too high" : "too low";
    const counts = Number.isInteger(mine) && Number.isInteger(measured);
    if (counts && gap < 10) return `${gap} ${way}.`;
    if (mine * measured <= 0) return `Off by ${Number(gap.toPrecision(2))}.`;
    const ratio = mine / measured;
    const off = ratio > 1 ? ratio : 1 / ratio;
    if (Math.abs(ratio - 1) < 0.01) return "Within 1 %.";
    if (off < 2) return `${Math.round(100 * Math.abs(ratio - 1))} % ${way}.`;
    const factor = off < 10 ? off.toFixed(1) : Math.round(off).toLocaleString("en");
    return `A factor of ${factor} ${way}.`;
  }

  function inputs({ unit, choices }) {
    if (!choices) {
      // As text, since in a number a browser drops a comma, and 1,96 would be 196.
      const field = element("input", { inputMode: "decimal", pattern: NUMBER, required: true });
      Object.assign(field, { name: "guess", title: "a number, such as 0.25 or 3e5" });
      return [element("label", {}, "Your guess: ", field, ` ${unit}`)];
    }
    const all = JSON.parse(choices).map((value) => {
      const button = element("input", { type: "radio", name: "guess", required: true });
      button.value = value;
      return element("label", {}, button, ` ${value}`);
    });
    return [element("fieldset", {}, element("legend", {}, "Your guess:"), ...all)];
  }

  /* Open what hides a place to which a link or the search leads. */
  function reveal(target) {
    const hides = ([place]) => [...behind(place)].some((each) => each.contains(target));
    const closed = [...locked].filter(hides);
    closed.forEach(([, open]) => open());
    return closed.length > 0;
  }

  function openTarget() {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (target && reveal(target)) target.scrollIntoView();
  }

  /* Returns what asks, or tells what was asked before, once all forms have their places. */
  function start(answer) {
    const { name, unit, shown, choices, found } = answer.dataset;
    const place = element("div", { className: "guess-place" });
    placeOf(answer)?.before(place);
    if (!place.isConnected) return;
    answer.hidden = true; // the form tells it

    // Of two questions in a section, each has its own hold on what follows.
    const lock = (on) => {
      const held = `locked-${name.replaceAll(/\W/g, "-")}`;
      for (const each of behind(place)) each.classList.toggle(held, on);
    };

    function ask() {
      const form = element("form", { className: "guess-form" }, ...inputs(answer.dataset));
      const skip = element("button", { type: "button" }, "Show it without a guess");
      const all = element("button", { type: "button" }, "Show all on this page");
      const hint = element("p", {}, "The rest of this section is hidden until then.");
      form.append(element("button", { className: "send" }, "Compare"), skip, all, hint);
      form.addEventListener("submit", (event) => {
        event.preventDefault();
        tell(new FormData(form).get("guess"), true);
      });
      skip.addEventListener("click", () => tell(SKIPPED, true));
      all.addEventListener("click", () => [...locked.values()].forEach((open) => open()));
      locked.set(place, () => tell(SKIPPED, false));
      place.replaceChildren(form);
      lock(true);
    }

    function tell(guess, now) {
      const again = element("button", { type: "button" }, "Guess again");
      again.addEventListener("click", () => {
        stored.remove(name);
        ask();
        place.querySelector("input").focus();
      });
      const result = element("p", { className: "guess-result", tabIndex: -1 });
      const part = (text, of) => element("span", {}, `${text} `, element("b", {}, of), ` ${unit}`);
      if (guess !== SKIPPED) result.append(part("Your guess:", guess));
      result.append(part(`${found}:`, shown));
      if (guess !== SKIPPED) result.append(element("span", {}, compare(guess, answer.dataset)));
      result.append(again);
      place.replaceChildren(result);
      locked.delete(place);
      lock(false);
      if (now) {
        stored.set(name, guess);
        result.focus(); // so that a screen reader says it
      }
    }

    const before = stored.get(name);
    const known = choices ? JSON.parse(choices).includes(before) : RegExp(`^${NUMBER}$`).test(before);
    return known || before === SKIPPED ? () => tell(before, false) : ask;
  }

  const begun = [...document.querySelectorAll("details.guess")].map(start);
  begun.forEach((begin) => begin?.());
  addEventListener("hashchange", openTarget);
  addEventListener("reveal", ({ target }) => reveal(target));
  openTarget();
})();
