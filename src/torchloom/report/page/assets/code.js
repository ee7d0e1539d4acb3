// Code with line numbers and search; long texts draw only the lines in sight.

const LINE = 18,
  ALL_LINES = 400;
// options: language, first (number of the first line), classes (line index -> class), label
function codeView(text, options = {}) {
  const lines = (text || "").replace(/\n$/, "").split("\n");
  const digits = String((options.first || 1) + lines.length).length;
  const widest = lines.reduce((most, l) => Math.max(most, l.length), 0);
  const body = el("div", {
    class: "lines",
    style: `height:${lines.length * LINE}px;min-width:${widest + digits + 4}ch`,
  });
  const box = el(
    "div",
    {
      class: "code",
      tabindex: "0",
      role: "region",
      "aria-label": options.label || "code",
      style: `height:${Math.min(lines.length, 34) * LINE + 26}px`,
    },
    body,
  );
  const modes = colourModes(lines, options.language);
  const state = { hit: -1, drawn: "" };
  const draw = () => {
    const all = lines.length <= ALL_LINES;
    const from = all ? 0 : Math.max(0, Math.floor(box.scrollTop / LINE) - 20);
    const to = all
      ? lines.length
      : Math.min(lines.length, from + Math.ceil((box.clientHeight || 640) / LINE) + 40);
    const key = `${from} ${to} ${state.hit}`;
    if (key === state.drawn) return;
    state.drawn = key;
    body.replaceChildren(
      ...lines
        .slice(from, to)
        .map((line, i) => codeLine(line, modes[from + i], from + i, digits, options, state.hit)),
    );
  };
  box.addEventListener("scroll", draw, { passive: true });
  new ResizeObserver(draw).observe(box);
  draw();
  const show = (i) => {
    state.hit = i;
    box.scrollTop = Math.max(0, i * LINE - box.clientHeight / 3);
    draw();
  };
  return { box, show, lines };
}

function codeLine(line, mode, i, digits, options, hit) {
  const number = String((options.first || 1) + i).padStart(digits);
  const more = options.classes?.(i) || "";
  return el(
    "div",
    { class: `line ${more}${i === hit ? " hit" : ""}`, style: `top:${i * LINE}px` },
    el("span", { class: "no", "aria-hidden": "true" }, number),
    colour(line, mode),
  );
}

function code(text, options) {
  if (!text) return empty(options?.missing || "There is no text.");
  return codeView(text, options).box;
}

// A code view under a box that finds lines; Enter goes to the next one, Shift+Enter back.
function searchable(text, options = {}) {
  const view = codeView(text, options);
  const state = { hits: [], at: -1 };
  const told = el("span", { class: "told", role: "status" }, count(view.lines.length, "line"));
  const step = (by) => {
    if (!state.hits.length) return;
    state.at = (state.at + by + state.hits.length) % state.hits.length;
    view.show(state.hits[state.at]);
    told.textContent = `${state.at + 1} of ${count(state.hits.length, "line")}`;
  };
  const find = (word) => {
    const low = word.toLowerCase();
    state.at = -1;
    state.hits = [];
    if (low)
      view.lines.forEach((l, i) => {
        if (l.toLowerCase().includes(low)) state.hits.push(i);
      });
    told.textContent = low ? "no line" : count(view.lines.length, "line");
    if (!low) view.show(-1);
    step(1);
  };
  const input = el("input", {
    type: "search",
    placeholder: "Search",
    "aria-label": "Search the text",
    oninput: debounce(() => find(input.value), 120),
    onkeydown: (e) => {
      if (e.key === "Enter") {
        e.preventDefault();
        step(e.shiftKey ? -1 : 1);
      }
    },
  });
  const bar = el(
    "div",
    { class: "bar" },
    input,
    button("Previous line", "↑", () => step(-1)),
    button("Next line", "↓", () => step(1)),
    told,
    options.extra,
  );
  return { node: el("div", {}, bar, view.box), show: view.show };
}
