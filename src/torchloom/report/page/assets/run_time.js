// Where the time of a training step went, and which layers the step waited for.

const MOVES_SHOWN = 12;

// Steps after the last compile, where there are any: {steps, isSteady, moves, phases}.
function measuredSteps() {
  const phases = data.record.events.filter((r) => r.kind === "PhaseRan");
  const moves = data.record.events.filter((r) => r.kind === "CollectiveRan").map((r) => r.data);
  const { all, steady, isSteady } = steadySteps(phases);
  const steps = isSteady ? steady : all;
  const within = (t) => steps.some((s) => t >= s.from && t <= s.to);
  return {
    steps,
    isSteady,
    numAll: all.length,
    phases: phases.map((r) => r.data).filter((d) => within(d.start_s)),
    moves: moves.filter((d) => within(d.wait_s)),
  };
}

function overlap(spans, from, to) {
  return spans.reduce((sum, [a, b]) => sum + Math.max(0, Math.min(b, to) - Math.max(a, from)), 0);
}

// Stretches of time without what they share.
function merged(spans) {
  const found = [];
  for (const [from, to] of [...spans].sort((a, b) => a[0] - b[0])) {
    const last = found.at(-1);
    if (last && from <= last[1]) last[1] = Math.max(last[1], to);
    else found.push([from, to]);
  }
  return found;
}

// Mean seconds per step of each part; the parts add up to the step.
function stepParts({ steps, phases, moves }) {
  const waits = merged(moves.map((d) => [d.wait_s, d.end_s]));
  const compiles = merged(
    data.entries.flatMap(({ entry }) =>
      entry.spans.map((s) => [s.start_us / 1e6, (s.start_us + s.duration_us) / 1e6]),
    ),
  );
  const sums = { forward: 0, backward: 0, step: 0, exposed: 0, compile: 0, between: 0 };
  for (const { from, to } of steps) sums.between += to - from;
  for (const d of phases) {
    const end = d.start_s + d.duration_s;
    const compiling = overlap(compiles, d.start_s, end);
    const exposed = Math.min(overlap(waits, d.start_s, end), d.duration_s - compiling);
    sums.compile += compiling;
    sums.exposed += exposed;
    sums[d.phase] = (sums[d.phase] || 0) + d.duration_s - compiling - exposed;
    sums.between -= d.duration_s;
  }
  const mean = (name) => Math.max(0, sums[name] / (steps.length || 1));
  return Object.fromEntries(Object.keys(sums).map((name) => [name, mean(name)]));
}

function runTime() {
  const run = measuredSteps();
  if (!run.steps.length) return null;
  const s = stepParts(run);
  const part = (name, value, color, note) => ({ name, value, color, note });
  const parts = [
    part("forward", s.forward, "c3", "without waiting"),
    part("backward", s.backward, "c4", "without waiting"),
    part("optimizer step", s.step, "c5", "clipping, norms and what ranks agree on included"),
    part("exposed communication", s.exposed, "c1", "the step waits for a gather or a reduction"),
    part("compiling", s.compile, "c0", "inside these steps"),
    part("between the calls", s.between, "c2", "the caller's own code between forward and step"),
  ];
  const times = run.steps.map((each) => each.to - each.from);
  const which = run.isSteady
    ? `${count(run.steps.length, "step")} after the last compile`
    : `${count(run.steps.length, "step")}; something was compiled in each step recorded`;
  const gap = outside(run.steps);
  return section(
    "Where the time of a step went",
    el(
      "p",
      { class: "told" },
      `Mean of ${which}: ${seconds(mean(times))} per step, from ${seconds(Math.min(...times))} ` +
        `to ${seconds(Math.max(...times))}. `,
      gap === null ? "" : `Between two steps pass ${seconds(gap)}: data, logging, evaluation. `,
      jump("timeline", "Timeline"),
    ),
    stackedBar(parts, {
      label: "time of a step",
      show: seconds,
      columns: ["part of the step", "time"],
    }),
  );
}

