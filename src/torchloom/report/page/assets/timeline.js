// The run itself: phases of training steps, and collectives in flight beside them.

const TIMELINE_GUTTER = 82;
const MOVES_KEY =
  "Collectives: a thin bar is in flight beside other work, a full bar is time that the step " +
  "waits for it.";

function Timeline() {
  const { lanes, bars, steps, steady } = data.timeline;
  const whole = useMemo(() => stretchOf(bars), [bars]);
  const first = steady ?? steps.length - 1; // at no step where there is none: the whole run
  const viewOf = (at) => {
    if (at < 0) return { ...whole, origin: steps[0]?.[1] ?? whole.from };
    const [, from, to] = steps[at];
    const margin = (to - from) * 0.01;
    const end = Math.min(to + margin, whole.to);
    return { from: Math.max(from - margin, whole.from), to: end, origin: from };
  };
  const [at, setAt] = useState(first);
  const [last, setLast] = useState(first);
  const [view, setView] = useState(() => viewOf(first));
  if (!bars.length) {
    const none = "Neither a compile nor a training step was recorded, so there is no timeline.";
    return html`<${Empty}>${none}<//>`;
  }
  const [phases, moves] = ["PhaseRan", "CollectiveRan"].map((kind) =>
    data.record.events.filter((row) => row.kind === kind).map((row) => row.data),
  );
  const go = (to) => {
    setAt(to);
    if (to >= 0) setLast(to);
    setView(viewOf(to));
  };
  const pick = (name, to, isOn, disabled) => html`<button
    ...${{ type: "button", onclick: () => go(to), disabled, "aria-pressed": String(isOn) }}
  >
    ${name}
  </button>`;
  const move = (title, text, to, disabled) =>
    html`<${Button} ...${{ title, text, disabled, onclick: () => go(to) }} />`;
  const chart = { lanes, bars, view, gutter: TIMELINE_GUTTER, onview: setView };
  if (!phases.length && !moves.length) {
    return html`<${Section} title="Timeline of compiles">
      <p class="told">
        No training step was recorded: these are the compiles, each with what it consists of.${" "}
        <code>torchloom train --report</code> also records the phases of each step and its${" "}
        collectives.
      </p>
      <${Lanes} ...${chart} label="timeline of compiles" />
    <//>`;
  }
  return html`<${Section} title="Timeline">
      <div class="bar">
        <div class="pick" role="group" aria-label="What to show">
          ${pick("Steps", last, at >= 0, !steps.length)} ${pick("Whole run", -1, at < 0)}
        </div>
        ${move("Previous step", "‹ step", at - 1, at <= 0)}
        ${move("Next step", "step ›", at + 1, at < 0 || at === steps.length - 1)}
        <span class="told" role="status">${stepTold(at, first)}</span>
      </div>
      ${moves.length > 0 && html`<p class="told">${MOVES_KEY}</p>`}
      <${Lanes} ...${chart} label="timeline of phases and collectives" />
    <//>
    <${InSight} ...${{ phases, moves, view }} />`;
}

function stepTold(at, first) {
  const { steps, steady } = data.timeline;
  if (!steps.length) return "no full step was recorded";
  const many = `${count(steps.length, "step")}, with compiling and evaluation`;
  if (at < 0) return `${many}; times from the start of the first`;
  const [step, from, to] = steps[at];
  const isFirst = steady !== null && at === first ? ", the first after the last compile" : "";
  const late = steady === null ? "; something was compiled in each step recorded" : "";
  const of = `step ${step} of ${steps[0][0]} to ${steps.at(-1)[0]}`;
  return `${of}${isFirst}: ${seconds(to - from)}${late}`;
}

// Numbers of what the chart shows: what lies in sight with its middle counts.
function InSight({ phases, moves, view }) {
  const isIn = (start, end) => start + end >= 2 * view.from && start + end <= 2 * view.to;
  const near = moves.filter((d) => isIn(d.start_s, d.end_s));
  const ran = phases.filter((d) => isIn(d.start_s, d.start_s + d.duration_s));
  const part = (title, rows, table) =>
    rows.length > 0 && html`<${Section} title="${title} in sight">${table(rows)}<//>`;
  return html`<div class=${near.length && ran.length ? "pair" : ""}>
    ${part("Collectives", near, moveTable)} ${part("Phases", ran, phaseTable)}
  </div>`;
}

function moveTable(moves) {
  const rows = [...new Set(moves.map((d) => d.op))].sort().map((op) => {
    const own = moves.filter((d) => d.op === op);
    const sum = (of) => own.reduce((total, d) => total + of(d), 0);
    const flight = sum((d) => d.end_s - d.start_s);
    const wait = sum((d) => Math.max(0, d.end_s - d.wait_s));
    const hidden = flight > 0 ? `${(100 * (1 - wait / flight)).toFixed(0)}%` : "";
    const size = bytes(sum((d) => d.num_bytes));
    return [op, String(own.length), size, seconds(flight), seconds(wait), hidden];
  });
  const columns = ["operation", "#number", "#bytes", "#in flight", "#waited", "#hidden"];
  return html`<${Table} ...${{ columns, rows }} />
    <p class="told">Hidden: the part of the time in flight that no step waited for.</p>`;
}

function phaseTable(phases) {
  const rows = [...new Set(phases.map((d) => d.phase))].map((name) => {
    const own = phases.filter((d) => d.phase === name).map((d) => d.duration_s);
    const t = own.sort((a, b) => a - b);
    return [name, String(t.length), seconds(t[t.length >> 1]), seconds(t[0]), seconds(t.at(-1))];
  });
  const columns = ["phase", "#number", "#median", "#shortest", "#longest"];
  return html`<${Table} ...${{ columns, rows }} />`;
}
