// Where the memory went: the predicted peak against the budget, by kind and by layer.

const KIND_COLOURS = {
  parameters: "c0",
  "master copies": "m0",
  "optimizer states": "c5",
  buffers: "m1",
  gradients: "c1",
  "gathered weights": "c2",
  activations: "c3",
  communication: "c4",
  workspace: "m2",
};
const KIND_NOTES = {
  parameters: "this rank's shards, and what is whole on every rank",
  "master copies": "what the optimizer steps in place of the parameters",
  "optimizer states": "live on from step to step",
  gradients: "of weights and of activations",
  "gathered weights": "whole weights on this rank, and casts of them",
  activations: "what forward computed and backward still reads",
  communication: "what the transport holds between start and wait",
  workspace: "of the operator that runs at the peak",
  batch: "inputs of the step",
  "generated code beyond its graphs": "buffers that the compiler adds or does not reuse",
  buffers: "of the model's modules",
  reserve: "for losses, norms and scales, and what another rank holds more",
};
const LAYERS_SHOWN = 14;

// Of each graph, what was found last; the newest graph last.
function newest(rows) {
  const found = new Map();
  for (const row of rows || []) {
    found.delete(row.graph);
    found.set(row.graph, row);
  }
  return found;
}

// {graph, groups: [{kind, layer, num_bytes}], total, budget, ...} of one graph's step, or null.
function memoryOf(graph) {
  const peak = newest(data.record.peaks).get(graph);
  const plan = newest(data.record.plans).get(graph);
  const standing = (data.record.standing || []).at(-1);
  if (!peak && !standing) return null;
  const groups = (standing?.parts || []).map((p) => ({ ...p }));
  const add = (kind, num_bytes, layer = "") =>
    num_bytes > 0 && groups.push({ kind, layer, num_bytes });
  const base = standing?.base_bytes || 0;
  add("reserve", base - groups.reduce((sum, g) => sum + g.num_bytes, 0));
  for (const [name, size] of Object.entries(plan?.resident || {})) {
    add("gathered weights", size, moduleOf(name));
  }
  for (const [name, size] of Object.entries(plan?.pieces || {})) {
    add("parameters", size, moduleOf(name));
  }
  const within = (plan?.batch_bytes || 0) + (plan?.peak_bytes ?? peak?.peak_bytes ?? 0);
  const isUpdate = (standing?.step_bytes || 0) > within;
  if (isUpdate) add("optimizer's step", standing.step_bytes);
  else {
    add("batch", plan?.batch_bytes || 0);
    for (const each of peak?.alive || []) groups.push(each);
  }
  const code = !isUpdate && plan && peak ? plan.peak_bytes - peak.peak_bytes : 0;
  add("generated code beyond its graphs", code);
  const total = groups.reduce((sum, g) => sum + g.num_bytes, 0) + Math.min(0, code);
  return { graph, groups, total, code, isUpdate, peak, plan, budget: standing?.budget_bytes };
}

function memoryGraphs() {
  const names = new Set([
    ...newest(data.record.plans).keys(),
    ...newest(data.record.peaks).keys(),
  ]);
  return [...names];
}

function runMemory() {
  const graphs = memoryGraphs();
  const isKnown = graphs.length || (data.record.standing || []).length;
  if (!isKnown) return null;
  const out = el("div", {});
  const draw = (graph) => out.replaceChildren(...memoryView(memoryOf(graph)).filter(Boolean));
  draw(graphs.at(-1));
  const pick =
    graphs.length > 1 &&
    choice(
      "Graph",
      graphs.map((g, i) => ({ value: g, name: g + (i === graphs.length - 1 ? " (newest)" : "") })),
      graphs.at(-1),
      draw,
    );
  return section("Where the memory went", pick && el("div", { class: "bar" }, pick), out);
}

function memoryView(m) {
  if (!m) return [empty("Nothing was recorded of this graph's memory.")];
  const limit = m.budget ? { value: m.budget, name: `budget: ${bytes(m.budget)}` } : null;
  const kinds = sumBy(m.groups, (g) => g.kind);
  const parts = kinds.map(([kind, value]) => ({
    name: kind,
    value,
    color: KIND_COLOURS[kind] || "m3",
    note: KIND_NOTES[kind],
  }));
  return [
    el("p", {}, memoryHead(m)),
    el("p", { class: "told" }, memoryWhen(m)),
    ...stackedBar(parts, {
      label: "memory at the peak",
      show: bytes,
      limit,
      columns: ["alive at the peak", "bytes"],
    }),
    m.code < 0 &&
      el(
        "p",
        { class: "told" },
        `The parts are those of the graph. The code that the compiler wrote fuses operators and ` +
          `reuses buffers: it needs ${bytes(-m.code)} less, which the total counts.`,
      ),
    layerTable(m),
  ];
}

function memoryHead(m) {
  const peak = el("strong", {}, bytes(m.total));
  if (!m.budget) return ["Predicted peak of this rank: ", peak, ". No memory budget was given."];
  const share = `${((100 * m.total) / m.budget).toFixed(1)}%`;
  return [
    "Predicted peak of this rank: ",
    peak,
    ` of ${bytes(m.budget)} that `,
    el("code", {}, "compile.memory_budget"),
    ` allows (${share}).`,
  ];
}

function memoryWhen({ isUpdate, peak, plan }) {
  if (isUpdate) return "The peak is in the optimizer's step, not in forward or backward.";
  if (!peak) {
    return "What is alive in forward and backward was not recorded: their code came from a cache.";
  }
  const at = peak.layer ? ` of ${peak.layer}` : "";
  const lacks = plan
    ? ""
    : " Nothing was planned: the workspace of operators and what the transport holds are not counted.";
  return [`The peak is in ${peak.phase}, while `, el("code", {}, peak.node), `${at} runs.${lacks}`];
}

function sumBy(rows, keyOf) {
  const sums = new Map();
  for (const row of rows) sums.set(keyOf(row), (sums.get(keyOf(row)) || 0) + row.num_bytes);
  return [...sums].sort((a, b) => b[1] - a[1]);
}

// Blocks of the model down, kinds across: the biggest first.
function layerTable(m) {
  const named = m.groups.filter((g) => g.layer);
  if (!named.length) return null;
  const kinds = sumBy(named, (g) => g.kind).map(([kind]) => kind);
  const blocks = sumBy(named, (g) => blockOf(g.layer));
  const cells = (own, name) => [
    name,
    ...kinds.map((kind) => {
      const sum = own.reduce((n, g) => n + (g.kind === kind ? g.num_bytes : 0), 0);
      return sum ? bytes(sum) : "";
    }),
    bytes(own.reduce((n, g) => n + g.num_bytes, 0)),
  ];
  const shown = blocks.slice(0, LAYERS_SHOWN).map(([block]) => {
    const own = named.filter((g) => blockOf(g.layer) === block);
    return cells(own, el("code", {}, block));
  });
  const hidden = new Set(blocks.slice(LAYERS_SHOWN).map(([block]) => block));
  if (hidden.size) {
    const own = named.filter((g) => hidden.has(blockOf(g.layer)));
    shown.push(cells(own, `${hidden.size} others`));
  }
  const columns = [
    { name: "layer" },
    ...kinds.map((name) => ({ name, class: "num" })),
    { name: "together", class: "num" },
  ];
  return el("div", {}, el("h3", {}, "By layer"), table(columns, shown, { class: "layers" }));
}
