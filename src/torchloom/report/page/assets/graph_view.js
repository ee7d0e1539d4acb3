// A graph as a picture: what is open in it, and how it is moved, zoomed, searched and walked.

const KINDS = [
  ["compute", "compute"],
  ["layer", "layer: call of a body"],
  ["gather", "gather"],
  ["reduce", "reduce, sync"],
  ["wait", "wait"],
  ["offload", "offload"],
  ["view", "view"],
  ["input", "input"],
  ["output", "output"],
  ["group", "closed group"],
  ["frame", "open group"],
];

// What is in sight with these groups open, and where. known: layouts of groups, kept between calls.
function sceneOf(graph, root, open, known) {
  const shown = visible(root, open);
  return { open, shown, layout: layoutGraph(graph, root, shown, known) };
}

// What is in sight, what is not, and how to see that.
function tellScene(graph, { shown, layout }) {
  const closed = shown.boxes.filter((item) => item.children);
  const hidden = closed.reduce((n, item) => n + item.nodes.length, 0);
  const parts = [`${count(graph.length - hidden, "node")} shown`];
  const groups = count(closed.length, "closed group");
  const how = "the + of a group opens it, Find reaches into all of them";
  if (hidden) parts.push(`${hidden} inside ${groups}: ${how}`);
  if (layout.hidden) parts.push(`${layout.hidden} lines to the output are left out`);
  return parts.join("; ");
}

// The whole of it where that can be read, or where it was asked for; else from the first box on.
function fitted({ layout }, { clientWidth: w, clientHeight: h }, isAll = false) {
  const { width, height, at } = layout;
  const whole = Math.min(w / width, h / height);
  const scale = Math.min(1.1, isAll || whole > 0.6 ? whole : 0.85);
  const first = [...at.values()].reduce((a, b) => (b.y < a.y ? b : a));
  const isNarrow = width * scale <= w;
  const x = isNarrow ? (w - width * scale) / 2 : w / 2 - (first.x + first.width / 2) * scale;
  return { scale, x, y: Math.max(0, (h - height * scale) / 2) };
}

