// One compiled version of a function, under tabs of its own.

const ENTRY_TABS = [
  ["guards", "Guards"],
  ["graphs", "Graphs"],
  ["passes", "Passes"],
  ["kernels", "Kernels"],
  ["code", "Generated code"],
  ["bytecode", "Bytecode"],
  ["recompile", "Recompile"],
  ["time", "Time"],
];

function entryView(id, sub) {
  if (!data.entries.length)
    return empty("Nothing was compiled while watching, so there is no entry.");
  const item = data.entries.find((e) => e.id === id) || data.entries[0];
  const current = ENTRY_TABS.some(([k]) => k === sub) ? sub : "guards";
  const pick = choice(
    "Entry",
    data.entries.map((e) => ({ value: e.id, name: `${e.name}  ${e.owner.fn.name}` })),
    item.id,
    (value) => {
      location.hash = entryHash(
        data.entries.find((e) => e.id === value),
        current,
      );
    },
  );
  const list = tabs(
    el("div", { class: "tabs sub", role: "tablist", "aria-label": "Parts of the entry" }),
    ENTRY_TABS,
    current,
    (key) => {
      history.pushState(null, "", "#" + entryHash(item, key));
      show(key);
    },
  );
  const panel = el("div", { role: "tabpanel" });
  const show = (key) => {
    markTab(list, key);
    panel.setAttribute("aria-labelledby", "sub-" + key);
    panel.replaceChildren(...[PARTS[key](item)].flat(Infinity).filter(Boolean));
  };
  show(current);
  return [el("div", { class: "bar" }, pick), entryHead(item), list, panel];
}

function entryHead(item) {
  const e = item.entry;
  const trigger = Object.entries(e.trigger)
    .map(([k, v]) => `${k}: ${v}`)
    .join("\n");
  const facts = pairs([
    ["function", jump(fnHash(item.owner), item.owner.fn.name)],
    [
      "backend",
      e.backend.length > 90
        ? el(
            "details",
            {},
            el("summary", {}, e.backend.split("(")[0]),
            el("code", { class: "wrap" }, e.backend),
          )
        : e.backend,
    ],
    ["status", e.status === "live" ? "live" : el("span", { class: "tag warn" }, e.status)],
    ["calls served", e.num_hits],
    ["compile time", seconds(compileSeconds(e))],
    ["attempts", e.attempts > 1 ? e.attempts : null],
    ["made by", trigger && el("pre", { class: "text" }, trigger)],
  ]);
  facts.classList.add("facts");
  return facts;
}

const PARTS = {
  guards: guardsView,
  graphs: graphsView,
  passes: passesView,
  kernels: kernelsView,
  code: (item) =>
    texts(
      item,
      ["output_code", "runnable"],
      "No generated code was recorded: the backend wrote none, or the entry came from a cache.",
    ),
  bytecode: bytecodeView,
  recompile: recompileView,
  time: timeView,
};

function graphTexts(item) {
  const e = item.entry;
  const stages = e.artifacts
    .filter((a) => GRAPH_KINDS.includes(a.kind))
    .map((a, i) => ({
      value: "a" + i,
      name: a.title || a.kind,
      text: a.text,
      cut: a.is_cut,
      size: a.num_bytes,
    }));
  const passes = e.passes
    .filter((p) => p.after)
    .map((p, i) => ({ value: "p" + i, name: `${p.graph} after ${p.name}`, text: p.after }));
  return { stages, passes, all: [...stages, ...passes] };
}

function graphsView(item) {
  const { stages, passes, all } = graphTexts(item);
  if (!all.length)
    return empty(
      "No graph was recorded for this entry: it may have come from a cache, or watching began after it was compiled.",
    );
  const state = {
    graph: all.find((g) => /^(forward|inference)$/.test(g.name)) || all[0],
    way: "text",
  };
  const out = el("div", {});
  const draw = (line) => {
    const { text, cut, size } = state.graph;
    const note = cut
      ? empty(
          `Shortened: the whole text has ${bytes(size)}. Nodes after the cut are missing below.`,
        )
      : null;
    const toText = (n) => {
      state.way = "text";
      markTab(ways, "text");
      draw(n);
    };
    let node;
    if (state.way === "picture") {
      node = graphPicture(parseGraph(text, inputModules(item.entry, text)), toText);
    } else {
      const view = searchable(text, { label: "graph as text" });
      node = view.node;
      if (line !== undefined) requestAnimationFrame(() => view.show(line));
    }
    out.replaceChildren(...[note, node].filter(Boolean));
  };
  const groups = [
    { name: "stages of the compiler", items: stages },
    { name: "after torchloom's passes", items: passes },
  ].filter((g) => g.items.length);
  const pick = choice("Graph", groups, state.graph.value, (value) => {
    state.graph = all.find((g) => g.value === value);
    draw();
  });
  const ways = tabs(
    el("div", {
      class: "tabs way",
      role: "tablist",
      id: "way",
      "aria-label": "Way to show the graph",
    }),
    [
      ["text", "Text"],
      ["picture", "Picture"],
    ],
    "text",
    (key) => {
      state.way = key;
      markTab(ways, key);
      draw();
    },
  );
  draw();
  return [el("div", { class: "bar" }, pick, ways), out];
}

