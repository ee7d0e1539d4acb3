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
    data.functions.map((o) => ({ value: o.id, name: " ".repeat(o.depth * 2) + o.fn.name })),
    item.id,
    (value) => {
      location.hash = "fn/" + encodeURIComponent(value);
    },
  );
  const children = data.functions.filter((o) => o.parent === item);
  return [
    el("div", { class: "bar" }, pick),
    pairs([
      ["place", el("code", {}, `${f.file}:${f.line}`)],
      ["continues", item.parent && jump(fnHash(item.parent), item.parent.fn.name)],
      ["calls served by entries", f.num_hits],
      ["calls that compiled or found no entry", f.num_misses],
      ["runs eagerly", f.skipped],
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
                jump(fnHash(c), c.fn.name),
                ` line ${c.fn.line}, ${count(c.fn.entries.length, "entry", "entries")}`,
              ),
            ),
          ),
        )
      : null,
  ];
}

function entryTable(item) {
  const rows = entriesOf(item).map((e) => {
    const entry = e.entry,
      why = entry.recompiles.at(-1);
    return [
      jump(entryHash(e), e.name),
      String(entry.guards.length),
      String(entry.kernels.length),
      String(entry.num_hits),
      seconds(compileSeconds(entry)),
      entry.status,
      why
        ? el(
            "span",
            {},
            why.source ? `${why.source}: ` : "",
            why.expected ? `${why.expected}, got ${why.actual || "another"}` : why.text,
          )
        : "first entry",
    ];
  });
  if (!rows.length)
    return empty(
      item.fn.skipped
        ? "None: Dynamo runs this function eagerly."
        : "None: no call of it was compiled while watching.",
    );
  return table(
    [
      { name: "entry" },
      { name: "guards", class: "num" },
      { name: "kernels", class: "num" },
      { name: "calls", class: "num" },
      { name: "compile time", class: "num" },
      { name: "status" },
      { name: "why it was made" },
    ],
    rows,
  );
}

function breakList(item) {
  const own = data.breaks.filter((b) => b.owner === item);
  if (!own.length)
    return empty("None: each of its graphs reaches from the first line to the last.");
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
        entry ? [", in entry ", jump(entryHash(entry), entry.name)] : ", and no entry was made",
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
  if (!owner)
    return empty(`The text of the function was not recorded: ${item.fn.file} could not be read.`);
  const { file, line } = owner.fn,
    lines = owner.fn.source.replace(/\n$/, "").split("\n");
  const breaks = new Map(),
    guards = new Map();
  const near = (n) => n >= line && n < line + lines.length;
  for (const b of data.breaks) {
    const at = parsePlace(b.place);
    if (at && at.file === file && near(at.line))
      breaks.set(at.line, [...(breaks.get(at.line) || []), b.each]);
  }
  for (const e of entriesOf(item)) {
    for (const guard of e.entry.guards) {
      const at = parsePlace(guard.user_line);
      if (at && at.file === file && near(at.line))
        guards.set(at.line, (guards.get(at.line) || new Set()).add(guard.english));
    }
  }
  return [
    el(
      "p",
      { class: "told" },
      "Marks: ",
      el("span", { class: "tag bad" }, "break"),
      " a graph ends here, ",
      el("span", { class: "tag info" }, "guards"),
      " conditions that began here.",
    ),
    el(
      "div",
      { class: "scroll", tabindex: "0", role: "region", "aria-label": "source" },
      el(
        "table",
        { class: "source" },
        el(
          "tbody",
          {},
          lines.map((text, i) => sourceLine(text, line + i, breaks, guards, item)),
        ),
      ),
    ),
  ];
}

function sourceLine(text, n, breaks, guards, item) {
  const ends = breaks.get(n),
    born = guards.get(n);
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
    el("td", {}, el("pre", {}, colour(text, "python"))),
  );
}
