"use strict";
// Text comes from models and documents: it is put into the page by textContent alone.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const passes = data.passes;
  const byId = (name) => document.getElementById(name);
  const number = new Intl.NumberFormat("en");
  const MAX_DOCUMENTS = 4; // of a pass; those of each token are told with it
  const MAX_LEVEL = 8; // of indentation in a tree, so that deep ones fit a narrow screen

  function make(tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  }

  const counted = (count, noun, nouns = `${noun}s`) => `${number.format(count)} ${count === 1 ? noun : nouns}`;
  const share = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(0)}%` : "–");
  const sourceClass = (source) => `source-${data.sources[source].css}`;
  const visible = (text) =>
    text === "" ? "∅" : text.replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/^ | $/g, "␣");
  const acceptedOf = (pass) => Math.min(pass.path.length, pass.pieces.length);

  // Sums over all passes, by source.
  const totals = data.sources.map(() => ({ drafted: 0, verified: 0, accepted: 0 }));
  let numTokens = 0;
  let vainPasses = 0;
  let numKept = 0;
  let numAccepted = 0;
  for (const pass of passes) {
    numTokens += pass.pieces.length;
    numKept += pass.kept;
    numAccepted += pass.path.length;
    if (pass.kept && !pass.path.length) vainPasses += 1;
    pass.sources.forEach((source, node) => {
      totals[source].drafted += 1;
      if (node < pass.kept) totals[source].verified += 1;
    });
    for (const node of pass.path) totals[pass.sources[node]].accepted += 1;
  }

  function drawHead() {
    byId("title").textContent = data.title;
    document.title = `${data.title} – foredraft trace`;
    if (data.note) {
      byId("note").textContent = data.note;
      byId("note").hidden = false;
    }
    const figures = [
      ["tokens", number.format(numTokens), counted(data.prompts.length, "prompt")],
      ["passes", number.format(passes.length), "of the model"],
      ["tokens per pass", (numTokens / passes.length).toFixed(2), "1 without drafts"],
      ["from drafts", share(numAccepted, numTokens), counted(numAccepted, "token")],
      ["verified in vain", number.format(numKept - numAccepted), `of ${number.format(numKept)} verified`],
    ];
    for (const [name, value, more] of figures) {
      const small = make("small");
      small.textContent = more;
      const term = make("dt");
      term.textContent = name;
      const amount = make("dd");
      amount.append(value, small);
      byId("figures").append(make("div", {}, term, amount));
    }
    data.sources.forEach((source, at) => {
      if (totals[at].drafted) byId("legend").append(legendItem(sourceClass(at), source.name));
    });
    byId("legend").append(legendItem("", "the model’s own token"));
  }

  function legendItem(css, name) {
    return make("li", {}, make("span", { class: `swatch ${css}` }), name);
  }

  function drawVain() {
    const inVain = numKept - numAccepted;
    byId("vain-summary").textContent =
      `${counted(inVain, "node")} of ${number.format(numKept)} verified ${inVain === 1 ? "was" : "were"} not accepted` +
      (vainPasses ? `; ${counted(vainPasses, "pass", "passes")} accepted none.` : ".");
    const rows = byId("vain").tBodies[0];
    totals.forEach((sum, at) => {
      if (!sum.drafted) return;
      const name = make("td", {}, make("span", { class: `swatch ${sourceClass(at)}` }), data.sources[at].name);
      const cells = [sum.drafted, sum.verified, sum.accepted, sum.verified - sum.accepted];
      const row = make("tr", {}, name, ...cells.map((value) => make("td", {}, number.format(value))));
      row.append(make("td", {}, share(sum.accepted, sum.verified)));
      [...row.cells].forEach((cell, column) => {
        cell.dataset.title = byId("vain").tHead.rows[0].cells[column].textContent;
      });
      rows.append(row);
    });
  }

  // The text: one option for each pass, in a listbox for each prompt.
  const options = [];

  function drawText() {
    const whole = document.createDocumentFragment();
    let output = null;
    passes.forEach((pass, at) => {
      if (at === 0 || pass.prompt !== passes[at - 1].prompt) output = addPrompt(whole, pass.prompt);
      options.push(output.appendChild(optionOf(pass, at)));
    });
    byId("text").append(whole);
  }

  function addPrompt(whole, at) {
    const prompt = data.prompts[at];
    const section = make("section", {}, make("h2", {}, data.prompts.length > 1 ? `Prompt ${prompt.number}` : "Output"));
    if (prompt.text) {
      const asked = make("div", { class: "asked", tabindex: "0", role: "group", "aria-label": "Prompt" });
      asked.textContent = prompt.text;
      section.append(make("details", {}, make("summary", {}, "what was asked"), asked));
    }
    const output = make("div", { class: "output", role: "listbox", "aria-label": `Passes of prompt ${prompt.number}` });
    section.append(output);
    whole.append(section);
    return output;
  }

  function optionOf(pass, at) {
    const option = make("span", { class: "pass", role: "option", tabindex: "-1", "aria-selected": "false" });
    const accepted = acceptedOf(pass);
    option.dataset.pass = at;
    if (accepted) option.dataset.width = pass.pieces.length;
    pass.pieces.forEach((piece, place) => {
      const text = data.texts[piece];
      const token = document.createElement("span");
      token.className =
        "token " +
        (place < accepted ? `drafted ${sourceClass(pass.sources[pass.path[place]])}` : "own") +
        (place === 0 ? " first" : "") +
        (text.startsWith("\n") ? " breaks" : "") +
        (text === "" ? " hidden" : "");
      token.textContent = text;
      option.append(token);
    });
    return option;
  }

  // The timeline: passes, or means of several where there are more than fit.
  const timeline = byId("timeline");
  const SVG = "http://www.w3.org/2000/svg";

  function drawTimeline() {
    const numBars = Math.max(1, Math.min(passes.length, Math.floor(timeline.clientWidth / 3)));
    const layers = [{ css: "own" }, ...data.sources.map((_, at) => ({ css: `area ${sourceClass(at)}` }))];
    const bars = [];
    for (let bar = 0; bar < numBars; bar += 1) {
      const begin = Math.floor((bar * passes.length) / numBars);
      const end = Math.floor(((bar + 1) * passes.length) / numBars);
      const heights = new Array(layers.length).fill(0);
      for (const pass of passes.slice(begin, end)) {
        const accepted = acceptedOf(pass);
        heights[0] += (pass.pieces.length - accepted) / (end - begin);
        for (let place = 0; place < accepted; place += 1)
          heights[1 + pass.sources[pass.path[place]]] += 1 / (end - begin);
      }
      bars.push(heights);
    }
    const sums = bars.map((heights) => heights.reduce((sum, height) => sum + height, 0));
    const top = sums.reduce((most, sum) => Math.max(most, sum), 1);
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("viewBox", "0 0 1000 100");
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("aria-hidden", "true");
    const width = 1000 / numBars;
    const gap = width > 12 ? 2 : 0;
    layers.forEach((layer, at) => {
      let outline = "";
      bars.forEach((heights, bar) => {
        if (!heights[at]) return;
        const below = heights.slice(0, at).reduce((sum, height) => sum + height, 0);
        const y = 100 - (95 * (below + heights[at])) / top;
        outline += `M${(bar * width).toFixed(2)} ${y.toFixed(2)}h${(width - gap).toFixed(2)}v${((95 * heights[at]) / top).toFixed(2)}h${(gap - width).toFixed(2)}z`;
      });
      if (!outline) return;
      const path = document.createElementNS(SVG, "path");
      path.setAttribute("class", layer.css);
      path.setAttribute("d", outline);
      svg.append(path);
    });
    const marker = document.createElementNS(SVG, "rect");
    marker.setAttribute("class", "marker");
    marker.setAttribute("y", "0");
    marker.setAttribute("height", "100");
    svg.append(marker);
    timeline.replaceChildren(svg);
    byId("timeline-first").textContent = "pass 1";
    byId("timeline-last").textContent = passes.length > 1 ? `pass ${number.format(passes.length)}` : "";
    byId("timeline-most").textContent =
      numBars < passes.length ? `highest: ${top.toFixed(1)}, means of ${Math.ceil(passes.length / numBars)} passes` : `highest: ${top}`;
    mark();
  }

  function mark() {
    const marker = timeline.querySelector(".marker");
    if (!marker) return;
    const width = Math.max(1000 / passes.length, 4);
    const x = Math.min((1000 * selected) / passes.length, 1000 - width);
    marker.setAttribute("x", x.toFixed(2));
    marker.setAttribute("width", width.toFixed(2));
    timeline.setAttribute("aria-valuenow", selected + 1);
    timeline.setAttribute("aria-valuetext", `pass ${selected + 1}: ${counted(passes[selected].pieces.length, "token")}`);
  }

  // The selected pass and its tree.
  let selected = 0;
  let chips = [];
  let chosen = -1;
  let relatives = null;

  function select(at, { focus = false, scroll = false, open = false } = {}) {
    options[selected].setAttribute("aria-selected", "false");
    options[selected].tabIndex = -1;
    selected = at;
    options[at].setAttribute("aria-selected", "true");
    options[at].tabIndex = 0;
    if (focus) options[at].focus({ preventScroll: true });
    if (open) byId("panel").classList.add("open");
    // Where the panel covers the lower part of the window, the pass goes to the upper one.
    const isCovered = getComputedStyle(byId("panel")).position === "fixed" && byId("panel").matches(".open");
    if (focus || scroll) options[at].scrollIntoView({ block: isCovered ? "start" : "nearest" });
    mark();
    drawPass(passes[at]);
  }

  function drawPass(pass) {
    const several = data.prompts.length > 1 ? ` of prompt ${data.prompts[pass.prompt].number}` : "";
    byId("pass-heading").textContent = `Pass ${pass.step}${several}`;
    const tokens = counted(pass.pieces.length, "token");
    byId("pass-summary").textContent = pass.kept
      ? `${tokens}: ${pass.path.length} of ${pass.kept} verified nodes accepted; ${counted(pass.sources.length, "node")} drafted.`
      : `${tokens}; ${pass.step === 1 ? "this pass read the prompt" : "nothing was verified"}.`;
    const [draft, target, host] = pass.times.map((us) => (us / 1000).toFixed(us < 10000 ? 2 : 0));
    byId("pass-times").textContent = `drafter ${draft} ms, model ${target} ms, loop ${host} ms`;
    drawTree(pass);
    drawDocuments(pass);
  }

  function drawTree(pass) {
    const children = pass.sources.map(() => []);
    const roots = [];
    pass.parents.forEach((parent, node) => (parent < 0 ? roots : children[parent]).push(node));
    relatives = { children, roots };
    chips = new Array(pass.sources.length);
    const onPath = new Set(pass.path);
    const rows = document.createDocumentFragment();
    const waiting = roots.map((node, place) => [node, 1, 0, place + 1, roots.length]).reverse();
    while (waiting.length) {
      let [node, level, branchings, place, size] = waiting.pop();
      const row = make("div", { class: "row", role: "none" });
      row.style.marginLeft = `${12 * Math.min(branchings, MAX_LEVEL)}px`;
      for (;;) {
        row.append(chipOf(pass, node, onPath.has(node), level, place, size));
        if (children[node].length !== 1) break;
        [node, level, place, size] = [children[node][0], level + 1, 1, 1];
      }
      const next = children[node];
      for (let at = next.length - 1; at >= 0; at -= 1)
        waiting.push([next[at], level + 1, branchings + 1, at + 1, next.length]);
      rows.append(row);
    }
    byId("tree").replaceChildren(rows);
    byId("tree").hidden = !pass.sources.length;
    chosen = -1;
    if (pass.sources.length) choose(pass, pass.path.length ? pass.path[pass.path.length - 1] : 0);
    else byId("node").replaceChildren();
  }

  function fateOf(pass, node, isAccepted) {
    if (isAccepted) return "accepted";
    return node < pass.kept ? "verified in vain" : "not verified";
  }

  function chipOf(pass, node, isAccepted, level, place, size) {
    const fate = fateOf(pass, node, isAccepted);
    const text = visible(data.texts[pass.texts[node]]);
    const source = data.sources[pass.sources[node]].name;
    const chip = make("span", {
      class: `chip ${sourceClass(pass.sources[node])} ${isAccepted ? "accepted" : ""} ${node < pass.kept ? "" : "unverified"}`,
      role: "treeitem",
      tabindex: "-1",
      "aria-level": level,
      "aria-posinset": place,
      "aria-setsize": size,
      "aria-selected": "false",
      "aria-label": `${text}, probability ${probability(pass, node)}, ${source}, ${fate}`,
    });
    chip.dataset.node = node;
    const token = make("b");
    token.textContent = text;
    chip.append(token, make("small", {}, `${isAccepted ? "✓ " : ""}${probability(pass, node)}`));
    chips[node] = chip;
    return chip;
  }

  const probability = (pass, node) => (pass.probabilities[node] / 10000).toFixed(2);

  function choose(pass, node, focus = false) {
    if (chosen >= 0) {
      chips[chosen].setAttribute("aria-selected", "false");
      chips[chosen].tabIndex = -1;
    }
    chosen = node;
    chips[node].setAttribute("aria-selected", "true");
    chips[node].tabIndex = 0;
    if (focus) chips[node].focus();
    drawNode(pass, node);
  }

  function drawNode(pass, node) {
    const fate = fateOf(pass, node, pass.path.includes(node));
    const head = make("p", {}, make("span", { class: `swatch ${sourceClass(pass.sources[node])}` }));
    const text = make("b");
    text.textContent = visible(data.texts[pass.texts[node]]);
    head.append(text, ` token ${pass.ids[node]}, ${fate}; probability ${(pass.probabilities[node] / 10000).toFixed(4)} with its ancestors, from ${data.sources[pass.sources[node]].name}`);
    const found = pass.evidence.find((each) => each[0] === node);
    byId("node").replaceChildren(head);
    if (!found) return;
    const [, match, count, places] = found;
    byId("node").append(
      make("p", { class: "soft" }, `${number.format(count)} × in the index behind ${counted(match, "equal token")}${places.length < count ? ", among others" : ""}:`),
      placesOf(places.map(([document, position]) => [document, `token ${number.format(position)}`])),
    );
  }

  function placesOf(places) {
    const list = make("ul", { class: "places" });
    for (const [document, where] of places) {
      const [index, name, licence] = data.documents[document];
      const title = make("bdi");
      title.textContent = name;
      const more = make("span", { class: "soft" });
      more.textContent = ` ${licence || "licence unknown"}, ${where}, index ${index}`;
      list.append(make("li", {}, title, more));
    }
    return list;
  }

  function drawDocuments(pass) {
    const byDocument = new Map();
    for (const [node, , , places] of pass.evidence) {
      if (!pass.path.includes(node)) continue;
      for (const [document] of places) byDocument.set(document, (byDocument.get(document) || 0) + 1);
    }
    byId("documents").replaceChildren();
    if (!byDocument.size) return;
    const most = [...byDocument].sort((one, other) => other[1] - one[1]).slice(0, MAX_DOCUMENTS);
    const places = most.map(([document, count]) => [document, `${counted(count, "token")} of the path`]);
    byId("documents").append(make("h3", {}, "Documents of the accepted path"), placesOf(places));
  }

  // Mouse and keyboard.
  byId("text").addEventListener("click", (event) => {
    const option = event.target.closest(".pass");
    if (option) select(Number(option.dataset.pass), { focus: true, open: true });
  });

  byId("text").addEventListener("keydown", (event) => {
    if (!event.target.closest(".pass")) return;
    const steps = {
      ArrowLeft: () => Math.max(0, selected - 1),
      ArrowRight: () => Math.min(passes.length - 1, selected + 1),
      ArrowUp: () => beside(-1),
      ArrowDown: () => beside(1),
      Home: () => 0,
      End: () => passes.length - 1,
    };
    if (event.key === "Enter" || event.key === " ") {
      select(selected, { scroll: true, open: true });
      if (chosen >= 0) chips[chosen].focus();
      else byId("panel").focus();
    } else if (event.key === "Escape") {
      byId("panel").classList.remove("open");
    } else if (event.key in steps) {
      select(steps[event.key](), { focus: true });
    } else return;
    event.preventDefault();
  });

  // The pass nearest to the selected one on the line above (-1) or below (1).
  function beside(direction) {
    const from = options[selected].getClientRects()[0];
    let best = selected;
    let line = null;
    for (let at = selected + direction; at >= 0 && at < options.length; at += direction) {
      const box = options[at].getClientRects()[0];
      if (!box || Math.abs(box.top - from.top) < 4) continue;
      if (line !== null && Math.abs(box.top - line) > 4) break;
      if (line === null || Math.abs(box.left - from.left) < Math.abs(options[best].getClientRects()[0].left - from.left)) best = at;
      line = box.top;
    }
    return best;
  }

  byId("tree").addEventListener("click", (event) => {
    const chip = event.target.closest(".chip");
    if (chip) choose(passes[selected], Number(chip.dataset.node), true);
  });

  byId("tree").addEventListener("keydown", (event) => {
    if (chosen < 0) return;
    const pass = passes[selected];
    const parent = pass.parents[chosen];
    const siblings = parent < 0 ? relatives.roots : relatives.children[parent];
    const place = siblings.indexOf(chosen);
    const steps = {
      ArrowLeft: () => (parent < 0 ? chosen : parent),
      ArrowRight: () => relatives.children[chosen][0] ?? chosen,
      ArrowUp: () => siblings[Math.max(0, place - 1)],
      ArrowDown: () => siblings[Math.min(siblings.length - 1, place + 1)],
      Home: () => relatives.roots[0],
      End: () => (pass.path.length ? pass.path[pass.path.length - 1] : chosen),
    };
    if (!(event.key in steps)) return;
    choose(pass, steps[event.key](), true);
    event.preventDefault();
  });

  function leave() {
    byId("panel").classList.remove("open");
    options[selected].focus({ preventScroll: true });
  }

  byId("panel").addEventListener("keydown", (event) => {
    if (event.key === "Escape") leave();
  });
  byId("close").addEventListener("click", leave);

  timeline.addEventListener("pointerdown", (event) => {
    const box = timeline.getBoundingClientRect();
    const at = Math.floor(((event.clientX - box.left) / box.width) * passes.length);
    select(Math.max(0, Math.min(passes.length - 1, at)), { scroll: true, open: true });
  });

  timeline.addEventListener("keydown", (event) => {
    const page = Math.max(1, Math.round(passes.length / 10));
    const steps = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageDown: -page, PageUp: page, Home: -passes.length, End: passes.length };
    if (!(event.key in steps)) return;
    select(Math.max(0, Math.min(passes.length - 1, selected + steps[event.key])));
    event.preventDefault();
  });

  drawHead();
  drawVain();
  drawText();
  drawTimeline();
  const longest = passes.reduce((best, pass, at) => (pass.path.length > passes[best].path.length ? at : best), 0);
  const named = Number(location.hash.slice(1)); // page.html#12 opens pass 12
  select(Number.isInteger(named) && passes[named - 1] ? named - 1 : longest);
  new ResizeObserver(drawTimeline).observe(timeline);
  document.documentElement.dataset.ready = "true";
})();