const mean = (values) => values.reduce((a, b) => a + b, 0) / (values.length || 1);

function outside(steps) {
  const gaps = steps.slice(1).map((s, i) => s.from - steps[i].to);
  return gaps.length ? mean(gaps) : null;
}

function exposedTotal() {
  const run = measuredSteps();
  if (!run.steps.length) return null;
  const parts = stepParts(run);
  const whole = Object.values(parts).reduce((a, b) => a + b, 0);
  return whole ? parts.exposed / whole : null;
}

const MOVE_GROUPS = [
  { value: "layer", name: "layer" },
  { value: "params", name: "parameters" },
];

// One row for each set of parameters that travels together, or for each layer that such sets are in.
function exposedMoves({ steps, moves }, by) {
  const found = new Map();
  for (const d of moves) {
    const params = d.params || [];
    const name = by === "layer" ? movedLayer(params) : carried(params);
    const key = [d.op, by === "layer" ? name : params.join()].join("\n");
    const row = found.get(key) || {
      ...{ op: d.op, name, params: new Set(), num: 0, bytes: 0, flight: 0, waited: 0 },
    };
    for (const each of params) row.params.add(each);
    row.num++;
    row.bytes += d.num_bytes;
    row.flight += d.end_s - d.start_s;
    row.waited += Math.max(0, d.end_s - d.wait_s);
    found.set(key, row);
  }
  const rows = [...found.values()].sort((a, b) => b.waited - a.waited);
  for (const row of rows) {
    for (const name of ["num", "bytes", "flight", "waited"]) row[name] /= steps.length;
  }
  return rows;
}

function exposedCommunication() {
  const run = measuredSteps();
  if (!run.steps.length || !run.moves.length) return null;
  const sets = exposedMoves(run, "params");
  const waited = sets.reduce((sum, r) => sum + r.waited, 0);
  const out = el("div", {});
  const draw = (by) => out.replaceChildren(...movesTable(exposedMoves(run, by)).filter(Boolean));
  const first = sets.length > MOVES_SHOWN ? "layer" : "params";
  draw(first);
  return section(
    "Exposed communication by layer",
    el(
      "p",
      { class: "told" },
      `A step waits ${seconds(waited)} for ${count(sets.length, "set")} of parameters that travel ` +
        "together. Exposed is what it waits; the rest of the time in flight is hidden behind compute.",
    ),
    el("div", { class: "bar" }, choice("Rows by", MOVE_GROUPS, first, draw)),
    out,
  );
}

function movesTable(rows) {
  const rest = rows.slice(MOVES_SHOWN);
  const cells = rows.slice(0, MOVES_SHOWN).map((r) => [
    moveName(r),
    r.op,
    el(
      "span",
      { class: "bar-cell" },
      el(
        "span",
        { class: "bar-line" },
        el("span", { style: `width:${((100 * r.waited) / (rows[0].waited || 1)).toFixed(2)}%` }),
      ),
      seconds(r.waited),
    ),
    seconds(r.flight),
    r.flight > 0 ? `${Math.max(0, 100 * (1 - r.waited / r.flight)).toFixed(0)}%` : "",
    r.num.toFixed(r.num % 1 ? 1 : 0),
    bytes(r.bytes),
  ]);
  const columns = ["in flight", "hidden", "number", "bytes"];
  return [
    table(
      [
        { name: "carries" },
        { name: "operation" },
        { name: "exposed per step" },
        ...columns.map((name) => ({ name, class: "num" })),
      ],
      cells,
      { class: "moves" },
    ),
    rest.length
      ? el(
          "p",
          { class: "told" },
          `and ${rest.length} more, ${seconds(rest.reduce((sum, r) => sum + r.waited, 0))} exposed`,
        )
      : null,
  ];
}

function moveName(row) {
  if (row.params.size < 2) return el("span", { class: "wrap" }, row.name);
  return el(
    "details",
    {},
    el("summary", {}, row.name),
    el("p", { class: "told wrap" }, [...row.params].join("\n")),
  );
}
