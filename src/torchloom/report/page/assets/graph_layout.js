// Where boxes lie. Dagre lays out each open group on its own; in the group around it, it is one
// box. A line out of a group passes a port at its lower edge, one into it a port at its upper
// edge, so a line through several frames is a chain of pieces, one per frame.

const BOX_HEIGHT = 38;
const NAME_WIDTH = 7; // of a letter, in pixels: names are larger than what stands below them
const WHAT_WIDTH = 6.1;
const TITLE_HEIGHT = 26;
const PORT_IN = "\0in";
const PORT_OUT = "\0out";
const MOST_PORT_LINES = 24; // dagre gives each line a lane of its own; more make a group too wide
const MOST_RANKS_PASSED = 600; // by all lines of a group
const LONGEST_LINE = 12; // ranks that a line of a large group may pass
const LARGE_GROUP = 40; // boxes
const MANY_BOXES = 120; // the better of dagre's ways to rank takes too long beyond
const MOST_OUTPUTS = 12;

// Returns {at, lines, hidden}: `at` gives each box and frame its place by id. `known` keeps the
// layouts of groups between calls: to open one group, only those around it are laid out again.
function layoutGraph(nodes, root, shown, known) {
  const { pairs, hidden } = linesBetween(nodes, shown);
  const levels = new Map();
  const lines = pairs.map(([from, to]) => {
    const pieces = piecesOf(shown.chains.get(from), shown.chains.get(to), root.id);
    for (const [frame, v, w] of pieces) {
      if (!levels.has(frame)) levels.set(frame, new Map());
      levels.get(frame).set(v + "\n" + w, [v, w]);
    }
    return { from: shown.chains.get(from).at(-1), to: shown.chains.get(to).at(-1), pieces };
  });
  const whole = layoutGroup(root, shown.open, levels, known);
  const places = { at: new Map(), frames: new Map() };
  settle(root, whole, 0, 0, places);
  for (const line of lines) line.points = line.pieces.flatMap((p) => pointsOf(p, places));
  return { at: places.at, lines, hidden, width: whole.width, height: whole.height };
}

// Pairs of nodes that a line joins: one for each two boxes.
function linesBetween(nodes, shown) {
  const seen = new Set();
  const pairs = [];
  let hidden = 0;
  for (const n of nodes) {
    let inputs = [...n.inputs, ...n.after];
    // A result of everything would pull lines across the whole picture.
    if (n.kind === "output" && n.inputs.length > MOST_OUTPUTS) {
      hidden += n.inputs.length - 1;
      inputs = n.inputs.slice(-1);
    }
    for (const name of inputs) {
      const from = shown.holder.get(name);
      const to = shown.holder.get(n.name);
      const key = from + "\n" + to;
      if (!from || !to || from === to || seen.has(key)) continue;
      seen.add(key);
      pairs.push([name, n.name]);
    }
  }
  return { pairs, hidden };
}

// From the innermost group of one end up to what both are in, and down to the other end.
function piecesOf(from, to, rootId) {
  let k = 0;
  while (from[k] === to[k]) k++;
  const pieces = [];
  for (let j = from.length - 1; j > k; j--) pieces.push([from[j - 1], from[j], PORT_OUT]);
  pieces.push([k ? from[k - 1] : rootId, from[k], to[k]]);
  for (let j = k + 1; j < to.length; j++) pieces.push([to[j - 1], PORT_IN, to[j]]);
  return pieces;
}

function layoutGroup(group, open, levels, known) {
  const inner = new Map();
  const edges = [...(levels.get(group.id)?.values() || [])];
  const sizes = group.children.map((child) => {
    if (!child.children || !open.has(child.id)) {
      const width = Math.min(300, boxWidth(boxLabel(child), child.children));
      return { width, height: BOX_HEIGHT };
    }
    inner.set(child.id, layoutGroup(child, open, levels, known));
    const { width, height } = inner.get(child.id);
    return { width: Math.max(width, titleWidth(child)), height };
  });
  const key = JSON.stringify([group.id, sizes, edges]);
  if (!known.has(key)) known.set(key, layoutBoxes(group.children, sizes, edges));
  const g = known.get(key);
  const { width, height } = g.graph();
  return { g, inner, width, height: height + TITLE_HEIGHT };
}

function layoutBoxes(boxes, sizes, edges) {
  const g = new dagre.graphlib.Graph();
  const ranker = boxes.length > MANY_BOXES ? "longest-path" : "network-simplex";
  g.setGraph({ nodesep: 16, ranksep: 26, edgesep: 8, marginx: 14, marginy: 14, ranker });
  g.setDefaultEdgeLabel(() => ({}));
  boxes.forEach((box, i) => g.setNode(box.id, { ...sizes[i] }));
  for (const [v, w] of shortEdges(boxes, edges)) g.setEdge(v, w);
  for (const port of [PORT_IN, PORT_OUT]) {
    const own = edges.filter((edge) => edge.includes(port));
    addPort(g, port, own.map(([v, w]) => (v === port ? w : v)));
  }
  dagre.layout(g);
  return g;
}

