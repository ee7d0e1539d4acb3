// What torchloom and the compiler spent on compiling: capture, planning, passes, code.

function ownPhases() {
  const kinds = (kind) => data.record.events.filter((r) => r.kind === kind).map((r) => r.data);
  const passes = kinds("PassRan");
  const lowered = kinds("LoweredCompiled");
  if (!passes.length && !lowered.length && !kinds("CompileFinished").length) return null;
  const sum = (rows, of) => rows.reduce((total, row) => total + (of(row) || 0), 0);
  const metrics = data.entries.map((e) => e.entry.metrics.forward || {});
  const whole = sum(metrics, (m) => m.entire_frame_compile_time_s);
  const backend = sum(metrics, (m) => m.backend_compile_time_s);
  const planning = sum(data.record.plans || [], (p) => p.planning_s);
  const measuring = sum(kinds("PlanReviewed"), (p) => p.duration_s);
  const weaving = sum(passes, (p) => p.duration_s);
  const inside = sum(
    passes.filter((p) => p.stage === "lowered"),
    (p) => p.duration_s,
  );
  // Passes over a lowered graph run inside its compile.
  const code = Math.max(0, sum(lowered, (p) => p.duration_s) - inside);
  const late = sum(data.entries, ({ entry }) => entry.metrics.backward?.inductor_compile_time_s);
  const rest = Math.max(0, backend + late - planning - weaving - code);
  const part = (name, value, color, note) => ({ name, value, color, note });
  const parts = [
    part("capture", Math.max(0, whole - backend), "c0", "Dynamo traces the model, guards included"),
    part("planning", planning, "c3", "torchloom tries plans on copies, and replays generated code"),
    part("measuring", measuring, "m0", "ranks time operators, for a second plan"),
    part("passes", weaving, "c2", "torchloom edits the graphs"),
    part("code generation", code, "c5", "the compiler turns the lowered graphs into code"),
    part("rest of the backend", rest, "c4", "AOTAutograd traces forward and backward; caches"),
  ];
  if (!parts.some((p) => p.value > 0)) return null;
  return section(
    "Where compile time went",
    el(
      "p",
      { class: "told" },
      `${count(metrics.length, "entry", "entries")}; passes ran over ` +
        `${count(new Set(passes.map((p) => p.graph)).size, "graph")}. ` +
        "Each entry shows the compiler's own phases.",
    ),
    stackedBar(parts, {
      label: "compile time",
      show: seconds,
      columns: ["phase", "time"],
    }),
  );
}
