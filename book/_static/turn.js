/* Figures that one can turn. `show.figure` leaves a still picture on the page and, beside it,
   the chapter's numbers as JSON; where scripts run, a figure of this file takes its place.

   `turn.models` has what the figures compute: pure functions of settings and of a chapter's
   numbers, each of them a function of the package, with which tests compare it. Below them
   are the controls and the drawing that all figures share, and one description of each
   figure. Nothing is fetched, and nothing is kept. */
"use strict";

const turn = (() => {
  const SVG = "http://www.w3.org/2000/svg";

  // --- What is computed -----------------------------------------------------------------

  /* Steps per second of one process, and of observers that wait `added` ms for the calls
     of a step. Each has one environment, whose step takes `cost` and `own` ms, and all
     step at the same time as long as each has a core. */
  function stepsPerSecond({ cost, added, observers, cores }, { own }) {
    const busy = (cost + own) * Math.max(1, observers / cores);
    return { alone: 1000 / (cost + own), together: (1000 * observers) / (busy + added) };
  }

  /* Bytes of a step with each cut; `parameter_server.traffic.expected_bytes`. */
  function bytesOfCuts({ vocab, width, seq_len, batch_size }) {
    const tokens = seq_len * batch_size;
    const bytes = (numbers, indices) => 2 * 4 * tokens * numbers + 8 * tokens * indices;
    return { logits: bytes(2 * width + vocab, 1), loss: bytes(2 * width, 2) };
  }

  /* `dissolving.plane`: objective, map, and what SGD minimises, with its gradient. */
  const square = (x) => x[0] * x[0] + x[1] * x[1];
  const onto = (x) => x.map((each) => (2 * each) / (1 + square(x)));
  const objective = (x) => (x[0] - 0.6) ** 2 + (x[1] - 0.3) ** 2 / 2;

  function valueAt(x, { beta, mapped }) {
    return objective(mapped ? onto(x) : x) + (beta / 2) * (square(x) - 1) ** 2;
  }

  function gradientAt(x, { beta, mapped }) {
    const y = mapped ? onto(x) : x;
    const slope = [2 * (y[0] - 0.6), y[1] - 0.3];
    const long = 1 + square(x);
    const along = x[0] * slope[0] + x[1] * slope[1];
    const back = (k) => (2 * slope[k]) / long - (4 * x[k] * along) / (long * long);
    return [0, 1].map((k) => (mapped ? back(k) : slope[k]) + 2 * beta * (square(x) - 1) * x[k]);
  }

  /* `plane.descend`: the path of SGD; it ends early where it leaves the plane for good. */
  function descend(settings, start, lr, steps) {
    const path = [start];
    for (let n = 0; n < steps && square(path[n]) < 1e6; n++) {
      const slope = gradientAt(path[n], settings);
      path.push(path[n].map((each, k) => each - lr * slope[k]));
    }
    return path;
  }

  /* Where Newton's method leads from a point at which the function is convex. */
  function settle(x, settings) {
    for (let n = 0; n < 40; n++) {
      const slope = gradientAt(x, settings);
      const along = (by) => {
        const [more, less] = [1, -1].map((sign) => gradientAt(x.map((v, k) => v + sign * by[k]), settings));
        return more.map((v, k) => (v - less[k]) / 2e-5);
      };
      const [[a, b], [, d]] = [along([1e-5, 0]), along([0, 1e-5])];
      const det = a * d - b * b;
      if (!(det > 0 && a > 0)) return x;
      x = [x[0] - (d * slope[0] - b * slope[1]) / det, x[1] - (a * slope[1] - b * slope[0]) / det];
    }
    return x;
  }

  /* Minima off the circle: where SGD and then Newton's method come to rest from a grid. */
  function minimaOffCircle(settings) {
    const lr = 0.15 / (1 + 2 * settings.beta);
    const found = [];
    for (let i = -4; i <= 4; i++) {
      for (let j = -4; j <= 4; j++) {
        const near = descend(settings, [i / 4 + 0.01, j / 4 + 0.01], lr, 1000).at(-1);
        const end = settle(near, settings);
        const still = Math.hypot(...gradientAt(end, settings)) < 1e-9;
        const isNew = found.every((x) => Math.hypot(x[0] - end[0], x[1] - end[1]) > 1e-4);
        if (still && isNew && Math.abs(square(end) - 1) > 1e-3) found.push(end);
      }
    }
    return found;
  }

  /* How far a step moves the row r and the bias b₀ of chapter 5's example. */
  function moves({ labels, shares }) {
    const mean = (list) => list.reduce((a, b) => a + b, 0) / list.length;
    const each = labels.map((label) => (label === 0 ? 0.5 : -0.5));
    let at = 0;
    const means = shares.map((share) => mean(each.slice(at, (at += share))));
    const all = { row: mean(each), bias: mean(each) };
    const sum = mean(means) * shares.length;
    return { "one process": all, original: { row: sum, bias: mean(means) }, exact: all };
  }

  /* What a constrained weight of n x p costs each of so many ranks in a step, in bytes
     sent and multiplications; `sharding.costs.predicted`. */
  function shardCosts({ n, p, ranks, bytes }) {
    const [others, products, square] = [(ranks - 1) / ranks, 5 * n * p * p, p * p];
    return {
      rows: { bytes: 4 * others * square * bytes, products: products / ranks, numbers: (3 * n * p) / ranks + 2 * square },
      gathered: { bytes: 2 * others * n * p * bytes, products, numbers: 3 * n * p + 2 * square },
    };
  }

  // --- What all figures share -----------------------------------------------------------

  function made(tag, attributes = {}, ...children) {
    const isSvg = "svg path circle line text rect polyline title".split(" ").includes(tag);
    const element = isSvg ? document.createElementNS(SVG, tag) : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  }

  const shown = (value) => {
    const size = Math.abs(value);
    if (size >= 1e4) return Math.round(value).toLocaleString("en");
    return String(Number(value.toPrecision(size >= 100 ? 4 : 3)));
  };

  const scaled = (value, units) => {
    const fits = units.filter(([, size]) => Math.abs(value) >= size).at(-1) ?? units[0];
    return `${shown(value / fits[1])}${fits[0]}`;
  };
  const inBytes = (value) => scaled(value, [[" B", 1], [" kB", 1e3], [" MB", 1e6], [" GB", 1e9], [" TB", 1e12]]);
  const inTime = (ms) => scaled(ms, [[" µs", 1e-3], [" ms", 1], [" s", 1e3]]);
  const inWords = (value) => scaled(value, [["", 1], [" thousand", 1e3], [" million", 1e6], [" billion", 1e9], [" trillion", 1e12]]);
  const many = (number, what) => `${number} ${what}${number === 1 ? "" : "s"}`;

  /* A slider over the values of a list, or a choice; either is the browser's own, so
     that mouse, touch and keys work as everywhere. */
  function control({ name, label, values, choices, unit = "", start, clicks }, changed) {
    if (choices) {
      const select = made("select", { name, "aria-label": label });
      select.append(...choices.map((each) => made("option", { value: each }, each)));
      select.value = start;
      select.addEventListener("input", changed);
      const read = () => select.value;
      return { name, read, node: made("label", {}, made("span", {}, label), select) };
    }
    if (!values.includes(start)) {
      values = [...values, start].sort((a, b) => a - b); // the chapter's own
    }
    const last = values.length - 1;
    const slider = made("input", { type: "range", name, min: 0, max: last, step: 1, "aria-label": label });
    const nearest = (to) =>
      values.reduce((best, v, i) => (Math.abs(v - to) < Math.abs(values[best] - to) ? i : best), 0);
    slider.value = nearest(start);
    const output = made("output");
    const read = () => values[slider.value];
    const tell = () => {
      output.textContent = `${shown(read())} ${unit}`;
      slider.setAttribute("aria-valuetext", output.textContent);
    };
    slider.addEventListener("input", () => { tell(); changed(); });
    tell();
    const set = (to) => { slider.value = nearest(to); tell(); };
    const node = made("label", {}, made("span", {}, label), slider, output);
    if (!clicks) return { name, read, set, node };
    const button = (text, by) => {
      const click = made("button", { type: "button" }, text);
      click.addEventListener("click", () => {
        slider.value = Number(slider.value) + by;
        slider.dispatchEvent(new Event("input"));
      });
      return click;
    };
    const [back, forward] = [button("Back", -1), button("Forward", 1)];
    const limit = () => {
      back.disabled = slider.value === slider.min;
      forward.disabled = slider.value === slider.max;
    };
    slider.addEventListener("input", limit);
    limit();
    const buttons = made("div", { class: "turn-clicks" }, back, forward);
    return { name, read, set, node: made("div", {}, node, buttons) };
  }

  const range = (from, to, step = 1) =>
    Array.from({ length: Math.round((to - from) / step) + 1 }, (_, i) => from + i * step);
  const spaced = (from, to, number) =>
    Array.from({ length: number }, (_, i) => from * (to / from) ** (i / (number - 1)));
  const doubled = (from, to) => spaced(from, to, Math.round(Math.log2(to / from)) + 1).map(Math.round);

  /* Curves and points over two axes, either of which may be logarithmic. */
  function chart({ x, y, curves, points = [] }, label, W) {
    const [H, left, right, top, bottom] = [340, 84, 28, 14, 48];
    const svg = made("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": label });
    const scale = ({ from, to, log }, begin, end) => (value) => {
      const [a, b, v] = log ? [from, to, value].map(Math.log) : [from, to, value];
      return begin + ((v - a) / (b - a)) * (end - begin);
    };
    const [px, py] = [scale(x, left, W - right), scale(y, H - bottom, top)];
    for (const at of ticks(x)) {
      svg.append(made("line", { x1: px(at), x2: px(at), y1: top, y2: H - bottom, class: "grid" }));
      svg.append(made("text", { x: px(at), y: H - bottom + 16, class: "middle" }, shown(at)));
    }
    for (const at of ticks(y)) {
      svg.append(made("line", { x1: left, x2: W - right, y1: py(at), y2: py(at), class: "grid" }));
      svg.append(made("text", { x: left - 6, y: py(at) + 4, class: "end" }, shown(at)));
    }
    svg.append(made("text", { x: (left + W - right) / 2, y: H - 8, class: "middle" }, x.label));
    const middle = (top + H - bottom) / 2;
    const turned = `rotate(-90 14 ${middle})`;
    svg.append(made("text", { x: 14, y: middle, transform: turned, class: "middle" }, y.label));
    const inside = ([a, b]) => a >= x.from && a <= x.to && b >= y.from && b <= y.to;
    for (const { color, dashes = "", values } of curves) {
      const at = values.filter(inside).map(([a, b]) => `${px(a).toFixed(1)},${py(b).toFixed(1)}`);
      const look = { stroke: color, "stroke-dasharray": dashes, class: "curve" };
      svg.append(made("polyline", { points: at.join(" "), ...look }));
    }
    for (const { color, at, text } of points) {
      const dot = made("circle", { cx: px(at[0]), cy: py(at[1]), r: 5, fill: color });
      dot.append(made("title", {}, text));
      svg.append(dot);
    }
    return svg;
  }

  function ticks({ from, to, log }) {
    if (log) {
      const first = Math.ceil(Math.log10(from) - 1e-9);
      const many = Math.floor(Math.log10(to) + 1e-9) - first;
      return range(0, many).map((k) => 10 ** (first + k));
    }
    const raw = (to - from) / 5;
    const unit = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((k) => k * unit).find((each) => each >= raw);
    return range(Math.ceil(from / step), Math.floor(to / step)).map((k) => k * step);
  }

  function legend(entries) {
    const keys = entries.map(({ name, color, dashes = "", dot }) => {
      const key = made("svg", { viewBox: "0 0 28 10", width: 28, height: 10, "aria-hidden": true });
      const line = { x1: 0, x2: 28, y1: 5, y2: 5, stroke: color, "stroke-dasharray": dashes };
      const circle = { cx: 14, cy: 5, r: 5, fill: color };
      key.append(dot ? made("circle", circle) : made("line", { ...line, class: "curve" }));
      return made("span", {}, key, ` ${name}`);
    });
    return made("div", { class: "turn-legend" }, ...keys);
  }

  function table(head, rows) {
    const cells = (tag, row) => row.map((each) => made(tag, tag === "th" ? { scope: "col" } : {}, each));
    const body = rows.map((row) => made("tr", {}, ...cells("td", row)));
    return made("table", { class: "table" }, made("thead", {}, made("tr", {}, ...cells("th", head))), made("tbody", {}, ...body));
  }

  /* The stages of a step of chapter 2: phase, what happens, and which bars show it. */
  const STAGES = [
    ["Forward", "the server looks up the vectors of the words.", ["ps EmbeddingTable.forward"]],
    ["Forward", "the vectors cross, and torch adds a send and a recv node.", ["ps EmbeddingTable.forward"]],
    ["Forward", "the trainer runs its LSTM.", ["trainer0 forward"]],
    ["Forward", "the LSTM's outputs cross, with two more nodes.", ["ps Decoder.loss"]],
    ["Forward", "the server computes the scores and the loss.", ["ps Decoder.loss"]],
    ["Forward", "the loss crosses, with the last two nodes; the trainer has it.", ["trainer0 forward"]],
    ["Backward", "the trainer begins at the loss, and its gradient crosses.", ["trainer0 backward"]],
    ["Backward", "the server goes back through its decoder.", ["ps decoder backward"]],
    ["Backward", "the gradient of the outputs crosses.", ["trainer0 backward"]],
    ["Backward", "the trainer goes back through its LSTM.", ["trainer0 backward"]],
    ["Backward", "the gradient of the vectors crosses.", ["trainer0 backward"]],
    ["Backward", "the server adds it up for each word of its table.", ["ps embedding backward"]],
    ["Optimizer", "both owners are asked for the norm of their gradients, and take a step.", ["trainer0 optimizer", "ps squared_norm", "ps step"]],
  ];

  // --- The figures: what can be set, and what is drawn of it ------------------------------

  const figures = {
    observers: {
      controls: (data) => [
        { name: "added", label: "calls of a step", values: spaced(0.01, 10, 61), unit: "ms", start: data.added },
        { name: "observers", label: "observers", values: range(1, 16), start: 2 },
        { name: "cores", label: "cores", values: range(1, 16), start: data.cores },
      ],
      draw(settings, data, { wide }) {
        const costs = spaced(0.01, 20, 80);
        const at = (cost) => stepsPerSecond({ ...settings, cost }, data);
        const curves = [
          { name: "one process, by the rule", color: data.colors[0], values: costs.map((c) => [c, at(c).alone]) },
          { name: "observers, by the rule", color: data.colors[3], dashes: "8 4", values: costs.map((c) => [c, at(c).together]) },
        ];
        const points = data.measured.map(([name, cost, speed]) => ({
          color: data.colors[data.names.indexOf(name)], at: [cost, speed],
          text: `measured, ${name}: ${shown(speed)} at ${shown(cost)} ms`,
        }));
        const dots = data.names.map((name, k) => ({ name: `measured, ${name}`, color: data.colors[k], dot: true }));
        const x = { from: 0.01, to: 20, log: true, label: "time added to an environment's step, in ms" };
        const y = { from: 10, to: 100000, log: true, label: "environment steps per second" };
        const wins = costs.find((c) => at(c).together > at(c).alone);
        const where = wins === undefined ? "never beat one process"
          : wins === costs[0] ? "beat one process everywhere"
          : `beat one process from about ${shown(wins)} ms on`;
        const most = at(20).together / at(20).alone;
        const fast = Math.abs(most - 1) < 0.005 ? "as fast" : `${shown(most)} times as fast`;
        const who = `${many(settings.observers, "observer")} on ${many(settings.cores, "core")}`;
        return {
          picture: [legend([...curves, ...dots]), chart({ x, y, curves, points }, "Steps per second by the time of a step", wide)],
          text: `${who} ${where}; at 20 ms, ${fast}. Two observers were measured.`,
        };
      },
    },

    cuts: {
      controls: (data) => [
        { name: "vocab", label: "words in the vocabulary", values: doubled(64, 131072), start: data.vocab },
        { name: "width", label: "width of vectors and LSTM", values: doubled(16, 4096), start: data.hidden },
        { name: "seq_len", label: "words in a window", values: doubled(4, 512), start: data.seq_len },
        { name: "batch_size", label: "columns of a batch", values: doubled(1, 512), start: data.batch_size },
      ],
      draw(settings, data, { wide }) {
        const sizes = spaced(64, 131072, 60);
        const curve = (cut) => sizes.map((vocab) => [vocab, bytesOfCuts({ ...settings, vocab })[cut] / 1e6]);
        const curves = [
          { name: "cut at the scores", color: data.colors[0], values: curve("logits") },
          { name: "cut at the loss", color: data.colors[1], dashes: "8 4", values: curve("loss") },
        ];
        const here = bytesOfCuts(settings);
        const points = ["logits", "loss"].map((cut, k) => ({
          color: data.colors[k], at: [settings.vocab, here[cut] / 1e6], text: `${shown(here[cut] / 1e6)} MB`,
        }));
        const highest = Math.max(...curves[0].values.map(([, mb]) => mb));
        const lowest = Math.min(...curves[1].values.map(([, mb]) => mb));
        const x = { from: 64, to: 131072, log: true, label: "words in the vocabulary" };
        const y = { from: 10 ** Math.floor(Math.log10(lowest / 1.5)), to: 10 ** Math.ceil(Math.log10(highest)), log: true, label: "megabytes a step" };
        return {
          picture: [legend(curves), chart({ x, y, curves, points }, "Megabytes a step by the vocabulary", wide)],
          text: `With these sizes a step sends ${inBytes(here.logits)} with the cut at the scores and ${inBytes(here.loss)} with the cut at the loss: ${shown(here.logits / here.loss)} times as much.`,
        };
      },
    },

    plane: {
      hold: holdStart,
      controls: () => [
        { name: "beta", label: "β", values: spaced(0.02, 64, 36), start: 1 },
        { name: "lr", label: "learning rate", values: spaced(0.001, 0.5, 55), start: 0.1 },
        { name: "x", label: "start, x₁", values: range(-1.6, 1.6, 0.1), start: -1.3 },
        { name: "y", label: "start, x₂", values: range(-1.6, 1.6, 0.1), start: 1.2 },
        { name: "kind", label: "SGD minimises", choices: ["f(A(x)) and the penalty", "f(x) and the penalty"], start: "f(A(x)) and the penalty" },
      ],
      draw(settings, data) {
        const how = { beta: settings.beta, mapped: settings.kind.includes("A(x)") };
        const steps = 1000;
        const path = descend(how, [settings.x, settings.y], settings.lr, steps);
        const end = path.at(-1);
        const minima = knownMinima(how);
        const off = Math.hypot(end[0] - 0.8, end[1] - 0.6);
        const arrives = !(square(end) < 1e6) ? "From this start SGD diverges"
          : Math.hypot(...gradientAt(end, how)) > 1e-3 ? `After ${steps} steps SGD has not come to rest; it is at (${end.map(shown).join(", ")})`
          : off < 1e-3 ? "SGD ends at the constrained minimum, the star"
          : `SGD ends at (${end.map(shown).join(", ")}), which is ${shown(off)} from the star`;
        const many = minima.length ? `${minima.length} of the minima of the function ${minima.length > 1 ? "are" : "is"} off the circle` : "the function has no minimum off the circle";
        return { picture: [landscape(how, path, minima, data)], text: `${arrives}; ${many}.` };
      },
    },

    timeline: {
      controls: (data) => [
        { name: "zoom", label: "zoom", values: spaced(1, Math.max(16, 2 * data.zoom, data.calls.length / 4), 60), unit: "times", start: data.zoom },
        { name: "at", label: "middle", values: range(0, 100, 0.5), unit: "%", start: data.at },
      ],
      draw({ zoom, at }, data, hands) {
        const [low, high] = view(data, zoom, at);
        const inside = data.calls.filter((c) => c[3] <= high && c[6] >= low).length;
        const calls = (name) => data.calls.some((c) => c[0] === name && c[1] !== name);
        const keys = data.workers.map(([name, color]) => ({ name: `${calls(name) ? "called by" : "own work of"} ${name}`, color }));
        return {
          picture: [legend(keys), lanes(data, low, high, hands)],
          text: `From ${shown(low)} to ${shown(high)} ${data.unit}: ${inside} of ${data.calls.length} calls. Point at a bar, or use the arrow keys in the picture, to see what it is.`,
        };
      },
    },

    step: {
      controls: () => [
        { name: "stage", label: "stage of the step", values: range(1, STAGES.length), start: 1, clicks: true },
      ],
      draw({ stage }, data, hands) {
        const [phase, said, busy] = STAGES[stage - 1];
        const graph = made("div");
        graph.innerHTML = data.graph.replaceAll("autograd-", "step-"); // ids of its own
        for (const each of graph.querySelectorAll("[data-step]")) {
          const now = each.dataset.step.split(" ").includes(String(stage));
          each.classList.add(now ? "now" : "later");
        }
        const bars = lanes(data, 0, data.end, hands, (call) => busy.includes(`${call[1]} ${call[2]}`));
        const took = data.calls.filter((c) => busy.includes(`${c[1]} ${c[2]}`))
          .map((c) => `${c[1] === "trainer0" ? "all of " : ""}${c[2]} took ${shown(c[5] - c[4])} ${data.unit}`);
        return { picture: [graph, bars], text: `${phase}: ${said} (${took.join("; ")}.)` };
      },
    },

    moves: {
      controls: () => [
        { name: "first", label: "images of the first trainer", values: range(1, 8), start: 3 },
        { name: "zeros", label: "of these with label 0, at most", values: range(0, 8), start: 2 },
        { name: "second", label: "images of the second trainer", values: range(1, 8), start: 1 },
        { name: "others", label: "of these with label 0, at most", values: range(0, 8), start: 1 },
        { name: "third", label: "images of a third trainer", values: range(0, 8), start: 0 },
        { name: "rest", label: "of these with label 0, at most", values: range(0, 8), start: 0 },
      ],
      draw(s) {
        const labels = (count, zeros) => range(1, count).map((k) => (k <= zeros ? 0 : 1));
        const parts = [labels(s.first, s.zeros), labels(s.second, s.others)];
        if (s.third) parts.push(labels(s.third, s.rest));
        const found = moves({ labels: parts.flat(), shares: parts.map((part) => part.length) });
        const rows = Object.entries(found).map(([way, { row, bias }]) => [way, shown(row), shown(bias)]);
        const { exact, original } = found;
        const same = (what) => Math.abs(original[what] - exact[what]) < 1e-12;
        const where = same("row") && same("bias") ? "in both r and b₀" : same("bias") ? "in b₀ only"
          : same("row") ? "in r only" : "in neither r nor b₀";
        const said = parts.map((part) => part.join(", ")).join(" | ");
        return {
          picture: [table(["one step of", "moves the table's r to", "moves the bias b₀ to"], rows)],
          text: `The labels are ${said}. The original agrees with one process ${where}.`,
        };
      },
    },

    shards: {
      controls: () => [
        { name: "n", label: "rows n", values: doubled(64, 1048576), start: 32768 },
        { name: "p", label: "columns p", values: doubled(8, 4096), start: 128 },
        { name: "ranks", label: "ranks", values: doubled(2, 64), start: 8 },
        { name: "link", label: "link of a rank", values: spaced(0.1, 400, 37), unit: "GB/s", start: 10 },
        { name: "latency", label: "latency of a message", values: spaced(1, 1000, 31), unit: "µs", start: 20 },
        { name: "speed", label: "arithmetic of a rank", values: spaced(10, 100000, 41), unit: "GFLOP/s", start: 10000 },
      ],
      draw(settings) {
        const found = shardCosts({ ...settings, bytes: 4 });
        const messages = { rows: 4 * (settings.ranks - 1), gathered: 2 * (settings.ranks - 1) };
        const times = {};
        for (const [way, cost] of Object.entries(found)) {
          times[way] = {
            wire: cost.bytes / settings.link / 1e6,
            wait: (messages[way] * settings.latency) / 1e3,
            work: (2 * cost.products) / settings.speed / 1e6,
          };
        }
        const total = (t) => t.wire + t.wait + t.work;
        const each = (tell) => ["rows", "gathered"].map(tell);
        const rows = [
          ["sends", ...each((way) => inBytes(found[way].bytes))],
          ["multiplies", ...each((way) => `${inWords(found[way].products)} times`)],
          ["keeps at least", ...each((way) => inBytes(4 * found[way].numbers))],
          ["on the wire", ...each((way) => inTime(times[way].wire))],
          ["waiting for messages", ...each((way) => inTime(times[way].wait))],
          ["computing", ...each((way) => inTime(times[way].work))],
          ["in all", ...each((way) => inTime(total(times[way])))],
        ];
        const ratio = total(times.gathered) / total(times.rows);
        const cheaper = ratio >= 1 ? `cut into rows is ${shown(ratio)} times as fast as gathered`
          : `gathered is ${shown(1 / ratio)} times as fast as cut into rows`;
        const wide = settings.p > settings.n ? " (A weight with fewer rows than columns would be cut the other way.)" : "";
        return {
          picture: [table(["in a step each rank", "cut into rows, as under tensor parallelism", "gathered, as under FSDP2"], rows)],
          text: `A ${shown(settings.n)} × ${shown(settings.p)} weight on ${settings.ranks} ranks: ${cheaper}.${wide}`,
        };
      },
    },
  };

  /* The minima of the function that was asked for last: a tenth of a second's work, which
     a start that is dragged need not wait for. */
  const knownMinima = (() => {
    let [asked, found] = ["", []];
    return (how) => {
      const asking = JSON.stringify(how);
      if (asking !== asked) [asked, found] = [asking, minimaOffCircle(how)];
      return found;
    };
  })();

  /* What part of a timeline is shown, in its unit: its begin and its end. */
  function view({ end }, zoom, at) {
    const wide = end / zoom;
    const begin = Math.min(Math.max(0, (end * at) / 100 - wide / 2), end - wide);
    return [begin, begin + wide];
  }

  /* A message between two points, cut off at the sides; with a head, if there is room. */
  function arrow([x1, y1], [x2, y2], low, high, color, head) {
    const at = (x) => y1 + ((y2 - y1) * (x - x1)) / (x2 - x1 || 1);
    const cut = (x, y) => (x < low ? [low, at(low)] : x > high ? [high, at(high)] : [x, y]);
    const [[a, b], [c, d]] = [cut(x1, y1), cut(x2, y2)];
    const line = made("line", { x1: a, y1: b, x2: c, y2: d, stroke: color, class: "message" });
    if (!head || c !== x2) return [line];
    const angle = (180 / Math.PI) * Math.atan2(y2 - y1, x2 - x1);
    const place = `translate(${x2} ${y2}) rotate(${angle})`;
    return [line, made("path", { d: "M-6-3L0 0L-6 3z", transform: place, fill: color })];
  }

  /* A lane for each worker and a row in it for each method that it ran; a bar is work, in
     the colour of the caller, and thin lines are the call and its answer. */
  function lanes(data, low, high, { tell, wide }, isBusy = () => true) {
    const longest = Math.max(...data.calls.map((c) => c[2].length));
    const [W, right, row] = [wide, 10, 20];
    const left = Math.max(80, (W < 500 ? 6 : 7.4) * longest + 14);
    const px = (t) => left + ((t - low) / (high - low)) * (W - left - right);
    const clip = (t) => Math.min(W - right, Math.max(left, px(t)));
    const color = Object.fromEntries(data.workers);
    const keys = "left and right arrow keys go from call to call";
    const label = `The calls of the workers over time; the ${keys}`;
    const svg = made("svg", { role: "group", tabindex: 0, "aria-label": label, class: W < 500 ? "small" : "" });
    const visible = data.calls.filter((c) => c[6] >= low && c[3] <= high).length;
    // As in the still figure: more arrows would hide each other.
    const [few, arrows] = [visible <= 40, visible <= 60];
    const bars = [];
    const place = {};
    let y = 8;
    for (const [worker] of data.workers) {
      const own = data.calls.filter((c) => c[1] === worker).map((c) => c[2]);
      const methods = [...new Set(own)];
      const height = (methods.length + 1) * row;
      svg.append(made("rect", { x: 0, y, width: W, height, fill: color[worker], "fill-opacity": 0.1 }));
      svg.append(made("text", { x: 6, y: y + 14, class: "strong" }, worker));
      place[worker] = { top: y, bottom: y + height };
      methods.forEach((method, k) => {
        const top = y + (k + 1) * row;
        place[`${worker} ${method}`] = top;
        svg.append(made("text", { x: left - 6, y: top + 14, class: "end" }, method));
      });
      y += height + 10;
    }
    for (const at of ticks({ from: low, to: high })) {
      svg.append(made("line", { x1: px(at), x2: px(at), y1: 8, y2: y - 6, class: "grid" }));
      svg.append(made("text", { x: px(at), y: y + 10, class: "middle" }, shown(at)));
    }
    for (const call of data.calls) {
      const [caller, callee, method, sent, started, ended, received, bytes] = call;
      if (received < low || sent > high) continue;
      const top = place[`${callee} ${method}`];
      if (arrows && caller !== callee) {
        const down = place[callee].top > place[caller].top;
        const edge = down ? place[caller].bottom : place[caller].top;
        const near = top + (down ? 3 : row - 3); // the side of the bar that faces it
        for (const [from, to] of [[[sent, edge], [started, near]], [[ended, near], [received, edge]]]) {
          if (from[0] > high || to[0] < low) continue;
          svg.append(...arrow([px(from[0]), from[1]], [px(to[0]), to[1]], left, W - right, color[caller], few));
        }
      }
      if (ended < low || started > high) continue;
      const width = Math.max(1.5, clip(ended) - clip(started));
      const box = { x: clip(started), y: top + 3, width, height: row - 6, fill: color[caller] };
      const what = caller === callee ? `${callee}: ${method}` : `${caller} called ${method} on ${callee}`;
      const back = caller === callee ? "" : `; the answer was back after ${shown(received - sent)} ${data.unit}, with ${inBytes(bytes)} there and back`;
      const said = `${what}, which took ${shown(ended - started)} ${data.unit}${back}`;
      const bar = made("rect", { ...box, class: isBusy(call) ? "bar" : "bar later", role: "img", "aria-label": said });
      bar.addEventListener("pointerenter", () => tell(said));
      bars.push([bar, said, started]);
      svg.append(bar);
    }
    bars.sort((a, b) => a[2] - b[2]);
    let chosen = -1;
    svg.addEventListener("keydown", ({ key }) => {
      const by = { ArrowLeft: -1, ArrowRight: 1 }[key];
      if (!by || !bars.length) return;
      bars[chosen]?.[0].classList.remove("chosen");
      chosen = (chosen + by + bars.length) % bars.length;
      bars[chosen][0].classList.add("chosen");
      tell(bars[chosen][1]);
    });
    svg.append(made("text", { x: (W + left) / 2, y: y + 28, class: "middle" }, `time in ${data.unit}`));
    svg.setAttribute("viewBox", `0 0 ${W} ${y + 34}`);
    return svg;
  }

  const EXTENT = 1.8; // of the plane that is shown, in either direction
  const CELLS = 50; // in a row or column of the grid on which its function is computed

  /* Where the values of a grid are at least a level, as a path: in each cell a polygon,
     which is cut along a straight line where the level crosses the cell. */
  function areaAbove(level, grid, cell) {
    const parts = [];
    for (let j = 0; j < grid.length - 1; j++) {
      for (let i = 0; i < grid.length - 1; i++) {
        const corners = [[i, j], [i + 1, j], [i + 1, j + 1], [i, j + 1]];
        const above = corners.map(([a, b]) => grid[b][a] - level);
        const polygon = [];
        corners.forEach(([a, b], k) => {
          const next = (k + 1) % 4;
          const [here, there] = [above[k], above[next]];
          if (here >= 0) polygon.push([a, b]);
          if ((here >= 0) === (there >= 0)) return;
          const part = here / (here - there);
          polygon.push([a + part * (corners[next][0] - a), b + part * (corners[next][1] - b)]);
        });
        const points = polygon.map((point) => point.map((v) => (v * cell).toFixed(1)).join(" "));
        if (points.length) parts.push(`M${points.join("L")}Z`);
      }
    }
    return parts.join("");
  }

  /* The function's landscape in bands, the circle, minima off it, the star, and a path
     whose start can be dragged. */
  function landscape(how, path, minima, data) {
    const [size, extent] = [440, EXTENT];
    const svg = made("svg", { viewBox: `0 0 ${size} ${size}`, class: "square", role: "group", "aria-label": "The function in the plane, and the path of SGD" });
    const [to, from] = [(v) => ((v + extent) / (2 * extent)) * size, (p) => (p / size) * 2 * extent - extent];
    const at = ([a, b]) => [to(a).toFixed(1), to(-b).toFixed(1)];
    const cell = size / CELLS;
    const height = (i, j) => Math.log1p(Math.max(0, valueAt([from(i * cell), -from(j * cell)], how)));
    const grid = range(0, CELLS).map((j) => range(0, CELLS).map((i) => height(i, j)));
    for (const band of range(1, 8)) svg.append(made("path", { d: areaAbove(band / 3, grid, cell), class: "band" }));
    svg.append(made("circle", { cx: to(0), cy: to(0), r: to(1) - to(0), class: "curve ink" }));
    const drawn = path.filter((p) => Math.max(...p.map(Math.abs)) < 1e3); // cut at the edge
    svg.append(made("polyline", { points: drawn.map((p) => at(p).join(",")).join(" "), stroke: data.colors[1], class: "curve" }));
    for (const p of drawn.slice(1, 40)) svg.append(made("circle", { cx: at(p)[0], cy: at(p)[1], r: 2.5, fill: data.colors[1] }));
    for (const x of minima) {
      const cross = made("path", { d: `M-6-6L6 6M-6 6L6-6`, transform: `translate(${at(x)})`, stroke: data.colors[2], class: "curve" });
      cross.append(made("title", {}, `a minimum off the circle, at (${x.map(shown).join(", ")})`));
      svg.append(cross);
    }
    svg.append(made("text", { x: at([0.8, 0.6])[0], y: Number(at([0.8, 0.6])[1]) + 9, class: "middle star" }, "★"));
    const start = made("circle", { cx: at(path[0])[0], cy: at(path[0])[1], r: 10, fill: data.colors[1], class: "handle" });
    start.append(made("title", {}, "the start: drag it"));
    svg.append(start);
    return svg;
  }

  /* Let the start of the plane's path be dragged, by a mouse from anywhere, by a finger
     from its handle, or be put where one taps. */
  function holdStart(picture, move) {
    // The picture is drawn anew as its handle is dragged, so its frame has the pointer.
    let dragged = false;
    const drag = ({ clientX, clientY }) => {
      const box = picture.querySelector("svg.square").getBoundingClientRect();
      const at = (from, begin, size) => ((from - begin) / size) * 2 * EXTENT - EXTENT;
      move({ x: at(clientX, box.left, box.width), y: -at(clientY, box.top, box.height) });
    };
    picture.addEventListener("pointerdown", (event) => {
      // A finger elsewhere may want to scroll the page; a tap is a click.
      if (event.pointerType !== "mouse" && !event.target.closest(".handle")) return;
      dragged = true;
      picture.setPointerCapture(event.pointerId);
    });
    // Else the finger on the handle would scroll the page.
    const keep = (event) => { if (event.target.closest(".handle")) event.preventDefault(); };
    picture.addEventListener("touchstart", keep, { passive: false });
    picture.addEventListener("pointermove", (event) => { if (dragged) drag(event); });
    for (const kind of ["pointerup", "pointercancel"]) {
      picture.addEventListener(kind, () => { dragged = false; });
    }
    picture.addEventListener("click", (event) => {
      if (event.target.closest("svg.square")) drag(event);
    });
  }

  /* Put a figure in the place of its still picture. */
  function begin(figure) {
    const data = JSON.parse(figure.querySelector("script").textContent);
    const { controls, draw, hold } = figures[figure.dataset.turn];
    const picture = made("div", { class: "turn-picture" });
    const text = made("p", { class: "turn-text", role: "status" });
    const all = controls(data).map((each) => control(each, () => update()));
    const settings = () => Object.fromEntries(all.map(({ name, read }) => [name, read()]));
    const move = (to) => {
      for (const { name, set } of all) if (name in to) set(to[name]);
      update();
    };
    const tell = (said) => { text.textContent = said; };
    function update() {
      const drawn = draw(settings(), data, { tell, wide: Math.max(340, Math.min(640, figure.clientWidth)) });
      picture.replaceChildren(...drawn.picture);
      text.textContent = drawn.text;
    }
    hold?.(picture, move);
    const still = figure.querySelector(":scope > div");
    still.hidden = true;
    const nodes = all.map(({ node }) => node);
    still.after(picture, made("div", { class: "turn-controls" }, ...nodes), text);
    window.addEventListener("resize", update);
    update();
  }

  document.querySelectorAll("figure[data-turn]").forEach(begin);
  const models = { stepsPerSecond, bytesOfCuts, valueAt, gradientAt, descend, minimaOffCircle, moves, shardCosts };
  return { models };
})();
