// The run itself: phases of training steps, and collectives in flight beside them.

const OP_COLOURS = { gather: "c0", reduce: "c1", sync: "c2" };
const PHASE_COLOURS = { forward: "c3", backward: "c4", step: "c5" };
const MOST_OP_LANES = 12;
const TIMELINE_GUTTER = 82;

function timelineView() {
  const rows = data.record.events;
  const phases = rows.filter((r) => r.kind === "PhaseRan");
  const moves = rows.filter((r) => r.kind === "CollectiveRan");
  const { lanes, items } = timelineItems(phases, moves);
  if (!items.length) {
    return empty("Neither a compile nor a training step was recorded, so there is no timeline.");
  }
  if (!phases.length && !moves.length) return compileTimeline(lanes, items);
  const { all, steady, isSteady } = steadySteps(phases);
  const tables = el("div", {});
  const drawTables = ({ from, to }) => {
    const inSight = (start, end) => start + end >= 2 * from && start + end <= 2 * to;
    const near = moves.filter((r) => inSight(r.data.start_s, r.data.end_s));
    const ran = phases.filter((r) => inSight(r.data.start_s, r.data.start_s + r.data.duration_s));
    tables.replaceChildren(
      ...[
        beside(
          near.length && section("Collectives in sight", moveTable(near)),
          ran.length && section("Phases in sight", phaseTable(ran)),
        ),
      ].flat(),
    );
  };
  const chart = laneChart(lanes, items, {
    label: "timeline of phases and collectives",
    gutter: TIMELINE_GUTTER,
    onview: debounce(drawTables, 120),
  });
  const whole = [
    items.reduce((t, i) => Math.min(t, i.start), Infinity),
    items.reduce((t, i) => Math.max(t, i.end), -Infinity),
  ];
  const bar = stepBar(all, isSteady ? steady[0] : all.at(-1), isSteady, whole, chart);
  drawTables({ from: -Infinity, to: Infinity });
  return [section("Timeline", bar, timelineKey(moves.length), chart.node), tables];
}

// A record without steps: what was compiled when.
function compileTimeline(lanes, items) {
  const chart = laneChart(lanes, items, {
    label: "timeline of compiles",
    gutter: TIMELINE_GUTTER,
  });
  const told = el(
    "p",
    { class: "told" },
    "No training step was recorded: these are the compiles, each with what it consists of. ",
    el("code", {}, "torchloom train --report"),
    " also records the phases of each step and its collectives.",
  );
  return section("Timeline of compiles", told, chart.node);
}

// Whole run or steps; among these, one after the other.
function stepBar(all, first, isSteady, whole, chart) {
  const state = { at: first ? all.indexOf(first) : -1 };
  const told = el("span", { class: "told", role: "status" });
  const runButton = el("button", { type: "button", onclick: () => go(-1) }, "Whole run");
  const stepButton = el(
    "button",
    { type: "button", onclick: () => go(state.last ?? all.indexOf(first)) },
    "Steps",
  );
  const back = button("Previous step", "‹ step", () => go(Math.max(0, state.at - 1)));
  const next = button("Next step", "step ›", () => go(Math.min(all.length - 1, state.at + 1)));
  const go = (at) => {
    state.at = at;
    if (at >= 0) state.last = at;
    runButton.setAttribute("aria-pressed", String(at < 0));
    stepButton.setAttribute("aria-pressed", String(at >= 0));
    back.disabled = at <= 0;
    next.disabled = at < 0 || at === all.length - 1;
    if (at < 0) {
      told.textContent = all.length
        ? `${count(all.length, "step")}, with compiling and evaluation; times from the start of the first`
        : "no full step was recorded";
      chart.show(...whole, all[0]?.from);
      return;
    }
    const { step, from, to } = all[at];
    const margin = (to - from) * 0.01;
    const isFirst = isSteady && all[at] === first ? ", the first after the last compile" : "";
    const noSteady = isSteady ? "" : "; something was compiled in each step recorded";
    told.textContent =
      `step ${step} of ${all[0].step} to ${all.at(-1).step}${isFirst}: ` +
      seconds(to - from) +
      noSteady;
    chart.show(Math.max(from - margin, whole[0]), Math.min(to + margin, whole[1]), from);
  };
  stepButton.disabled = !all.length;
  // The chart has its size only when it stands on the page.
  requestAnimationFrame(() => go(state.at));
  const pick = el(
    "div",
    { class: "pick", role: "group", "aria-label": "What to show" },
    stepButton,
    runButton,
  );
  return el("div", { class: "bar" }, pick, back, next, told);
}

function timelineKey(hasMoves) {
  if (!hasMoves) return null;
  return el(
    "p",
    { class: "told" },
    "Collectives: a thin bar is in flight beside other work, a full bar is time that the step " +
      "waits for it.",
  );
}

function timelineItems(phases, moves) {
  const lanes = phases.length ? ["phases"] : [];
  const items = phaseItems(phases);
  compileItems(phases.length || moves.length ? 1 : COMPILE_DEPTH, lanes, items);
  const passes = passItems(lanes.length);
  if (passes.length) {
    lanes.push("torchloom");
    items.push(...passes);
  }
  for (const op of [...new Set(moves.map((r) => r.data.op))].sort()) {
    placeMoves(
      op,
      moves.filter((r) => r.data.op === op),
      lanes,
      items,
    );
  }
  return { lanes, items };
}

