// torchloom's passes over an entry: what each edited, and what that did to memory.

const NUM_INKS = 7; // colours --i0 to --i6
const BINARY = Array.from({ length: 50 }, (_, i) => 2 ** i);

function passesView(item) {
  const runs = item.entry.passes;
  if (!runs.length)
    return empty(
      "torchloom ran no pass over this entry: it was compiled by another backend, or read from a cache.",
    );
  const rows = runs.map((p, i) => [
    p.name,
    p.stage,
    p.graph,
    String(p.num_edits),
    seconds(p.duration_s),
    p.curve?.length ? bytes(Math.max(...p.curve)) : "",
    p.before !== null && p.after !== null
      ? el("button", { type: "button", class: "plain", onclick: () => show(i) }, "difference")
      : p.num_edits
        ? "not recorded"
        : "unchanged",
  ]);
  const place = el("div", {});
  const show = (i) => {
    const p = runs[i];
    place.replaceChildren(section(`${p.name} on ${p.graph}`, diffView(p.before, p.after)));
    place.scrollIntoView({ block: "nearest" });
  };
  return [
    table(
      [
        { name: "pass" },
        { name: "stage" },
        { name: "graph" },
        { name: "edits", class: "num" },
        { name: "time", class: "num" },
        { name: "peak bytes after", class: "num" },
        { name: "change" },
      ],
      rows,
    ),
    place,
    memoryCharts(runs),
  ];
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
      "Inputs and results counted, no buffer reused; one curve per pass, as the pass left the " +
        "graph. Drag across a chart to zoom, double click to go back.",
    ),
    graphs.map((g) =>
      memoryChart(
        g,
        runs.filter((p) => p.graph === g && p.curve?.length),
      ),
    ),
  );
}

function memoryChart(graph, runs) {
  const box = el("figure", { class: "memory" }, el("figcaption", {}, graph));
  const longest = Math.max(...runs.map((p) => p.curve.length));
  const xs = Array.from({ length: longest }, (_, i) => i);
  const ys = runs.map((p) => xs.map((i) => (i < p.curve.length ? p.curve[i] : null)));
  const draw = () => {
    box.querySelector(".uplot")?.remove();
    const style = getComputedStyle(document.body);
    const tone = (name) => style.getPropertyValue("--" + name).trim();
    const ink = tone("ink");
    const grid = { stroke: tone("line"), width: 1 };
    const axis = { stroke: ink, grid, ticks: grid };
    new uPlot(
      {
        width: Math.max(260, box.clientWidth || 700),
        height: 260,
        legend: { live: (box.clientWidth || 700) > 500 },
        scales: { x: { time: false } },
        axes: [
          { ...axis, label: "node of the graph", labelSize: 22 },
          { ...axis, size: 74, incrs: BINARY, values: (_, v) => v.map(bytes) },
        ],
        series: [
          { label: "node" },
          ...runs.map((p, i) => ({
            label: p.name + (p.num_edits ? "" : " (no edits)"),
            stroke: tone("i" + (i % NUM_INKS)),
            width: 1.6,
            dash: [[], [7, 4], [2, 3], [9, 3, 2, 3], [5, 2]][i % 5],
            points: { show: false },
            value: (_, v) => (v === null ? "" : bytes(v)),
          })),
        ],
      },
      [xs, ...ys],
      box,
    );
  };
  redrawOnTheme(box, draw);
  return box;
}

// Charts on canvas take their colours and width when drawn: again at each change of those.
function redrawOnTheme(box, draw) {
  let width = 0;
  new ResizeObserver(() => {
    if (box.clientWidth && Math.abs(box.clientWidth - width) > 4) {
      width = box.clientWidth;
      draw();
    }
  }).observe(box);
  document.addEventListener("themechange", () => box.isConnected && draw());
}
