// The graphs of an entry, each as text or as a picture.

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
      "No graph was recorded for this entry: it may have come from a cache, " +
        "or watching began after it was compiled.",
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
