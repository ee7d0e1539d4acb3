// A graph as a picture: boxes laid out by dagre, groups that open and close, search, details.

const KINDS = [
  ["compute", "compute"],
  ["gather", "gather"],
  ["reduce", "reduce, sync"],
  ["wait", "wait"],
  ["offload", "offload"],
  ["view", "view"],
  ["input", "input"],
  ["output", "output"],
  ["group", "closed group"],
];
const BOX = 30,
  LETTER = 6.7,
  MOST_OUTPUTS = 12;

function graphPicture(graph, showLine) {
  if (!graph.nodes.length)
    return empty("No node could be read in the text of this graph; it is shown as text.");
  const root = groupGraph(graph);
  const state = {
    graph,
    root,
    open: openFirst(root),
    parents: parentsOf(root),
    users: usersOf(graph),
    hits: [],
    at: -1,
    chosen: null,
    box: { x: 0, y: 0, scale: 1 },
    showLine,
  };
  state.layer = svg("g");
  state.picture = svg(
    "svg",
    {
      class: "graph",
      role: "img",
      tabindex: "0",
      "aria-label":
        `graph of ${graph.nodes.length} nodes. Arrow keys move it, plus and minus zoom, ` +
        "n and p go to the next and previous box, Enter opens or closes a group",
    },
    arrowHead(),
    state.layer,
  );
  state.told = el("span", { class: "told", role: "status" });
  state.detail = el(
    "div",
    { class: "node-detail", "aria-live": "polite" },
    el(
      "p",
      { class: "detail" },
      "Click a box for its details; a group opens with a double click or the button here. " +
        "By keyboard: n and p choose a box, Enter opens or closes a group, arrows move, + and - zoom.",
    ),
  );
  listen(state);
  const node = el(
    "div",
    { class: "picture" },
    pictureBar(state),
    legend(),
    el("div", { class: "stage" }, state.picture, state.detail),
  );
  // Layout needs no size, fitting does: it waits until the picture is on the page.
  drawGraph(state);
  requestAnimationFrame(() => fit(state));
  return node;
}

function usersOf(graph) {
  const users = new Map();
  for (const n of graph.nodes)
    for (const i of n.inputs) users.set(i, [...(users.get(i) || []), n.name]);
  return users;
}

function arrowHead() {
  return svg(
    "defs",
    {},
    svg(
      "marker",
      {
        id: "arrow",
        viewBox: "0 0 8 8",
        refX: 7,
        refY: 4,
        markerWidth: 6,
        markerHeight: 6,
        orient: "auto",
      },
      svg("path", { d: "M0 0L8 4L0 8z", class: "head" }),
    ),
  );
}

function legend() {
  return el(
    "ul",
    { class: "legend", "aria-label": "Colours" },
    KINDS.map(([kind, name]) =>
      el("li", {}, el("span", { class: "key k-" + kind, "aria-hidden": "true" }), name),
    ),
  );
}

function pictureBar(state) {
  const input = el("input", {
    type: "search",
    placeholder: "Find nodes",
    "aria-label": "Find nodes",
    oninput: debounce(() => findNodes(state, input.value), 150),
    onkeydown: (e) => {
      if (e.key === "Enter") {
        e.preventDefault();
        nextHit(state, e.shiftKey ? -1 : 1);
      }
    },
  });
  return el(
    "div",
    { class: "bar" },
    input,
    button("Next node found", "↓", () => nextHit(state, 1)),
    button("Zoom in", "+", () => zoomBy(state, 1.3)),
    button("Zoom out", "−", () => zoomBy(state, 1 / 1.3)),
    button("Show the whole graph", "Fit", () => fit(state)),
    button("Open all groups, as far as they can be drawn", "Expand", () => expandAll(state)),
    button("Close all groups", "Collapse", () => {
      state.open.clear();
      drawGraph(state);
      fit(state);
    }),
    state.told,
  );
}

function expandAll(state) {
  let level = state.root.children;
  while (level.length) {
    const next = [];
    for (const item of level.filter((i) => i.children)) {
      const size = visible(state.root, state.open).boxes.filter((b) => !b.frame).length;
      if (size + item.children.length - 1 > SHOWN_MOST) {
        drawGraph(state);
        fit(state);
        state.told.textContent += `; more than ${SHOWN_MOST} at once would be slow, so some groups stay closed`;
        return;
      }
      state.open.add(item.id);
      next.push(...item.children);
    }
    level = next;
  }
  drawGraph(state);
  fit(state);
}

