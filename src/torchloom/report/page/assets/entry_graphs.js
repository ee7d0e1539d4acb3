// The graphs of an entry, each as text or as a picture.

function graphTexts(item) {
  const e = item.entry;
  const stages = e.artifacts
    .filter((a) => GRAPH_KINDS.includes(a.kind))
    .map((a, i) => ({
      value: "a" + i,
      kind: a.kind,
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

// Compilers may have added hashes to the name that a call had when the body was recorded.
function isBody({ kind, name }, body) {
  const [title, half] = name.split(/[ :]+/);
  const isHalf = half === body.half || (half === "inference" && body.half === "forward");
  return kind === "body" && isHalf && body.name.startsWith(title);
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
    // The graph that a call stands for; `asks`: only whether there is one.
    const toBody = (n, asks) => {
      const body = bodyOf(n);
      const found = body && all.find((g) => isBody(g, body));
      if (!found || asks) return Boolean(found);
      state.graph = found;
      pick.querySelector("select").value = found.value;
      draw();
      return true;
    };
    let node;
    if (state.way === "picture") {
      // Inputs of a body are numbered as those of the whole graph, and are others.
      const modules = state.graph.kind === "body" ? new Map() : inputModules(item.entry, text);
      node = graphPicture(parseGraph(text, modules), toText, toBody);
    } else {
      const view = searchable(text, { label: "graph as text" });
      node = view.node;
      if (line !== undefined) requestAnimationFrame(() => view.show(line));
    }
    out.replaceChildren(...[note, node].filter(Boolean));
  };
  const groups = [
    { name: "stages of the compiler", items: stages.filter((g) => g.kind !== "body") },
    { name: "equal layers, compiled once", items: stages.filter((g) => g.kind === "body") },
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
