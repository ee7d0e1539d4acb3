// The graphs of an entry, each as text or as a picture.

function graphTexts({ artifacts, passes }) {
  const stages = artifacts
    .filter((a) => GRAPH_KINDS.includes(a.kind))
    .map((a, i) => ({ ...a, value: "a" + i, name: a.title || a.kind }));
  const woven = passes
    .filter((p) => p.after)
    .map((p, i) => ({ value: "p" + i, name: `${p.graph} after ${p.name}`, text: p.after }));
  return [
    { name: "stages of the compiler", items: stages.filter((g) => g.kind !== "body") },
    { name: "equal layers, compiled once", items: stages.filter((g) => g.kind === "body") },
    { name: "after torchloom's passes", items: woven },
  ].filter((group) => group.items.length);
}

// Compilers may have added hashes to the name that a call had when the body was recorded.
function isBody({ kind, name }, body) {
  const [title, half] = name.split(/[ :]+/);
  const isHalf = half === body.half || (half === "inference" && body.half === "forward");
  return kind === "body" && isHalf && body.name.startsWith(title);
}

const WAYS = [
  ["text", "Text"],
  ["picture", "Picture"],
];

function Graphs({ item }) {
  const groups = useMemo(() => graphTexts(item.entry), [item]);
  const all = groups.flatMap((group) => group.items);
  const first = all.find((g) => /^(forward|inference)$/.test(g.name)) || all[0];
  const [at, setAt] = useState(first?.value);
  const [way, setWay] = useState("text");
  const [line, setLine] = useState(-1);
  const shown = all.find((g) => g.value === at);
  const nodes = useMemo(() => {
    if (way === "text") return [];
    // Inputs of a body are numbered as those of the whole graph, and are others.
    const modules = shown.kind === "body" ? new Map() : inputModules(item.entry, shown.text);
    return parseGraph(shown.text, modules);
  }, [way, at]);
  if (!shown) {
    const none =
      "No graph was recorded for this entry: it may have come from a cache, or watching began " +
      "after it was compiled.";
    return html`<${Empty}>${none}<//>`;
  }
  const go = (value, to, n) => {
    setAt(value);
    setWay(to);
    setLine(n);
  };
  const bodyFor = (node) => {
    const body = bodyOf(node);
    return body && all.find((g) => isBody(g, body));
  };
  const acts = {
    showLine: (n) => go(at, "text", n),
    bodyFor,
    showBody: (body) => go(body.value, "picture", -1),
  };
  const tabs = { id: "way", kind: "way", label: "Way to show the graph", names: WAYS };
  const pick = (value) => go(value, way, -1);
  const props = { text: shown.text, line, label: "graph as text" };
  const text = html`<${Searchable} key=${at} ...${props} />`;
  const none = html`<${Empty}>No node could be read in the text of this graph.<//>`;
  const picture = nodes.length
    ? html`<${GraphPicture} key=${at} graph=${nodes} ...${acts} />`
    : none;
  return html`<div class="bar">
      <${Select} label="Graph" options=${groups} value=${at} onpick=${pick} />
      <${Tabs} ...${tabs} current=${way} onpick=${(to) => go(at, to, -1)} />
    </div>
    ${way === "text" ? text : picture}`;
}