function layout(state) {
  const { boxes, holder } = visible(state.root, state.open);
  const g = new dagre.graphlib.Graph();
  g.setGraph({
    nodesep: 14,
    ranksep: 26,
    edgesep: 6,
    marginx: 16,
    marginy: 16,
    ranker: boxes.length > 120 ? "longest-path" : "tight-tree",
  });
  g.setDefaultEdgeLabel(() => ({}));
  const shown = boxes.filter((b) => !b.frame);
  for (const { item } of shown) {
    const label = boxLabel(item);
    g.setNode(item.id, {
      item,
      label,
      width: Math.min(300, Math.max(label[0].length, label[1].length * 0.86) * LETTER + 18),
      height: BOX + 8,
    });
  }
  const seen = new Set();
  let hidden = 0;
  for (const n of state.graph.nodes) {
    // A result of everything would pull lines across the whole picture.
    if (n.kind === "output" && n.inputs.length > MOST_OUTPUTS) {
      hidden += n.inputs.length - 1;
    }
    const inputs =
      n.kind === "output" && n.inputs.length > MOST_OUTPUTS
        ? n.inputs.slice(-1)
        : [...n.inputs, ...n.after];
    for (const name of inputs) {
      const from = holder.get(name),
        to = holder.get(n.name),
        key = from + "\n" + to;
      if (from && to && from !== to && !seen.has(key)) {
        seen.add(key);
        g.setEdge(from, to);
      }
    }
  }
  dagre.layout(g);
  return { g, shown, hidden };
}

function boxLabel(item) {
  const cut = (t, n) => (t.length > n ? t.slice(0, n - 1) + "…" : t);
  if (item.node) {
    return [
      cut(item.node.name, 38),
      cut(
        [item.node.target, item.node.shape.replace(/\]\[.*$/, "]")].filter(Boolean).join("  "),
        46,
      ),
    ];
  }
  return [cut(item.label, 38), count(item.nodes.length, "node")];
}

function drawGraph(state) {
  const { g, shown, hidden } = layout(state);
  const edges = g
    .edges()
    .map((e) =>
      svg("path", {
        d: path(g.edge(e).points),
        class: "edge",
        "marker-end": "url(#arrow)",
        "data-v": e.v,
        "data-w": e.w,
      }),
    );
  const boxes = shown.map(({ item }) => drawBox(state, g.node(item.id), item));
  state.layer.replaceChildren(svg("g", {}, edges), svg("g", {}, boxes));
  state.g = g;
  state.told.textContent =
    `${count(shown.length, "box", "boxes")} for ${count(state.graph.nodes.length, "node")}` +
    (hidden ? `; ${hidden} lines to the output are left out` : "");
  mark(state);
}

function path(points) {
  const [first, ...rest] = points.map((p) => `${p.x.toFixed(1)} ${p.y.toFixed(1)}`);
  return `M${first}L${rest.join("L")}`;
}

function drawBox(state, at, item) {
  const kind = item.node ? item.node.kind : "group " + mainKind(item);
  const x = at.x - at.width / 2,
    y = at.y - at.height / 2;
  return svg(
    "g",
    {
      class: "box k-" + kind.split(" ").join(" k-"),
      transform: `translate(${x.toFixed(1)} ${y.toFixed(1)})`,
      "data-id": item.id,
      onclick: () => {
        if (!state.picture.dataset.moved) choose(state, item);
      },
      ondblclick: () => item.children && toggle(state, item),
    },
    svg("title", {}, item.node ? item.node.text.slice(0, 600) : item.label),
    svg("rect", { width: at.width, height: at.height, rx: item.node ? 3 : 7 }),
    svg("text", { x: 9, y: 16, class: "name" }, at.label[0]),
    svg("text", { x: 9, y: 30, class: "what" }, at.label[1]),
  );
}

// A closed group takes the colour of the rarest thing inside it that a reader looks for.
function mainKind(item) {
  const inside = new Set(item.nodes.map((n) => n.kind));
  return ["offload", "reduce", "gather", "output"].find((k) => inside.has(k)) || "plain";
}

