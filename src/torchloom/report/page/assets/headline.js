// What one asks first of a run: its speed, its loss, its memory, what was predicted, the slowest rank.

const ASKS_BUDGET = ["set ", el("code", {}, "compile.memory_budget")];
const round = (n) => (n < 100 ? n.toPrecision(3) : Math.round(n).toLocaleString("en-US"));
const known = (value) => value !== null && value !== undefined;

function headline() {
  const run = data.run;
  if (!run) return null;
  return [
    el("div", { class: "headline" }, figures(run)),
    runCurves([{ name: "", run }]),
    el(
      "div",
      { class: "columns" },
      section("Predicted and measured", predictions(run)),
      section("Ranks", ranks(run)),
    ),
  ];
}

// A figure under its name, with a note; without a value, what records it.
function figure(name, value, note, missing) {
  return el(
    "div",
    { class: known(value) ? "figure" : "figure none" },
    el("span", {}, name),
    el("strong", {}, known(value) ? value : "not recorded"),
    el("small", {}, known(value) ? note : missing),
  );
}

function figures(run) {
  const { step_s: step } = run;
  const of = count(step?.num || 0, "step");
  const left = run.num_compiled ? `, ${run.num_compiled} that compiled left out` : "";
  return [
    figure(
      "step time",
      step && seconds(step.median),
      step && `middle half ${seconds(step.low)} to ${seconds(step.high)}; ${of}${left}`,
      "torchloom train and engines record steps",
    ),
    figure(
      "tokens/s",
      known(run.tokens_per_s) ? round(run.tokens_per_s) : null,
      known(run.mfu) ? `all ranks; ${(100 * run.mfu).toFixed(1)}% MFU` : "all ranks together",
      ["needs token ids, and ", el("code", {}, "gradient_clipping")],
    ),
    lossFigure(run),
    memoryFigure(run),
  ];
}

function ends(values) {
  const all = (values || []).filter(known);
  return all.length ? `${round(all[0])} → ${round(all.at(-1))}` : null;
}

function lossFigure(run) {
  const heldout = ends(run.heldout.loss);
  return figure(
    "loss, first → last",
    ends(run.curves.loss),
    heldout ? `held-out ${heldout}` : "training loss, mean of all ranks",
    ["set ", el("code", {}, "gradient_clipping")],
  );
}

// The measured peak where there is one, else the predicted: against the budget, else the prediction.
function memoryFigure(run) {
  const peak = run.measured_bytes ?? run.predicted_bytes;
  const limit = run.budget_bytes ?? (known(run.measured_bytes) ? run.predicted_bytes : null);
  const what = known(run.budget_bytes) ? "budget" : "predicted";
  const own = run.is_process_memory ? "the whole process" : "allocated";
  const note = [
    known(limit) ? `${percent(peak, limit)} of ${bytes(limit)} ${what}` : "tensors; no budget",
    known(run.memory_bytes) ? `${own} ${bytes(run.memory_bytes)}` : null,
  ];
  const node = figure(
    `peak memory, ${known(run.measured_bytes) ? "measured" : "predicted"}`,
    known(peak) ? bytes(peak) : null,
    note.filter(Boolean).join("; "),
    "a compiled engine records it",
  );
  if (known(limit) && peak > limit) node.classList.add("bad");
  return node;
}

const CURVES = [
  ["Loss over steps", "loss", round],
  ["Tokens per second over steps", "tokens_per_s", (n) => (n ? round(n) : "0")],
  ["Memory over steps", "memory_bytes", bytes],
];

// One chart for each quantity, with a line for each run.
function runCurves(runs) {
  const charts = CURVES.map(([title, key, show]) => {
    const lines = runs.flatMap(({ name, run }) => {
      const own = [{ label: name || "training", xs: run.curves.step, ys: run.curves[key] }];
      const heldout = { label: `${name} held-out`.trim(), xs: run.heldout.step, ys: run.heldout.loss };
      return key === "loss" ? [...own, heldout] : own;
    });
    const full = lines.filter(({ ys }) => (ys || []).filter(known).length > 1);
    return full.length ? curve(title, full, show, key) : null;
  }).filter(Boolean);
  return charts.length ? el("div", { class: "curves" }, charts) : null;
}

function curve(title, lines, show, key) {
  const xs = [...new Set(lines.flatMap((line) => line.xs))].sort((a, b) => a - b);
  const series = lines.map(({ label, xs: own, ys }) => {
    const at = new Map(own.map((x, i) => [x, ys[i]]));
    return { label, ys: xs.map((x) => at.get(x) ?? null) };
  });
  const incrs = key === "memory_bytes" ? BINARY : undefined;
  return lineChart(title, "step", xs, series, { show, incrs, height: 170, size: 66 });
}

function predictions(run) {
  const later = known(run.predicted_s) ? "a few steps after the compile" : ASKS_BUDGET;
  const row = (what, show, predicted, measured) => [
    what,
    known(predicted) ? show(predicted) : copyOf(ASKS_BUDGET),
    known(measured) ? show(measured) : copyOf(later),
    known(predicted) && known(measured) ? `${(measured / predicted).toFixed(2)}x` : "",
  ];
  return table(
    [
      { name: "of a step" },
      { name: "predicted", class: "num" },
      { name: "measured", class: "num" },
      { name: "ratio", class: "num" },
    ],
    [
      row("forward and backward", seconds, run.predicted_s, run.measured_s),
      row("peak memory", bytes, run.predicted_bytes, run.measured_bytes),
    ],
    { class: "predictions" },
  );
}

const copyOf = (parts) =>
  [parts].flat().map((part) => (part instanceof Node ? part.cloneNode(true) : part));

function ranks(run) {
  if (!run.ranks.length) {
    return empty("No rank recorded its steps: torchloom train --report, or an engine in a watch.");
  }
  const sorted = [...run.ranks].sort((a, b) => b.works_s - a.works_s);
  const [slowest, fastest] = [sorted[0], sorted.at(-1)];
  const more = percent(slowest.works_s - fastest.works_s, fastest.works_s);
  const rows = run.ranks.map((r) => [
    String(r.rank),
    seconds(r.step_s.median),
    `${seconds(r.step_s.low)} to ${seconds(r.step_s.high)}`,
    seconds(r.works_s),
    seconds(r.waits_s),
  ]);
  const columns = ["median step", "middle half", "works", "waits"];
  const num = run.ranks.length;
  const missing =
    num < run.world_size
      ? ` ${num} of ${run.world_size} ranks recorded: open torchloom.watch(path) on each.`
      : "";
  return [
    num > 1
      ? el(
          "p",
          {},
          el("strong", {}, `Rank ${slowest.rank} is the slowest`),
          `: it works ${seconds(slowest.works_s)} of a step, ${more} more than rank ${fastest.rank}.`,
        )
      : null,
    table([{ name: "rank" }, ...columns.map((name) => ({ name, class: "num" }))], rows, {
      class: "ranks",
    }),
    el("p", { class: "told" }, `In ${count(slowest.step_s.num, "step")} while watched.${missing}`),
  ];
}