function phaseItems(phases) {
  const sorted = [...phases].sort((a, b) => a.data.start_s - b.data.start_s);
  return sorted.map(({ data: d }, i) => {
    const name = isEvaluation(sorted, i) ? "evaluate" : `${d.phase} ${d.step + 1}`;
    const what = isEvaluation(sorted, i) ? "forward without backward" : d.phase;
    return {
      lane: 0,
      start: d.start_s,
      end: d.start_s + d.duration_s,
      name,
      color: PHASE_COLOURS[d.phase] || "c5",
      title: `step ${d.step + 1}, ${what}: ${seconds(d.duration_s)}`,
    };
  });
}

const COMPILE_DEPTH = 5; // lanes; each entry has a flame chart of all its spans

function compileItems(depth, lanes, items) {
  const first = lanes.length;
  for (const { entry, owner, name } of data.entries) {
    for (const each of flame(entry.spans)) {
      if (each.lane >= depth) continue;
      const lane = first + each.lane;
      lanes[lane] ??= each.lane ? "" : "compile";
      items.push({
        ...each,
        lane,
        name: each.lane ? each.name : `compile ${name}`,
        color: each.lane ? each.color : "c5",
        title: `${each.name} of entry ${name} of ${nameOf(owner.fn)}: ${seconds(each.end - each.start)}`,
      });
    }
  }
}

// Passes, and what measures operators, tell when they ended and how long they took.
function passItems(lane) {
  const rows = data.record.events.filter((r) => OWN_WORK[r.kind] && r.data.duration_s);
  return rows.map(({ kind, at_s, data: d }) => ({
    ...OWN_WORK[kind](d),
    lane,
    start: at_s - d.duration_s,
    end: at_s,
  }));
}

const OWN_WORK = {
  PassRan: (d) => ({
    name: d.name,
    color: d.num_edits ? "c2" : "c5",
    title: `pass ${d.name} on ${d.graph}: ${seconds(d.duration_s)}, ${count(d.num_edits, "edit")}`,
  }),
  PlanReviewed: (d) => ({
    name: "measure",
    color: "c4",
    title:
      `operators are measured, for the plan: ${seconds(d.duration_s)}; ` +
      `the plan ${d.changes ? "changes" : "stays"}`,
  }),
};

// Collectives that overlap lie on lanes below each other.
function placeMoves(op, moves, lanes, items) {
  const first = lanes.length;
  const free = [];
  const color = OP_COLOURS[op] || "c5";
  for (const { data: d } of [...moves].sort((a, b) => a.data.start_s - b.data.start_s)) {
    let lane = free.findIndex((t) => t <= d.start_s);
    if (lane < 0) lane = Math.min(free.length, MOST_OP_LANES - 1);
    free[lane] = Math.max(d.end_s, free[lane] || 0);
    lanes[first + lane] ??= lane ? "" : op;
    const waited = Math.max(0, d.end_s - d.wait_s);
    const what = d.params?.length ? carried(d.params) : count(d.num_tensors, "tensor");
    const title =
      `${op} of ${what}, ${bytes(d.num_bytes)}: ` +
      `${seconds(d.end_s - d.start_s)}, of which waited ${seconds(waited)}`;
    const own = { lane: first + lane, end: d.end_s, color, title };
    const name = d.params?.length ? carried(d.params) : `${op} ${bytes(d.num_bytes)}`;
    items.push({
      ...own,
      start: d.start_s,
      name,
      thin: true,
      nameEnd: waited ? d.wait_s : d.end_s,
    });
    if (waited) items.push({ ...own, start: d.wait_s, name: "wait" });
  }
}

function moveTable(moves) {
  const ops = [...new Set(moves.map((r) => r.data.op))].sort();
  const columns = ["number", "bytes", "in flight", "waited", "hidden"];
  const rows = ops.map((op) => {
    const own = moves.filter((r) => r.data.op === op).map((r) => r.data);
    const sum = (of) => own.reduce((s, d) => s + of(d), 0);
    const flight = sum((d) => d.end_s - d.start_s);
    const wait = sum((d) => Math.max(0, d.end_s - d.wait_s));
    const hidden = flight > 0 ? `${(100 * (1 - wait / flight)).toFixed(0)}%` : "";
    const size = bytes(sum((d) => d.num_bytes));
    return [op, String(own.length), size, seconds(flight), seconds(wait), hidden];
  });
  const heads = [{ name: "operation" }, ...columns.map((name) => ({ name, class: "num" }))];
  return [
    table(heads, rows),
    el("p", { class: "told" }, "Hidden: the part of the time in flight that no step waited for."),
  ];
}

function phaseTable(phases) {
  const names = [...new Set(phases.map((r) => r.data.phase))];
  const columns = ["number", "median", "shortest", "longest"];
  const rows = names.map((name) => {
    const own = phases.filter((r) => r.data.phase === name);
    const t = own.map((r) => r.data.duration_s).sort((a, b) => a - b);
    return [name, String(t.length), seconds(t[t.length >> 1]), seconds(t[0]), seconds(t.at(-1))];
  });
  return table([{ name: "phase" }, ...columns.map((name) => ({ name, class: "num" }))], rows);
}