function toggle(state, item) {
  const before =
    state.g.node(item.id) ||
    state.g.node(visible(state.root, state.open).holder.get(item.nodes[0].name));
  if (state.open.has(item.id)) state.open.delete(item.id);
  else {
    const size = visible(state.root, state.open).boxes.filter((b) => !b.frame).length;
    if (size + item.children.length > SHOWN_MOST) {
      state.told.textContent = `Not opened: more than ${SHOWN_MOST} boxes at once would be slow. Close a group first.`;
      return;
    }
    state.open.add(item.id);
  }
  drawGraph(state);
  const holder = visible(state.root, state.open).holder.get(item.nodes[0].name);
  const after = state.g.node(holder);
  if (before && after) {
    // what was clicked stays under the pointer
    state.box.x += (before.x - after.x) * state.box.scale;
    state.box.y += (before.y - after.y) * state.box.scale;
    place(state);
  }
  choose(state, item);
}

function choose(state, item) {
  state.chosen = item.id;
  mark(state);
  state.detail.replaceChildren(...(item.node ? nodeDetail(state, item) : groupDetail(state, item)));
}

function nodeDetail(state, item) {
  const n = item.node,
    parent = state.parents.get(item.id);
  const goTo = (name) =>
    el("button", { type: "button", class: "plain", onclick: () => reveal(state, name) }, name);
  return [
    el("h3", {}, n.name),
    pairs([
      ["kind", n.kind],
      ["operator", n.target],
      ["result", n.shape],
      ["module", n.module],
      ["user line", n.source && `${short(n.source.place)} in ${n.source.where}`],
      ["code", n.source && el("code", {}, n.source.code)],
      ["reads", n.inputs.length ? n.inputs.map(goTo) : "nothing"],
      ["waits for", n.after.length ? n.after.map(goTo) : null],
      [
        "read by",
        (state.users.get(n.name) || []).length
          ? state.users.get(n.name).slice(0, 30).map(goTo)
          : "nothing",
      ],
      ["text", el("code", { class: "wrap" }, n.text)],
    ]),
    el(
      "p",
      { class: "bar" },
      el("button", { type: "button", onclick: () => state.showLine(n.line) }, "Show in the text"),
      parent &&
        parent !== state.root &&
        el("button", { type: "button", onclick: () => toggle(state, parent) }, "Close its group"),
    ),
  ];
}

function groupDetail(state, item) {
  const kinds = new Map();
  for (const n of item.nodes) kinds.set(n.kind, (kinds.get(n.kind) || 0) + 1);
  const parent = state.parents.get(item.id);
  return [
    el("h3", {}, item.label),
    pairs([
      ["nodes", item.nodes.length],
      ["kinds", [...kinds].map(([k, n]) => `${n} ${k}`).join(", ")],
      ["from", item.nodes[0].name],
      ["to", item.nodes.at(-1).name],
    ]),
    el(
      "p",
      { class: "bar" },
      el(
        "button",
        { type: "button", onclick: () => toggle(state, item) },
        state.open.has(item.id) ? "Close this group" : "Open this group",
      ),
      parent &&
        parent !== state.root &&
        el(
          "button",
          { type: "button", onclick: () => toggle(state, parent) },
          "Close what it is in",
        ),
    ),
  ];
}

function findNodes(state, word) {
  const low = word.toLowerCase();
  state.hits = low
    ? state.graph.nodes.filter((n) => n.text.toLowerCase().includes(low)).map((n) => n.name)
    : [];
  state.at = -1;
  mark(state);
  state.told.textContent = low ? count(state.hits.length, "node") + " found" : "";
  if (state.hits.length) nextHit(state, 1);
}

function nextHit(state, by) {
  if (!state.hits.length) return;
  state.at = (state.at + by + state.hits.length) % state.hits.length;
  const holder = visible(state.root, state.open).holder.get(state.hits[state.at]);
  center(state, holder);
  const found = visible(state.root, state.open).boxes.find((b) => b.item.id === holder);
  if (found) choose(state, found.item);
  state.told.textContent = `${state.at + 1} of ${count(state.hits.length, "node")} found: ${state.hits[state.at]}`;
}

