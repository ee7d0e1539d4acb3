// Light colouring of Python and C++, line by line.

const PYTHON_WORDS =
  "def|class|return|if|else|elif|for|while|in|is|not|and|or|import|from|as|with|None|" +
  "True|False|del|try|except|finally|raise|lambda|global|yield|pass|assert|self|async|await";
const CPP_WORDS =
  "auto|bool|break|case|char|class|const|constexpr|continue|double|else|enum|extern|float|for|if|" +
  "inline|int|int32_t|int64_t|long|namespace|return|short|signed|sizeof|static|static_cast|" +
  "struct|switch|template|typename|unsigned|using|void|while";
const STRINGS = String.raw`"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'`;
const TRIPLES = String.raw`"""(?:.*?"""|.*$)|'''(?:.*?'''|.*$)`;
const NUMBER = String.raw`\b(\d[\w.]*)\b`;
// Groups: comment, string, number, word.
const PATTERNS = {
  python: new RegExp(`(#.*)|(${TRIPLES}|${STRINGS})|${NUMBER}|\\b(${PYTHON_WORDS})\\b`, "g"),
  cpp: new RegExp(`(//.*|^\\s*#.*)|(${STRINGS})|${NUMBER}|\\b(${CPP_WORDS})\\b`, "g"),
};
const CLASSES = [null, "t-c", "t-s", "t-n", "t-k"];
const LONGEST_COLOURED = 4000; // letters: longer lines are data

function colour(line, mode = "python") {
  if (typeof mode === "number") {
    return [html`<span class="t-s">${line.slice(0, mode)}</span>`, ...colour(line.slice(mode))];
  }
  if (mode === "string") return [html`<span class="t-s">${line}</span>`];
  if (mode === "plain" || line.length > LONGEST_COLOURED) return [line];
  const found = [];
  let at = 0;
  for (const m of line.matchAll(PATTERNS[mode])) {
    const i = m.findIndex((g, n) => n > 0 && g !== undefined);
    if (m.index > at) found.push(line.slice(at, m.index));
    found.push(html`<span class=${CLASSES[i]}>${m[0]}</span>`);
    at = m.index + m[0].length;
  }
  if (at < line.length) found.push(line.slice(at));
  return found;
}

// How to colour each line. In a text in triple quotes that goes over lines it is "string", or the
// language of the kernel that the text holds; where it ends, the number of letters to its end.
function colourModes(lines, language = "python") {
  if (language !== "python") return lines.map(() => language);
  let inside = null;
  return lines.map((line) => {
    if (inside) {
      const end = line.indexOf(inside.quote);
      if (end < 0) return inside.mode;
      inside = null;
      return end + 3;
    }
    const quote = openQuote(line);
    if (quote) inside = { quote, mode: quote === "'''" ? kernelMode(line) : "string" };
    return "python";
  });
}

function kernelMode(line) {
  if (/triton/.test(line)) return "python";
  return /async_compile|cpp/.test(line) ? "cpp" : "string";
}

// The triple quotes that a line opens and does not close, or null.
function openQuote(line) {
  if (/^\s*#/.test(line)) return null;
  let at = 0;
  for (;;) {
    const found = /"""|'''/.exec(line.slice(at));
    if (!found) return null;
    const end = line.indexOf(found[0], at + found.index + 3);
    if (end < 0) return found[0];
    at = end + 3;
  }
}