// Dagre puts a node on each rank that a line passes, and takes seconds for thousands of them: what
// is left out here goes along the side. Every rank keeps the lines that make it.
function shortEdges(boxes, edges) {
  const rank = new Map(boxes.map((box) => [box.id, 0]));
  const own = edges.filter(([v, w]) => v !== PORT_IN && w !== PORT_OUT);
  const into = new Map();
  for (const [v, w] of own) into.set(w, [...(into.get(w) || []), v]);
  for (const { id } of boxes) {
    for (const v of into.get(id) || []) rank.set(id, Math.max(rank.get(id), rank.get(v) + 1));
  }
  const span = ([v, w]) => rank.get(w) - rank.get(v);
  const longest = boxes.length > LARGE_GROUP ? LONGEST_LINE : Infinity;
  let sum = 0;
  return own
    .sort((a, b) => span(a) - span(b))
    .filter((edge) => {
      sum += Math.max(1, span(edge));
      return span(edge) <= 1 || (sum <= MOST_RANKS_PASSED && span(edge) <= longest);
    });
}

// A port that is joined to each end of the group lies beyond all of it.
function addPort(g, port, ends) {
  if (!ends.length || ends.length > MOST_PORT_LINES) return;
  const extremes = port === PORT_IN ? g.sources() : g.sinks();
  g.setNode(port, { width: 1, height: 1 });
  for (const id of new Set([...extremes, ...ends])) {
    if (id === PORT_IN || id === PORT_OUT) continue;
    if (port === PORT_IN) g.setEdge(port, id);
    else g.setEdge(id, port);
  }
}

function titleWidth(group) {
  return Math.min(360, group.label.length * NAME_WIDTH + 40);
}

function boxWidth([name, what], isGroup) {
  return Math.max(name.length * NAME_WIDTH, what.length * WHAT_WIDTH) + (isGroup ? 38 : 20);
}

function boxLabel(item) {
  const cut = (t, n) => (t.length > n ? t.slice(0, n - 1) + "…" : t);
  if (!item.node) return [cut(item.label, 37), count(item.nodes.length, "node")];
  const shape = item.node.shape.replace(/\]\[.*$/, "]");
  return [cut(item.node.name, 40), cut([item.node.target, shape].filter(Boolean).join("  "), 45)];
}

// From places inside each group to places in the picture; x and y are upper left corners.
function settle(group, layout, x, y, places) {
  places.frames.set(group.id, { layout, x, y });
  for (const child of group.children) {
    const { x: midX, y: midY, width, height } = layout.g.node(child.id);
    const at = { x: x + midX - width / 2, y: y + midY - height / 2, width, height };
    places.at.set(child.id, at);
    const inner = layout.inner.get(child.id);
    if (inner) {
      const slack = (at.width - inner.width) / 2;
      settle(child, inner, at.x + slack, at.y + TITLE_HEIGHT, places);
    }
  }
}

function pointsOf([frame, v, w], places) {
  const { layout, x, y } = places.frames.get(frame);
  const edge = layout.g.edge(v, w);
  if (!edge) return straight(v, w, places, { x, y, layout });
  const points = edge.points.map((p) => [x + p.x, y + p.y]);
  // Dagre lets lines end anywhere on a box; on a frame they end where its ports are.
  if (layout.inner.has(v)) points[0] = portOf(v, PORT_OUT, places);
  if (layout.inner.has(w)) points[points.length - 1] = portOf(w, PORT_IN, places);
  return points;
}

// Where lines pass the edge of an open group: upper edge in, lower edge out.
function portOf(id, port, places) {
  const { layout, x } = places.frames.get(id);
  const at = places.at.get(id);
  const inside = layout.g.node(port)?.x ?? layout.width / 2;
  return [x + inside, port === PORT_IN ? at.y : at.y + at.height];
}

// A piece that dagre was not given. Where the frame has no port for it: from the edge of the frame
// to the box, or from the box to that edge.
function straight(v, w, places, { x, y, layout }) {
  if (v !== PORT_IN && w !== PORT_OUT) return alongSide(v, w, places, x + layout.width);
  const box = places.at.get(v === PORT_IN ? w : v);
  const middle = box.x + box.width / 2;
  const edge = x + layout.width / 2;
  if (v === PORT_IN) return [[edge, y], [middle, box.y]];
  return [[middle, box.y + box.height], [edge, y + layout.height - TITLE_HEIGHT]];
}

// A line between far boxes: out at the right of one, down the edge of the group, in at the right.
function alongSide(v, w, places, right) {
  const [from, to] = [v, w].map((id) => places.at.get(id));
  const down = Math.min(from.height - 6, 30);
  return [
    [from.x + from.width, from.y + down],
    [right - 5, from.y + down + 10],
    [right - 5, to.y - 2],
    [to.x + to.width, to.y + 8],
  ];
}
