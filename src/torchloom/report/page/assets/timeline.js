// The run itself: phases of training steps, and collectives in flight beside them.

const OP_COLOURS = { gather: "c0", reduce: "c1", sync: "c2" };
const PHASE_COLOURS = { forward: "c3", backward: "c4", step: "c5" };

function timelineView() {
  const rows = data.record.events;
  const phases = rows.filter((r) => r.kind === "PhaseRan"),
    moves = rows.filter((r) => r.kind === "CollectiveRan");
  if (!phases.length && !moves.length) {
    return empty(
      "No run recorded its steps here, only compiling was watched. ",
      el("code", {}, "torchloom train --report"),
      " records the phases of each step and its collectives.",
    );
  }
  const lanes = ["phases"];
  const items = phases.map((r) => ({
    lane: 0,
    start: r.data.start_s,
    end: r.data.start_s + r.data.duration_s,
    name: `${r.data.phase} ${r.data.step}`,
    color: PHASE_COLOURS[r.data.phase] || "c5",
    title: `step ${r.data.step}, ${r.data.phase}: ${seconds(r.data.duration_s)}`,
  }));
  for (const op of [...new Set(moves.map((r) => r.data.op))].sort())
    placeMoves(
      op,
      moves.filter((r) => r.data.op === op),
      lanes,
      items,
    );
  return [
    section(
      "Timeline",
      el(
        "p",
        { class: "told" },
        "Collectives: pale while in flight beside other work, full while the step waits for them.",
      ),
      laneChart(lanes, items, { label: "timeline of phases and collectives", gutter: 82 }),
    ),
    moves.length ? section("Collectives", moveTable(moves)) : null,
    phases.length ? section("Phases", phaseTable(phases)) : null,
  ];
}

// Collectives that overlap lie on lanes below each other.
function placeMoves(op, moves, lanes, items) {
  const first = lanes.length,
    free = [];
  for (const { data: d } of [...moves].sort((a, b) => a.data.start_s - b.data.start_s)) {
    let lane = free.findIndex((t) => t <= d.start_s);
    if (lane < 0) lane = free.length < 12 ? free.length : 11;
    free[lane] = d.end_s;
    lanes[first + lane] ??= lane ? "" : op;
    const color = OP_COLOURS[op] || "c5";
    const title = `${op} of ${count(d.num_tensors, "tensor")}, ${bytes(d.num_bytes)}: ${seconds(d.end_s - d.start_s)}, of which waited ${seconds(Math.max(0, d.end_s - d.wait_s))}`;
    items.push({
      lane: first + lane,
      start: d.start_s,
      end: d.end_s,
      name: `${op} ${bytes(d.num_bytes)}`,
      color: color + " pale",
      faint: true,
      title,
    });
    if (d.end_s > d.wait_s)
      items.push({ lane: first + lane, start: d.wait_s, end: d.end_s, name: "wait", color, title });
  }
}

function moveTable(moves) {
  const ops = [...new Set(moves.map((r) => r.data.op))].sort();
  return table(
    [
      { name: "operation" },
      { name: "number", class: "num" },
      { name: "bytes", class: "num" },
      { name: "in flight", class: "num" },
      { name: "waited", class: "num" },
      { name: "hidden", class: "num" },
    ],
    ops.map((op) => {
      const own = moves.filter((r) => r.data.op === op).map((r) => r.data);
      const sum = (of) => own.reduce((s, d) => s + of(d), 0);
      const flight = sum((d) => d.end_s - d.start_s),
        wait = sum((d) => Math.max(0, d.end_s - d.wait_s));
      return [
        op,
        String(own.length),
        bytes(sum((d) => d.num_bytes)),
        seconds(flight),
        seconds(wait),
        flight > 0 ? `${(100 * (1 - wait / flight)).toFixed(0)}%` : "",
      ];
    }),
  );
}

function phaseTable(phases) {
  const names = [...new Set(phases.map((r) => r.data.phase))];
  return table(
    [
      { name: "phase" },
      { name: "number", class: "num" },
      { name: "median", class: "num" },
      { name: "shortest", class: "num" },
      { name: "longest", class: "num" },
    ],
    names.map((name) => {
      const t = phases
        .filter((r) => r.data.phase === name)
        .map((r) => r.data.duration_s)
        .sort((a, b) => a - b);
      return [name, String(t.length), seconds(t[t.length >> 1]), seconds(t[0]), seconds(t.at(-1))];
    }),
  );
}