// showLine: goes to a line of the text; bodyFor, showBody: the graph that a call stands for.
function GraphPicture({ graph, showLine, bodyFor, showBody }) {
  const root = useMemo(() => groupGraph(graph), [graph]);
  const parents = useMemo(() => parentsOf(root), [root]);
  const known = useRef(new Map());
  const [scene, setScene] = useState(() => sceneOf(graph, root, openFirst(root), known.current));
  const [place, setPlace] = useState({ x: 0, y: 0, scale: 1 });
  const [chosen, setChosen] = useState(null);
  const [hits, setHits] = useState([]);
  const [told, setTold] = useState("");
  const hitAt = useRef(-1);
  const picture = useRef();
  const acts = useRef();

  // The state may be older than what was just drawn: an action hands on the scene that it made.
  const open = (ids) => {
    const next = sceneOf(graph, root, new Set(ids), known.current);
    setScene(next);
    setTold("");
    return next;
  };
  const move = (dx, dy) => setPlace(({ x, y, scale }) => ({ x: x + dx, y: y + dy, scale }));
  const zoom = (factor, x, y) => {
    const { clientWidth: w, clientHeight: h } = picture.current;
    setPlace((old) => {
      const scale = Math.min(3, Math.max(0.03, old.scale * factor));
      const by = scale / old.scale;
      const near = (at, own) => at - (at - own) * by;
      return { x: near(x ?? w / 2, old.x), y: near(y ?? h / 2, old.y), scale };
    });
  };
  const fit = (isAll, of = scene) => setPlace(fitted(of, picture.current, isAll));
  const center = (id, { layout }) => {
    const at = layout.at.get(id);
    const scale = Math.max(place.scale, 0.8);
    const { clientWidth: w, clientHeight: h } = picture.current;
    const y = h / 2 - (at.y + Math.min(at.height, h / scale) / 2) * scale;
    setPlace({ scale, x: w / 2 - (at.x + at.width / 2) * scale, y });
  };
  const choose = (item) => {
    if (!picture.current.dataset.moved) setChosen(item);
  };
  const toggle = (item) => {
    if (picture.current.dataset.moved) return;
    const isOpen = scene.open.has(item.id);
    if (!isOpen && scene.shown.boxes.length + item.children.length - 1 > SHOWN_MOST) {
      const what = `Not opened: more than ${SHOWN_MOST} boxes at once would be slow. `;
      setTold(what + "Close another group first, or Collapse all.");
      return;
    }
    const ids = [...scene.open].filter((id) => id !== item.id);
    const next = open(isOpen ? ids : [...ids, item.id]);
    const [before, after] = [scene, next].map(({ layout }) => layout.at.get(item.id));
    // What was clicked stays under the pointer.
    const by = place.scale;
    if (before && after) move((before.x - after.x) * by, (before.y - after.y) * by);
    setChosen(item);
  };
  const expand = () => {
    const { ids, isCut } = allOpen(root, scene);
    fit(false, open(ids));
    const why = `more than ${SHOWN_MOST} boxes at once would be slow: close others to open them`;
    if (isCut) setTold(`Some groups stay closed, as ${why}`);
  };
  const collapse = () => fit(false, open([]));
  // Open the groups around a node, then go to it; returns what else had to happen, as text.
  const reveal = (name) => {
    const way = wayTo(root, name);
    const box = way.pop();
    const shut = way.filter(({ id }) => !scene.open.has(id));
    const more = shut.reduce((n, { children }) => n + children.length - 1, 0);
    const isFull = shut.length > 0 && scene.shown.boxes.length + more > SHOWN_MOST;
    const ids = [...(isFull ? [] : scene.open), ...way.map(({ id }) => id)];
    center(box.id, shut.length ? open(ids) : scene);
    setChosen(box);
    if (isFull) return "; other groups were closed to make room";
    return shut.length ? `; opened ${way.at(-1).label}` : "";
  };
  const goToHit = (by, of = hits) => {
    if (!of.length) return;
    hitAt.current = (of.length + hitAt.current + by) % of.length;
    const name = of[hitAt.current];
    const note = reveal(name);
    setTold(`${hitAt.current + 1} of ${count(of.length, "node")} found: ${name}${note}`);
  };
  const find = (word) => {
    const isHit = (n) => word && n.text.toLowerCase().includes(word);
    const found = graph.filter(isHit).map((n) => n.name);
    hitAt.current = -1;
    setHits(found);
    setTold(word ? "No node found, in closed groups either." : "");
    goToHit(1, found);
  };
  const step = (by) => {
    const { boxes } = scene.shown;
    const at = boxes.findIndex(({ id }) => id === chosen?.id);
    const item = boxes[at < 0 ? 0 : (at + by + boxes.length) % boxes.length];
    center(item.id, scene);
    setChosen(item);
  };
  const parent = chosen && parents.get(chosen.id);
  const around = parent === root ? null : parent;
  const enter = () => {
    const target = chosen?.children ? chosen : around;
    if (target) toggle(target);
  };

  acts.current = { choose, toggle, reveal, showLine, bodyFor, showBody };
  useLayoutEffect(() => fit(false), []);
  const onwheel = (event) => {
    event.preventDefault();
    const { left, top } = picture.current.getBoundingClientRect();
    zoom(event.deltaY < 0 ? 1.15 : 1 / 1.15, event.clientX - left, event.clientY - top);
  };
  const onkeydown = onKeys({
    ArrowLeft: () => move(40, 0),
    ArrowRight: () => move(-40, 0),
    ArrowUp: () => move(0, 40),
    ArrowDown: () => move(0, -40),
    "+": () => zoom(1.3),
    "=": () => zoom(1.3),
    "-": () => zoom(1 / 1.3),
    0: () => fit(true),
    n: () => step(1),
    p: () => step(-1),
    Enter: enter,
  });
  const label =
    `graph of ${graph.length} nodes. Arrow keys move it, plus and minus zoom, 0 fits it, ` +
    "n and p go to the next and previous box, Enter opens or closes a group";
  const props = { class: "graph", role: "group", tabindex: 0, "aria-label": label };
  const { x, y, scale } = place;
  const at = `translate(${x.toFixed(2)} ${y.toFixed(2)}) scale(${scale.toFixed(4)})`;
  const boxes = useMemo(() => {
    const marked = new Set(hits.map((name) => scene.shown.holder.get(name)));
    return html`<${GraphBoxes} ...${{ scene, marked, acts }} chosen=${chosen?.id} />`;
  }, [scene, hits, chosen]);
  const isOpen = Boolean(chosen && scene.open.has(chosen.id));
  const press = (title, text, onclick) => html`<${Button} ...${{ title, text, onclick }} />`;
  return html`<div class="picture">
    <div class="bar">
      <${Find} label="Find nodes, hidden ones too" onword=${find} onstep=${goToHit} />
      ${press("Previous node found", "↑", () => goToHit(-1))}
      ${press("Next node found", "↓", () => goToHit(1))}
      ${press("Zoom in", "+", () => zoom(1.3))} ${press("Zoom out", "−", () => zoom(1 / 1.3))}
      ${press("Show the whole graph", "Fit", () => fit(true))}
      ${press("Open all groups, as far as they can be drawn", "Expand", expand)}
      ${press("Close all groups", "Collapse", collapse)}
    </div>
    <p class="told" role="status">${told || tellScene(graph, scene)}</p>
    <ul class="legend" aria-label="Colours">
      ${KINDS.map(
        ([kind, name]) =>
          html`<li><span class="key k-${kind}" aria-hidden="true"></span>${name}</li>`,
      )}
    </ul>
    <div class="stage">
      <svg ...${{ ...props, ...useDragging(move), onwheel, onkeydown }} ref=${picture}>
        ${arrowHead}
        <g transform=${at}>${boxes}</g>
      </svg>
      <div class="node-detail" aria-live="polite">
        <${GraphDetail} ...${{ item: chosen, graph, isOpen, parent: around, acts }} />
      </div>
    </div>
  </div>`;
}
