// Smaller parts of an entry: kernels, generated code, times.

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
              searchable(k.source.trimEnd(), {
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
          ` ${k.language}, ${count(k.source.trimEnd().split("\n").length, "line")}`,
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
  const found = kinds.flatMap((kind) => item.entry.artifacts.filter((a) => a.kind === kind));
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
