// torchloom's own events in words, in the order in which they came.

const EVENTS_SHOWN = 500;
const WHEN_COLUMNS = [{ name: "when", class: "num" }, { name: "event" }, { name: "what" }];

function eventsView() {
  const all = data.record.events;
  if (!all.length)
    return empty(
      "torchloom emitted no event while watching: only torch.compile by itself was at work.",
    );
  const kinds = [...new Set(all.map((e) => e.kind))].sort();
  const when = eventTimes();
  const out = el("div", {}),
    told = el("span", { class: "told", role: "status" });
  const state = { kind: "", word: "" };
  const draw = () => {
    const found = all.filter(
      (e) => (!state.kind || e.kind === state.kind) && eventHas(e, state.word),
    );
    told.textContent =
      count(found.length, "event") +
      (found.length > EVENTS_SHOWN ? `, the first ${EVENTS_SHOWN} shown` : "") +
      "; times count from the start of a step";
    out.replaceChildren(
      found.length
        ? table(WHEN_COLUMNS, eventRows(found.slice(0, EVENTS_SHOWN), when))
        : empty("No event holds these words."),
    );
  };
  const input = el("input", {
    type: "search",
    placeholder: "Filter",
    "aria-label": "Filter events",
    oninput: debounce(() => {
      state.word = input.value.toLowerCase();
      draw();
    }, 120),
  });
  draw();
  return [
    el(
      "div",
      { class: "bar" },
      input,
      choice(
        "Kind",
        [{ value: "", name: "all kinds" }, ...kinds.map((k) => ({ value: k, name: eventKind(k) }))],
        "",
        (v) => {
          state.kind = v;
          draw();
        },
      ),
      told,
    ),
    out,
  ];
}

const eventRows = (events, when) =>
  events.map((e) => [when(e), eventKind(e.kind), el("span", { class: "wrap" }, eventText(e))]);

const eventHas = (event, word) =>
  !word || `${event.kind} ${eventKind(event.kind)} ${eventText(event)}`.toLowerCase().includes(word);

// Returns what tells when an event began: from the start of its step; before all steps, of the record.
function eventTimes() {
  const rows = data.record.events;
  const steps = trainingSteps(rows.filter((r) => r.kind === "PhaseRan"));
  const beginOf = (e) => e.data.start_s ?? e.at_s;
  const first = rows.reduce((t, e) => Math.min(t, beginOf(e)), Infinity);
  return (event) => {
    const at = beginOf(event);
    const own = steps.findLast((s) => s.from <= at);
    return own ? `step ${own.step} + ${seconds(at - own.from)}` : seconds(at - first);
  };
}

// Per kind: its name, and a sentence about one event.
const EVENT_WORDS = {
  PassRan: [
    "pass",
    (d) => `${d.name} on ${d.graph} (${d.stage}): ${count(d.num_edits, "edit")} in ${seconds(d.duration_s)}`,
  ],
  BodyWoven: [
    "layers as one body",
    (d) => `${count(d.layers?.length || 0, "call")} of ${d.name} in ${d.graph}, ${d.half}`,
  ],
  ProgramReady: ["program", (d) => `${d.model} ${d.origin} in ${seconds(d.seconds)}`],
  PassesSkipped: ["not woven", (d) => `the model runs eagerly sharded: ${d.reason}`],
  CompileStarted: ["compile begins", (d) => `${d.graph}, ${count(d.num_nodes, "node")}`],
  CompileFinished: [
    "compiled",
    (d) => `${d.graph} in ${seconds(d.duration_s)}${d.from_cache ? ", from a cache" : ""}`,
  ],
  LoweredCompiled: ["code", (d) => `${d.lowered} of ${d.graph} in ${seconds(d.duration_s)}`],
  PlanReviewed: [
    "plan reviewed",
    (d) => `operators measured for ${seconds(d.duration_s)}; the plan ${d.changes ? "changes" : "stays"}`,
  ],
  BackendChosen: [
    "backend",
    (d) => [d.backend, ...(d.failed || []).map(([name, why]) => `${name} failed: ${why}`)].join("; "),
  ],
  CollectiveRan: [
    "collective",
    (d) =>
      `${d.op} of ${d.params?.length ? carried(d.params) : count(d.num_tensors, "tensor")}, ` +
      `${bytes(d.num_bytes)}: ${seconds(d.end_s - d.start_s)}, of which waited ` +
      seconds(Math.max(0, d.end_s - d.wait_s)),
  ],
  PhaseRan: [
    "phase",
    (d) =>
      `${d.phase === "step" ? "optimizer" : d.phase} of step ${d.step + 1}: ${seconds(d.duration_s)}`,
  ],
  StepSkipped: [
    "step skipped",
    (d) =>
      `step ${d.step}: gradients not finite` +
      (d.param ? `, first ${d.value} in ${d.param} on rank ${d.rank}` : ""),
  ],
  StepEnded: [
    "step",
    (d) =>
      [
        `step ${d.step} in ${seconds(d.seconds)}`,
        known(d.loss) && `loss ${round(d.loss)}`,
        known(d.tokens_per_second) && `${round(d.tokens_per_second)} tokens/s`,
        d.recompiles && count(d.recompiles, "recompile"),
        d.skipped && "skipped",
      ]
        .filter(Boolean)
        .join(", "),
  ],
  PlanCompared: [
    "plan compared",
    (d) =>
      `peak ${bytes(d.measured_peak_bytes)}, predicted ${bytes(d.predicted_peak_bytes)}` +
      (known(d.measured_seconds) ? `; forward and backward ${seconds(d.measured_seconds)}` : ""),
  ],
};

const eventKind = (kind) => EVENT_WORDS[kind]?.[0] || kind;

// What happened, in words; an event that this page does not know, or that is damaged, by its fields.
function eventText({ kind, data: d }) {
  try {
    const text = EVENT_WORDS[kind][1](d);
    if (!/undefined|NaN/.test(text)) return text;
  } catch {
    /* its fields, below */
  }
  return Object.entries(d)
    .filter(([, value]) => known(value))
    .map(([key, value]) => `${key} ${JSON.stringify(value).slice(0, 300)}`)
    .join(", ");
}
