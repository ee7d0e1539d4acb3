// torchloom's passes over an entry: what each edited, and what that did to memory.

function passesView(item) {
  if (!item.entry.passes.length)
    return empty(
      "torchloom ran no pass over this entry: it was compiled by another backend, or read from a cache.",
    );
  const tries = triesOf(item.entry.passes);
  if (tries.length === 1) return triedPasses(tries[0]);
  const out = el("div", {});
  const draw = (i) => out.replaceChildren(...triedPasses(tries[i]).filter(Boolean));
  const last = tries.length - 1;
  draw(last);
  const names = tries.map((_, i) => ({ value: i, name: `${i + 1} of ${tries.length}` }));
  return [
    el(
      "div",
      { class: "bar" },
      choice("Try", names, last, (value) => draw(Number(value))),
      el("span", { class: "told" }, "The graph was compiled again to keep the memory budget."),
    ),
    out,
  ];
}

// Under a budget a graph may be woven several times: each try begins with the same pass.
function triesOf(runs) {
  const [first] = runs;
  const tries = [];
  for (const run of runs) {
    if (run.name === first.name && run.graph === first.graph) tries.push([]);
    tries.at(-1).push(run);
  }
  return tries;
}

function triedPasses(runs) {
  const changed = runs.filter((p) => p.num_edits);
  const rows = changed.map((p) => [
    p.name,
    p.stage,
    p.graph,
    String(p.num_edits),
    seconds(p.duration_s),
    p.curve?.length ? bytes(Math.max(...p.curve)) : "",
    p.before !== null && p.after !== null
      ? el("button", { type: "button", class: "plain", onclick: () => show(p) }, "difference")
      : "not recorded",
  ]);
  const place = el("div", {});
  const show = (p) => {
    place.replaceChildren(section(`${p.name} on ${p.graph}`, diffView(p.before, p.after)));
    place.scrollIntoView({ block: "nearest" });
  };
  const columns = [
    { name: "pass" },
    { name: "stage" },
    { name: "graph" },
    { name: "edits", class: "num" },
    { name: "time", class: "num" },
    { name: "peak bytes after", class: "num" },
    { name: "change" },
  ];
  return [
    rows.length ? table(columns, rows) : null,
    unchanged(runs.filter((p) => !p.num_edits)),
    place,
    memoryCharts(runs),
  ];
}

// Passes that found nothing to do, in one line; one that ran over several graphs is named once.
function unchanged(runs) {
  if (!runs.length) return null;
  const graphs = new Map();
  for (const p of runs) graphs.set(p.name, (graphs.get(p.name) || new Set()).add(p.graph));
  const names = [...graphs].map(([name, { size }]) => (size > 1 ? `${name} (${size} graphs)` : name));
  return el(
    "p",
    { class: "told unchanged" },
    `${count(graphs.size, "pass", "passes")} changed nothing: ${names.join(", ")}.`,
  );
}

// A pass that changed nothing leaves the curve of the one before it: of these, only a first counts.
function curvesOf(runs, graph) {
  const own = runs.filter((p) => p.graph === graph && p.curve?.length);
  const changed = own.filter((p) => p.num_edits);
  const [first] = own;
  return first && !first.num_edits ? [{ ...first, name: "before the passes" }, ...changed] : changed;
}

function memoryCharts(runs) {
  const graphs = [...new Set(runs.filter((p) => p.curve?.length).map((p) => p.graph))];
  if (!graphs.length)
    return section("Memory", empty("No memory curve was recorded with these passes."));
  return section(
    "Memory: bytes alive after each node",
    el(
      "p",
      { class: "told" },
      "Inputs and results counted, no buffer reused; one curve for each pass that changed the " +
        "graph, as the pass left it. Drag across a chart to zoom, double click to go back.",
    ),
    graphs.map((g) => memoryChart(g, curvesOf(runs, g))),
  );
}

function memoryChart(graph, runs) {
  const longest = Math.max(...runs.map((p) => p.curve.length));
  const xs = Array.from({ length: longest }, (_, i) => i);
  const series = runs.map((p) => ({
    label: p.name,
    ys: xs.map((i) => (i < p.curve.length ? p.curve[i] : null)),
  }));
  return lineChart(graph, "node of the graph", xs, series, { show: bytes, incrs: BINARY });
}
