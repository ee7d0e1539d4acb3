// Training steps, found in the phases that a run recorded; and where its compiles ended.

// Returns [{step, from, to}] in order: the micro-steps and the optimizer step of each.
function trainingSteps(phases) {
  const sorted = [...phases].sort((a, b) => a.data.start_s - b.data.start_s);
  const found = [];
  sorted.forEach((row, i) => {
    const next = sorted[i + 1]?.data;
    const { phase, step } = row.data;
    if (phase !== "step" || (next?.phase === "step" && next.step === step)) return;
    const first = firstOfStep(sorted, i);
    if (first === i) return;
    const from = sorted[first].data.start_s;
    const to = row.data.start_s + row.data.duration_s;
    const number = step + 1; // phases tell the steps done before; metrics count from 1
    if (found.at(-1)?.step === number) found.pop(); // an inner micro-step: this one goes further
    found.push({ step: number, from, to });
  });
  return found;
}

// Two forwards in a row are an evaluation before the step: none of its backward is there.
function firstOfStep(sorted, last) {
  const { step } = sorted[last].data;
  let first = last;
  for (let i = last - 1; i >= 0 && sorted[i].data.step === step; i--) {
    if (sorted[i].data.phase === "forward" && sorted[i + 1].data.phase === "forward") break;
    first = i;
  }
  return first;
}

// Forwards that no backward followed.
function isEvaluation(sorted, i) {
  const next = sorted[i + 1]?.data;
  return sorted[i].data.phase === "forward" && (!next || next.phase === "forward");
}

// Seconds on the clock of events.
function lastCompileEnd() {
  const spans = data.entries.flatMap(({ entry }) => entry.spans);
  const ends = spans.map((s) => (s.start_us + s.duration_us) / 1e6);
  const told = data.record.events.filter((e) => e.kind === "CompileFinished").map((e) => e.at_s);
  return [...ends, ...told].reduce((a, b) => Math.max(a, b), -Infinity);
}

// Steps in which nothing was compiled; all of them where each compiled something.
function steadySteps(phases) {
  const all = trainingSteps(phases);
  const end = lastCompileEnd();
  const steady = all.filter((s) => s.from >= end);
  return { all, steady, isSteady: steady.length > 0 };
}