function kernelsView(item) {
  const kernels = item.entry.kernels;
  if (!kernels.length)
    return empty(
      "No kernel was generated: the backend generates none, or each operator calls a library.",
    );
  return kernels.map((k, i) => {
    const place = el("div", {});
    const box = el(
      "details",
      {
        ontoggle: () => {
          if (box.open && !place.firstChild)
            place.append(
              searchable(k.source, {
                language: /c\+\+|cpp/i.test(k.language) ? "cpp" : "python",
                label: k.name,
              }).node,
            );
        },
      },
      el(
        "summary",
        {},
        el("code", {}, k.name),
        el(
          "span",
          { class: "faint" },
          ` ${k.language}, ${count((k.source.match(/\n/g) || []).length, "line")}`,
        ),
      ),
      k.nodes.length
        ? el("p", { class: "told" }, "Computes: ", k.nodes.join(", "))
        : el("p", { class: "told" }, "Which nodes it computes is not known."),
      place,
    );
    if (i === 0) box.open = true;
    return box;
  });
}

function texts(item, kinds, missing) {
  const found = item.entry.artifacts.filter((a) => kinds.includes(a.kind));
  if (!found.length) return empty(missing);
  const out = el("div", {});
  const draw = (i) => {
    const a = found[i];
    out.replaceChildren(
      ...[
        a.is_cut ? empty(`Shortened: the whole text has ${bytes(a.num_bytes)}.`) : null,
        searchable(a.text, { language: "python", label: a.title }).node,
      ].filter(Boolean),
    );
  };
  draw(0);
  return [
    el(
      "div",
      { class: "bar" },
      choice(
        "Text",
        found.map((a, i) => ({ value: i, name: a.title || a.kind })),
        0,
        (v) => draw(Number(v)),
      ),
    ),
    out,
  ];
}

function bytecodeView(item) {
  const e = item.entry;
  if (!e.pseudo_source && !e.bytecode) return empty("No bytecode was recorded for this entry.");
  return el(
    "div",
    { class: "beside" },
    section(
      "What it does",
      code(e.pseudo_source, {
        language: "python",
        missing: "The bytecode could not be read back as source.",
        label: "pseudo source",
      }),
    ),
    section(
      "Bytecode that Dynamo wrote",
      code(e.bytecode, {
        language: "plain",
        missing: "The bytecode was not recorded.",
        label: "bytecode",
      }),
    ),
  );
}

function recompileView(item) {
  const all = item.entry.recompiles;
  if (!all.length)
    return empty(
      entriesOf(item.owner)[0] === item
        ? "This is the first entry of its function: nothing was recompiled for it."
        : "Why older entries could not serve was not recorded.",
    );
  const rows = all.map((r) => {
    const older = entryByName(item, r.entry);
    return [
      older ? jump(entryHash(older), r.entry) : r.entry,
      r.source,
      el("code", {}, r.expected),
      el("code", {}, r.actual),
      el("code", { class: "sub wrap" }, r.text),
    ];
  });
  const fixes = [...new Set(all.map((r) => r.fix).filter(Boolean))];
  return [
    el("p", {}, "This entry was made because no older one could serve the call."),
    table(
      [
        { name: "older entry" },
        { name: "rejected for" },
        { name: "expected" },
        { name: "actual" },
        { name: "check" },
      ],
      rows,
    ),
    fixes.length
      ? section(
          "Fix",
          el(
            "ul",
            {},
            fixes.map((f) => el("li", {}, prose(f))),
          ),
        )
      : null,
  ];
}

function timeView(item) {
  const e = item.entry,
    m = e.metrics;
  const scalars = Object.entries(m).filter(([, v]) => typeof v !== "object");
  const parts = Object.entries(m).filter(([, v]) => v && typeof v === "object");
  const value = ([k, v]) => [k, /_s$/.test(k) && typeof v === "number" ? seconds(v) : String(v)];
  return [
    section(
      "Phases",
      e.spans.length
        ? flameChart(e.spans, "flame chart of the compile")
        : empty("No compile spans were recorded for this entry."),
    ),
    section(
      "Caches",
      e.caches.length
        ? table(
            [{ name: "cache" }, { name: "outcome" }, { name: "reason" }],
            e.caches.map((c) => [
              c.cache,
              el(
                "span",
                { class: "tag " + ({ hit: "good", miss: "warn" }[c.outcome] || "info") },
                c.outcome,
              ),
              c.reason,
            ]),
          )
        : empty("No lookup in a cache was recorded."),
    ),
    section(
      "Numbers",
      scalars.length || parts.length
        ? [
            pairs(scalars.map(value)),
            el(
              "div",
              { class: "columns" },
              parts.map(([name, of]) =>
                el("div", {}, el("h3", {}, name), pairs(Object.entries(of).map(value))),
              ),
            ),
          ]
        : empty("None was recorded."),
    ),
  ];
}
