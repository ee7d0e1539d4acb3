// Two runs side by side: figures with their ratio, curves in one chart, what differs.

// name, value of a side, text of a value; ratios are told of amounts, not of counts.
const COMPARED = [
  ["step time", ({ run }) => run?.step_s?.median, seconds, true],
  ["tokens/s", ({ run }) => run?.tokens_per_s, round, true],
  ["model FLOP utilization", ({ run }) => run?.mfu, (v) => `${(100 * v).toFixed(1)}%`, true],
  ["last loss", ({ run }) => run?.curves.loss?.filter(known).at(-1), round, true],
  ["last held-out loss", ({ run }) => run?.heldout.loss?.filter(known).at(-1), round, true],
  ["peak memory, measured", ({ run }) => run?.measured_bytes, bytes, true],
  ["peak memory, predicted", ({ run }) => run?.predicted_bytes, bytes, true],
  ["memory budget", ({ run }) => run?.budget_bytes, bytes, true],
  ["memory of the process or allocator", ({ run }) => run?.memory_bytes, bytes, true],
  ["forward and backward, predicted", ({ run }) => run?.predicted_s, seconds, true],
  ["forward and backward, measured", ({ run }) => run?.measured_s, seconds, true],
  ["ranks", ({ run }) => run?.world_size, String, false],
  ["compile time", (side) => side.compile_s, seconds, true],
  ["entries", (side) => side.entries, String, false],
  ["recompiles", (side) => side.recompiles, String, false],
  ["graph breaks", (side) => side.breaks, String, false],
];

function compareView({ runs, config, topics }) {
  const names = runs.map(({ name }) => ({ name, class: "num" }));
  const rows = COMPARED.map(([name, of, show, isAmount]) => {
    const [a, b] = runs.map((side) => of(side) ?? null);
    if (a === null && b === null) return null;
    const ratio = isAmount && a && b !== null ? `${(b / a).toFixed(2)}x` : "";
    return [name, ...[a, b].map((value) => (value === null ? "not recorded" : show(value))), ratio];
  }).filter(Boolean);
  return [
    section(
      "Figures",
      table([{ name: "figure" }, ...names, { name: "ratio", class: "num" }], rows, { class: "compared" }),
    ),
    runCurves(runs.filter(({ run }) => run)),
    section(
      "What differs in the configuration",
      config.length
        ? table([{ name: "key" }, ...runs.map(({ name }) => ({ name }))], config)
        : empty("Nothing that both runs recorded: torchloom train writes config.json."),
    ),
    section(
      "What differs in what was compiled",
      topics.length
        ? topics.map(([name, lines]) => [
            el("h3", {}, name),
            el("pre", { class: "text" }, lines.join("\n")),
          ])
        : empty("Nothing: functions, guards, graphs and kernels are equal."),
    ),
  ];
}
