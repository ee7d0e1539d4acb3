// Nodes into boxes: layers, modules inside them, lines of source inside those; each a run of
// neighbours, so that a picture of groups is acyclic wherever the graph is.

const OUTPUT_KEY = "\0output";
const SHOWN_FIRST = 150; // boxes at first
const SHOWN_MOST = 400; // boxes at once: drawing more takes seconds

// Returns the root {label, children, nodes}; leaves of the tree are nodes of the graph.
function groupGraph(nodes) {
  const order = placeInputs(nodes);
  const inner = order.filter((n) => n.kind !== "input");
  const layers = spread(inner.map((n) => layerOf(n.module)));
  const named = inner.map((n) => n.module);
  const modules = spread(named, layers);
  const lines = inner.map((n) => (n.source ? `${n.source.place} in ${n.source.where}` : ""));
  const keys = new Map(inner.map((n, i) => [n, [layers[i], modules[i], lines[i]]]));
  const items = order.map((node) => ({ node, keys: keys.get(node) }));
  // From the end: an input is where the node after it is, its first user.
  items.reduceRight((next, item) => (item.keys ||= next), ["", "", ""]);
  const root = { id: "g", label: "graph", children: runs(items, 0, "g"), nodes: order };
  root.children = chunks(layersTogether(root.children), "g");
  return root;
}

// Equal layers, which are calls of one body, are one box, closed at first; what lies between their
// calls (gathers and waits of the next layer) is in it.
function layersTogether(children) {
  const bodies = new Map();
  children.forEach((child, i) => {
    for (const n of child.nodes) {
      const body = bodyOf(n)?.name;
      if (!body) continue;
      const at = bodies.get(body) || { first: i, last: i, calls: 0 };
      bodies.set(body, { ...at, last: i, calls: at.calls + 1 });
    }
  });
  const spans = [...bodies.values()].sort((a, b) => a.first - b.first);
  const isApart = spans.every((span, i) => i === 0 || spans[i - 1].last < span.first);
  if (!isApart) return children;
  const found = [];
  let next = 0;
  for (const { first, last, calls } of spans.filter((span) => span.calls > 1)) {
    found.push(...children.slice(next, first));
    const id = `g/layers${first}`;
    const box = group(id, `layer x ${calls}`, children.slice(first, last + 1));
    found.push({ ...box, isShutAtFirst: true });
    next = last + 1;
  }
  return [...found, ...children.slice(next)];
}

// An input stands before its first user: else all of a model's weights would be one far row.
function placeInputs(nodes) {
  const left = new Map(nodes.filter((n) => n.kind === "input").map((n) => [n.name, n]));
  const placed = nodes
    .filter((n) => n.kind !== "input")
    .flatMap((n) => {
      const own = n.inputs.filter((name) => left.has(name)).map((name) => left.get(name));
      for (const { name } of own) left.delete(name);
      return [...own, n];
    });
  return [...left.values(), ...placed];
}

const layerOf = (path) => {
  const parts = path.split(".");
  const i = parts.findIndex((p) => /^\d+$/.test(p));
  return i < 0 ? parts[0] : parts.slice(0, i + 1).join(".");
};

// Nodes that name no module belong to the one named before them (or, at the start, after).
function spread(keys, within) {
  const known = [...keys];
  for (let i = 1; i < known.length; i++) {
    if (!known[i] && (!within || within[i] === within[i - 1])) known[i] = known[i - 1];
  }
  for (let i = known.length - 2; i >= 0; i--) {
    if (!known[i] && (!within || within[i] === within[i + 1])) known[i] = known[i + 1];
  }
  return known;
}

