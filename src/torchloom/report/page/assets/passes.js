// torchloom's passes over an entry: what each edited, and what that did to memory.

function Passes({ item }) {
  const tries = useMemo(() => triesOf(item.entry.passes), [item]);
  const [at, setAt] = useState(tries.length - 1);
  if (!tries.length) {
    const none =
      "torchloom ran no pass over this entry: it was compiled by another backend, or read from a " +
      "cache.";
    return html`<${Empty}>${none}<//>`;
  }
  const names = tries.map((_, i) => ({ value: i, name: `${i + 1} of ${tries.length}` }));
  const pick = html`<div class="bar">
    <${Select} label="Try" options=${names} value=${at} onpick=${(i) => setAt(Number(i))} />
    <span class="told">The graph was compiled again to keep the memory budget.</span>
  </div>`;
  return html`${tries.length > 1 && pick}<${Try} key=${at} runs=${tries[at]} />`;
}

// Under a budget a graph may be woven several times: each try begins with the same pass.
function triesOf(runs) {
  const [first] = runs;
  const tries = [];
  for (const run of runs) {
    if (run.name === first.name && run.graph === first.graph) tries.push([]);
    tries.at(-1).push(run);
  }
  return tries;
}

function Try({ runs }) {
  const [shown, setShown] = useState(null);
  const place = useRef();
  useLayoutEffect(() => {
    if (shown) place.current.scrollIntoView({ block: "nearest" });
  }, [shown]);
  const rows = runs
    .filter((p) => p.num_edits)
    .map((p) => [
      p.name,
      p.stage,
      p.graph,
      String(p.num_edits),
      seconds(p.duration_s),
      p.curve?.length ? bytes(highest(p.curve)) : "",
      p.before === null || p.after === null
        ? "not recorded"
        : html`<button type="button" class="plain" onclick=${() => setShown(p)}>
            difference
          </button>`,
    ]);
  const columns = ["pass", "stage", "graph", "#edits", "#time", "#peak bytes after", "change"];
  return html`${rows.length > 0 && html`<${Table} columns=${columns} rows=${rows} />`}
    <${Unchanged} runs=${runs.filter((p) => !p.num_edits)} />
    <div ref=${place}>
      ${shown &&
      html`<${Section} title="${shown.name} on ${shown.graph}">
        <${Difference} before=${shown.before} after=${shown.after} />
      <//>`}
    </div>
    <${MemoryCurves} runs=${runs} />`;
}

const highest = (curve) => curve.reduce((a, b) => Math.max(a, b), 0);

// Passes that found nothing to do, in one line; one that ran over several graphs is named once.
function Unchanged({ runs }) {
  const graphs = new Map();
  for (const p of runs) graphs.set(p.name, (graphs.get(p.name) || new Set()).add(p.graph));
  const told = (name, size) => (size > 1 ? `${name} (${size} graphs)` : name);
  const names = [...graphs].map(([name, { size }]) => told(name, size));
  if (!names.length) return null;
  const many = count(names.length, "pass", "passes");
  return html`<p class="told unchanged">${many} changed nothing: ${names.join(", ")}.</p>`;
}

// A pass that changed nothing leaves the curve of the one before it: of these, only a first counts.
function curvesOf(runs, graph) {
  const own = runs.filter((p) => p.graph === graph && p.curve?.length);
  const changed = own.filter((p) => p.num_edits);
  const [first] = own;
  return first.num_edits ? changed : [{ ...first, name: "before the passes" }, ...changed];
}

function MemoryCurves({ runs }) {
  const graphs = [...new Set(runs.filter((p) => p.curve?.length).map((p) => p.graph))];
  const told =
    "Inputs and results counted, no buffer reused; one curve for each pass that changed the " +
    "graph, as the pass left it. Drag across a chart to zoom, double click to go back.";
  if (!graphs.length) {
    const none = "No memory curve was recorded with these passes.";
    return html`<${Section} title="Memory"><${Empty}>${none}<//><//>`;
  }
  const chart = (graph) => memoryChart(graph, curvesOf(runs, graph));
  const charts = useMemo(() => graphs.map(chart), [runs]);
  return html`<${Section} title="Memory: bytes alive after each node">
    <p class="told">${told}</p>
    ${charts.map((chart) => html`<${LineChart} ...${chart} />`)}
  <//>`;
}

function memoryChart(title, runs) {
  const longest = highest(runs.map((p) => p.curve.length));
  const xs = Array.from({ length: longest }, (_, i) => i);
  const series = runs.map((p) => ({ label: p.name, ys: xs.map((i) => p.curve[i] ?? null) }));
  return { title, x: "node of the graph", xs, series, shows: "bytes" };
}
