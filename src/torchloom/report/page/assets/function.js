// A function: its text with marks where graphs end and guards are born, its entries, its breaks.

function functionView(id) {
  if (!data.functions.length) return empty("No function was compiled while watching.");
  const item =
    data.functions.find((f) => f.id === id) ||
    data.functions.find((f) => f.fn.name === id) ||
    data.functions[0];
  const f = item.fn;
  const pick = choice(
    "Function",
    data.functions.map((o) => ({ value: o.id, name: "\u00a0".repeat(o.depth * 2) + nameOf(o.fn) })),
    item.id,
    (value) => {
      location.hash = "fn/" + encodeURIComponent(value);
    },
  );
  const children = data.functions.filter((o) => o.parent === item);
  return [
    el("div", { class: "bar" }, pick),
    limitBanner(item),
    pairs([
      ["place", f.file ? el("code", {}, `${f.file}:${f.line}`) : null],
      ["qualified name", f.qualname && f.qualname !== f.name ? el("code", {}, f.qualname) : null],
      ["name of its code", nameOf(f) !== f.name ? el("code", {}, f.name) : null],
      ["continues", item.parent && jump(fnHash(item.parent), nameOf(item.parent.fn))],
      ["calls served by entries", f.num_hits],
      ["calls that fitted no entry at first", f.num_misses],
      ["calls that ran eagerly", f.num_eager_calls || null],
      ["runs eagerly", limitText(f) ? null : f.skipped],
      ["reset", f.epoch ? `after ${count(f.epoch, "reset")}` : ""],
    ]),
    section("Entries", entryTable(item)),
    section("Graph breaks", breakList(item)),
    section("Source", sourceView(item)),
    children.length
      ? section(
          "Continued after a break in",
          el(
            "ul",
            {},
            children.map((c) =>
              el(
                "li",
                {},
                jump(fnHash(c), nameOf(c.fn)),
                ` line ${c.fn.line}, ${count(c.fn.entries.length, "entry", "entries")}`,
              ),
            ),
          ),
        )
      : null,
  ];
}

function entryTable(item) {
  const rows = entriesOf(item).map((e) => [
    jump(entryHash(e), e.name),
    String(e.entry.guards.length),
    String(e.entry.kernels.length),
    callsOf(e.entry),
    seconds(compileSeconds(e.entry)),
    e.entry.status,
    whyMade(e),
  ]);
  if (!rows.length) {
    return empty(
      item.fn.skipped
        ? "None: Dynamo runs this function eagerly."
        : "None: no call of it was compiled while watching.",
    );
  }
  const numbers = ["guards", "kernels", "calls", "compile time"];
  return table(
    [
      { name: "entry" },
      ...numbers.map((name) => ({ name, class: "num" })),
      { name: "status" },
      { name: "why it was made" },
    ],
    rows,
  );
}

function breakList(item) {
  const own = data.breaks.filter((b) => b.owner === item);
  if (!own.length) return empty("None: every graph of it reaches the end.");
  return own.map(({ each, count: times, place, item: entry }) =>
    el(
      "article",
      { class: "break" },
      el("h3", {}, each.reason, " ", el("span", { class: "faint" }, each.gb_type)),
      el(
        "p",
        {},
        "At ",
        el("code", {}, short(place)),
        times > 1 ? `, met ${times} times` : "",
        entry
          ? [", first in entry ", jump(entryHash(entry), entry.name)]
          : ", and no entry was made",
      ),
      each.explanation ? el("p", {}, prose(each.explanation)) : null,
      each.hints.length
        ? el(
            "ul",
            {},
            each.hints.map((h) => el("li", {}, prose(h))),
          )
        : null,
      each.user_stack.length
        ? el(
            "details",
            {},
            el("summary", {}, "Stack, innermost last"),
            el("pre", { class: "text" }, each.user_stack.join("\n")),
          )
        : null,
      each.doc_url ? el("p", {}, "More: ", link(each.doc_url)) : null,
    ),
  );
}

// The rest of a function has no text of its own: it lies in that of the function it continues.
function sourceOwner(item) {
  for (let each = item; each; each = each.parent) {
    if (each.fn.source && each.fn.file === item.fn.file) return each;
  }
  return null;
}

function sourceView(item) {
  const owner = sourceOwner(item);
  if (!owner) {
    return empty(
      item.fn.file
        ? `The text of the function was not recorded: ${item.fn.file} could not be read.`
        : "It has no text: the graph was captured to be served.",
    );
  }
  const lines = dedent(owner.fn.source.trimEnd().split("\n"));
  const marks = sourceMarks(item, owner.fn, lines.length);
  const modes = colourModes(lines);
  const rows = lines.map((text, i) => sourceLine(text, modes[i], owner.fn.line + i, marks, item));
  const key = [
    marks.breaks.size ? [el("span", { class: "tag bad" }, "break"), " a graph ends here. "] : null,
    marks.guards.size
      ? [el("span", { class: "tag info" }, "guards"), " conditions that began here."]
      : null,
  ];
  return [
    el("p", { class: "told" }, key),
    el(
      "div",
      { class: "scroll", tabindex: "0", role: "region", "aria-label": "source" },
      el("table", { class: "source" }, el("tbody", {}, rows)),
    ),
  ];
}

function dedent(lines) {
  const widths = lines.filter((l) => l.trim()).map((l) => /^\s*/.exec(l)[0].length);
  const common = Math.min(...widths);
  return lines.map((l) => l.slice(common));
}

// By line: the breaks that lie in the text of a function, and the guards of its entries.
function sourceMarks(item, { file, line }, numLines) {
  const breaks = new Map();
  const guards = new Map();
  const lineOf = (place) => {
    const at = parsePlace(place);
    const isNear = at && at.file === file && at.line >= line && at.line < line + numLines;
    return isNear ? at.line : null;
  };
  for (const b of data.breaks) {
    const n = lineOf(b.place);
    if (n !== null) breaks.set(n, [...(breaks.get(n) || []), b.each]);
  }
  for (const guard of entriesOf(item).flatMap((e) => e.entry.guards)) {
    const n = lineOf(guard.user_line);
    if (n !== null) guards.set(n, (guards.get(n) || new Set()).add(guard.english));
  }
  return { breaks, guards };
}

function sourceLine(text, mode, n, marks, item) {
  const ends = marks.breaks.get(n);
  const born = marks.guards.get(n);
  return el(
    "tr",
    { class: ends ? "cut" : n === item.fn.line ? "start" : null },
    el("td", { class: "no" }, n),
    el(
      "td",
      { class: "marks" },
      ends &&
        el("span", { class: "tag bad", title: ends.map((b) => b.reason).join("\n") }, "break"),
      born &&
        el("span", { class: "tag info", title: [...born].join("\n") }, count(born.size, "guard")),
    ),
    el("td", {}, el("pre", {}, colour(text, mode))),
  );
}