function runs(items, level, path) {
  if (level === 3) {
    return items.map(({ node }) => ({ id: path + "/" + node.name, node, nodes: [node] }));
  }
  const found = [];
  for (const item of items) {
    const key = item.node.kind === "output" ? OUTPUT_KEY : item.keys[level];
    if (found.length && found.at(-1).key === key) found.at(-1).items.push(item);
    else found.push({ key, items: [item] });
  }
  // One run of all nodes, but perhaps the output, needs no box around it.
  const inner = found.filter((run) => run.key !== OUTPUT_KEY);
  if (inner.length <= 1) {
    const rest = found.filter((run) => run.key === OUTPUT_KEY).flatMap((run) => run.items);
    const own = inner.length ? runs(inner[0].items, level + 1, path) : [];
    return [...own, ...runs(rest, 3, path)];
  }
  return found.flatMap((run, i) => {
    const id = `${path}/${level}.${i}`;
    const inner = runs(run.items, level + 1, id);
    return run.items.length === 1 ? inner : [group(id, runLabel(run, level), inner)];
  });
}

function runLabel(run, level) {
  if (level < 2) return run.key || "no module";
  const named = run.items.find((i) => i.node.source);
  if (!named) return count(run.items.length, "node");
  const { place, where, code } = named.node.source;
  return `${place.split("/").at(-1)} ${where}: ${code}`;
}

function group(id, label, children) {
  return { id, label, children, nodes: children.flatMap((c) => c.nodes) };
}

// Where even the outermost runs are too many, neighbours are put together.
function chunks(children, path) {
  if (children.length <= SHOWN_FIRST) return children;
  const size = Math.ceil(children.length / 60);
  const found = [];
  for (let i = 0; i < children.length; i += size) {
    const part = children.slice(i, i + size);
    const named = part.find((c) => c.children) || part[0];
    found.push(group(`${path}/c${i}`, named.label || named.node.name, part));
  }
  return found;
}

// The groups to open at first: level by level, while the boxes stay few.
function openFirst(root) {
  const open = new Set();
  let shown = root.children;
  for (;;) {
    const opens = (c) => c.children && !c.isShutAtFirst;
    const next = shown.flatMap((c) => (opens(c) ? c.children : [c]));
    if (next.length === shown.length || next.length > (root.nodes.length <= 60 ? 60 : 90))
      return open;
    shown.forEach((c) => opens(c) && open.add(c.id));
    shown = next;
  }
}

// What is in sight with these groups open: boxes and frames in order; for each node the box that
// it is in, and the chain of boxes from the outermost to that one.
function visible(root, open) {
  const shown = { open, boxes: [], frames: [], holder: new Map(), chains: new Map() };
  const walk = (item, chain) => {
    if (item !== root && item.children && open.has(item.id)) shown.frames.push(item);
    if (item === root || (item.children && open.has(item.id))) {
      item.children.forEach((c) => walk(c, [...chain, c.id]));
      return;
    }
    shown.boxes.push(item);
    for (const n of item.nodes) {
      shown.holder.set(n.name, item.id);
      shown.chains.set(n.name, chain);
    }
  };
  walk(root, []);
  return shown;
}

// The groups around a node, outermost first, and its own box last.
function wayTo(root, name) {
  const way = [];
  let item = root;
  while (item?.children) {
    item = item.children.find((c) => c.nodes.some((n) => n.name === name));
    if (item) way.push(item);
  }
  return way;
}

function parentsOf(root) {
  const parents = new Map();
  const walk = (item) =>
    item.children?.forEach((c) => {
      parents.set(c.id, item);
      walk(c);
    });
  walk(root);
  return parents;
}

// The groups to open so that as much is in sight as can be drawn, level by level.
function allOpen(root, { open, shown }) {
  const ids = new Set(open);
  let size = shown.boxes.length;
  let isCut = false;
  for (let level = root.children; level.length && !isCut; ) {
    const next = [];
    for (const { id, children } of level.filter((item) => item.children)) {
      const more = ids.has(id) ? 0 : children.length - 1;
      if (size + more > SHOWN_MOST) {
        isCut = true;
        continue;
      }
      size += more;
      ids.add(id);
      next.push(...children);
    }
    level = next;
  }
  return { ids, isCut };
}
