// Code with line numbers, search and light colouring; long texts draw only the lines in sight.

const LINE = 18,
  ALL_LINES = 400;
const PYTHON =
  /(#.*)|("""[\s\S]*?"""|'(?:\\.|[^'\\\n])*'|"(?:\\.|[^"\\\n])*")|\b(\d[\w.]*)\b|\b(def|class|return|if|else|elif|for|while|in|is|not|and|or|import|from|as|with|None|True|False|del|try|except|finally|raise|lambda|global|yield|pass|assert|self|async|await)\b/g;
const CPP =
  /(\/\/.*|^\s*#.*)|("(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')|\b(\d[\w.]*)\b|\b(auto|bool|break|case|char|class|const|constexpr|continue|double|else|enum|extern|float|for|if|inline|int|int32_t|int64_t|long|namespace|return|short|signed|sizeof|static|static_cast|struct|switch|template|typename|unsigned|using|void|while)\b/g;
const CLASSES = [null, "t-c", "t-s", "t-n", "t-k"];

function colour(line, language) {
  if (line.length > 4000) return [line];
  const found = [];
  let at = 0;
  for (const m of line.matchAll(language === "cpp" ? CPP : PYTHON)) {
    const i = m.findIndex((g, n) => n > 0 && g !== undefined);
    if (m.index > at) found.push(line.slice(at, m.index));
    found.push(el("span", { class: CLASSES[i] }, m[0]));
    at = m.index + m[0].length;
  }
  if (at < line.length) found.push(line.slice(at));
  return found;
}

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
        .map((line, i) => codeLine(line, from + i, digits, options, from + i === state.hit)),
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

function codeLine(line, i, digits, options, isHit) {
  const number = String((options.first || 1) + i).padStart(digits);
  const more = options.classes?.(i) || "";
  return el(
    "div",
    { class: `line ${more}${isHit ? " hit" : ""}`, style: `top:${i * LINE}px` },
    el("span", { class: "no", "aria-hidden": "true" }, number),
    options.language === "plain" ? line : colour(line, options.language),
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
