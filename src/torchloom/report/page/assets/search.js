// Search over the whole record: functions with their entries, graphs and code, events.

const FOUND_SHOWN = 30;

function searchView(word = "") {
  const wanted = word.trim().toLowerCase();
  if (!wanted) return empty("Type into the box above: names, lines, operators, parameters, events.");
  const parts = [
    ["Functions and entries", [{ name: "where" }, { name: "what" }], foundEntries(wanted)],
    ["Graphs and code", [{ name: "where" }, { name: "line" }], foundTexts(wanted)],
    ["Events", WHEN_COLUMNS, foundEvents(wanted)],
  ];
  const all = parts.filter(([, , rows]) => rows.length);
  if (!all.length) return empty("Nothing in this record holds these words.");
  return all.map(([title, columns, rows]) =>
    section(
      `${title}: ${rows.length}`,
      table(columns, rows.slice(0, FOUND_SHOWN)),
      rows.length > FOUND_SHOWN &&
        el("p", { class: "told" }, `and ${rows.length - FOUND_SHOWN} more`),
    ),
  );
}

const holds = (word, ...texts) => texts.some((text) => (text || "").toLowerCase().includes(word));

function foundEntries(word) {
  const functions = data.functions
    .filter((item) => holds(word, item.fn.name, item.fn.qualname, item.fn.file))
    .map((item) => [jump(fnHash(item), nameOf(item.fn)), sourcePlace(item.fn)]);
  const breaks = data.breaks
    .filter((b) => holds(word, b.each.reason, b.each.explanation, b.place))
    .map((b) => [jump(fnHash(b.owner), nameOf(b.owner.fn)), `${b.each.reason} at ${short(b.place)}`]);
  const entries = data.entries.flatMap((e) => {
    const name = jump(entryHash(e), `${e.name} ${nameOf(e.owner.fn)}`);
    const why = e.entry.recompiles.find((r) => holds(word, r.source, r.text, r.fix));
    const guards = e.entry.guards.filter((g) => holds(word, g.english, g.text, g.user_line));
    const kernels = e.entry.kernels.filter((k) => holds(word, k.name));
    return [
      holds(word, e.name, e.entry.backend, e.entry.status) && [name, e.entry.backend],
      why && [jump(entryHash(e, "recompile"), name.textContent), `recompile: ${why.text}`],
      guards.length && [
        jump(entryHash(e, "guards"), name.textContent),
        `${count(guards.length, "guard")}, first: ${guards[0].english}`,
      ],
      kernels.length && [
        jump(entryHash(e, "kernels"), name.textContent),
        kernels.map((k) => k.name).join(", "),
      ],
    ].filter(Boolean);
  });
  return [...functions, ...breaks, ...entries];
}

// Of each text the first line that holds the words, and how many others do.
function foundTexts(word) {
  return data.entries.flatMap((e) =>
    e.entry.artifacts.flatMap((a) => {
      if (!holds(word, a.text)) return [];
      const lines = a.text.split("\n").filter((line) => holds(word, line));
      const part = /^(output_code|runnable)$/.test(a.kind) ? "code" : "graphs";
      const more = lines.length > 1 ? ` (and ${count(lines.length - 1, "other line")})` : "";
      return [
        [
          jump(entryHash(e, part), `${e.name} ${a.title || a.kind}`),
          [el("code", { class: "wrap" }, lines[0].trim().slice(0, 240)), more],
        ],
      ];
    }),
  );
}

function foundEvents(word) {
  const found = data.record.events.filter((e) => eventHas(e, word));
  return eventRows(found, eventTimes());
}

// The box in the header: the view follows what is typed; "/" goes there, Escape leaves.
function startSearch() {
  const box = document.getElementById("search");
  const go = (hash) => {
    history.replaceState(null, "", "#" + hash);
    route();
  };
  const search = debounce(() => {
    const word = box.value.trim();
    go(word ? "search/" + encodeURIComponent(word) : "overview");
  }, 120);
  box.addEventListener("input", search);
  addEventListener("keydown", (event) => {
    const isTyping = event.target.closest?.("input, select, textarea");
    if (event.key === "/" && !isTyping && !event.ctrlKey && !event.metaKey && !event.altKey) {
      event.preventDefault();
      box.focus();
      box.select();
    }
  });
  box.addEventListener("keydown", (event) => event.key === "Escape" && box.blur());
}