// Open the groups around a node, then go to it.
function reveal(state, name) {
  const { boxes, holder } = visible(state.root, state.open);
  let item = boxes.find((b) => b.item.id === holder.get(name))?.item;
  while (item?.children) {
    state.open.add(item.id);
    item = item.children.find((c) => c.nodes.some((n) => n.name === name));
  }
  if (!item) return;
  drawGraph(state);
  center(state, item.id);
  choose(state, item);
}

function mark(state) {
  const { holder } = visible(state.root, state.open);
  const hits = new Set(state.hits.map((n) => holder.get(n)));
  for (const box of state.layer.querySelectorAll(".box")) {
    box.classList.toggle("found", hits.has(box.dataset.id));
    box.classList.toggle("chosen", box.dataset.id === state.chosen);
  }
  for (const edge of state.layer.querySelectorAll(".edge")) {
    edge.classList.toggle("on", edge.dataset.v === state.chosen || edge.dataset.w === state.chosen);
  }
}

function listen(state) {
  state.picture.addEventListener(
    "wheel",
    (event) => {
      event.preventDefault();
      const box = state.picture.getBoundingClientRect();
      zoomBy(
        state,
        event.deltaY < 0 ? 1.15 : 1 / 1.15,
        event.clientX - box.left,
        event.clientY - box.top,
      );
    },
    { passive: false },
  );
  dragging(state.picture, (dx, dy) => {
    state.box.x += dx;
    state.box.y += dy;
    place(state);
  });
  state.picture.addEventListener("keydown", (event) => {
    const step = {
      ArrowLeft: [40, 0],
      ArrowRight: [-40, 0],
      ArrowUp: [0, 40],
      ArrowDown: [0, -40],
    }[event.key];
    if (step) {
      state.box.x += step[0];
      state.box.y += step[1];
      place(state);
      event.preventDefault();
    }
    if (event.key === "+" || event.key === "=") zoomBy(state, 1.3);
    if (event.key === "-") zoomBy(state, 1 / 1.3);
    if (event.key === "n" || event.key === "p") stepBox(state, event.key === "n" ? 1 : -1);
    if (event.key === "Enter") openChosen(state);
  });
}

function stepBox(state, by) {
  const boxes = visible(state.root, state.open)
    .boxes.filter((b) => !b.frame)
    .map((b) => b.item);
  const at = boxes.findIndex((item) => item.id === state.chosen);
  const item = boxes[at < 0 ? 0 : (at + by + boxes.length) % boxes.length];
  center(state, item.id);
  choose(state, item);
}

// Of a node, its group is closed; of a group, what it holds is shown or put away.
function openChosen(state) {
  const { boxes } = visible(state.root, state.open);
  const item = boxes.find((b) => b.item.id === state.chosen)?.item;
  const target = item?.children ? item : state.parents.get(item?.id);
  if (target && target !== state.root) toggle(state, target);
}

function zoomBy(
  state,
  factor,
  x = state.picture.clientWidth / 2,
  y = state.picture.clientHeight / 2,
) {
  const next = Math.min(3, Math.max(0.03, state.box.scale * factor)),
    by = next / state.box.scale;
  state.box = { x: x - (x - state.box.x) * by, y: y - (y - state.box.y) * by, scale: next };
  place(state);
}

function center(state, id) {
  const at = id && state.g.node(id);
  if (!at) return;
  const scale = Math.max(state.box.scale, 0.8);
  state.box = {
    scale,
    x: state.picture.clientWidth / 2 - at.x * scale,
    y: state.picture.clientHeight / 2 - at.y * scale,
  };
  place(state);
}

// The whole of it where that can be read; else a part, from the first box on.
function fit(state) {
  const { width, height } = state.g.graph();
  const w = state.picture.clientWidth,
    h = state.picture.clientHeight;
  if (!w || !h) return;
  const scale = Math.min(1.1, Math.max(Math.min(w / width, h / height), 0.7));
  const top = state.g
    .nodes()
    .map((id) => state.g.node(id))
    .reduce((a, b) => (b.y < a.y ? b : a));
  const x = width * scale <= w ? (w - width * scale) / 2 : w / 2 - top.x * scale;
  state.box = { scale, x, y: Math.max(0, (h - height * scale) / 2) };
  place(state);
}

function place(state) {
  const { x, y, scale } = state.box;
  state.layer.setAttribute(
    "transform",
    `translate(${x.toFixed(2)} ${y.toFixed(2)}) scale(${scale.toFixed(4)})`,
  );
}
