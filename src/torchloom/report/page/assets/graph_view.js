// A graph as a picture: what it consists of, and how it is moved, zoomed and walked.

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

function graphPicture(graph, showLine, showBody) {
  if (!graph.nodes.length) {
    return empty("No node could be read in the text of this graph; it is shown as text.");
  }
  const root = groupGraph(graph);
  const state = {
    graph,
    root,
    open: openFirst(root),
    parents: parentsOf(root),
    users: usersOf(graph),
    layouts: new Map(),
    hits: [],
    at: -1,
    chosen: null,
    box: { x: 0, y: 0, scale: 1 },
    showLine,
    showBody,
  };
  state.layer = svg("g");
  const label =
    `graph of ${graph.nodes.length} nodes. Arrow keys move it, plus and minus zoom, 0 fits it, ` +
    "n and p go to the next and previous box, Enter opens or closes a group";
  state.picture = svg(
    "svg",
    { class: "graph", role: "group", tabindex: "0", "aria-label": label },
    arrowHead(),
    state.layer,
  );
  state.told = el("p", { class: "told", role: "status" });
  state.detail = el("div", { class: "node-detail", "aria-live": "polite" }, firstDetail());
  listen(state);
  const node = el(
    "div",
    { class: "picture" },
    pictureBar(state),
    state.told,
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
  for (const n of graph.nodes) {
    for (const i of n.inputs) users.set(i, [...(users.get(i) || []), n.name]);
  }
  return users;
}

function legend() {
  const key = ([kind, name]) =>
    el("li", {}, el("span", { class: "key k-" + kind, "aria-hidden": "true" }), name);
  return el("ul", { class: "legend", "aria-label": "Colours" }, KINDS.map(key));
}

function pictureBar(state) {
  const input = el("input", {
    type: "search",
    placeholder: "Find nodes, hidden ones too",
    "aria-label": "Find nodes, hidden ones too",
    oninput: debounce(() => findNodes(state, input.value), 150),
    onkeydown: (event) => {
      if (event.key !== "Enter") return;
      event.preventDefault();
      nextHit(state, event.shiftKey ? -1 : 1);
    },
  });
  return el(
    "div",
    { class: "bar" },
    input,
    button("Previous node found", "↑", () => nextHit(state, -1)),
    button("Next node found", "↓", () => nextHit(state, 1)),
    button("Zoom in", "+", () => zoomBy(state, 1.3)),
    button("Zoom out", "−", () => zoomBy(state, 1 / 1.3)),
    button("Show the whole graph", "Fit", () => fit(state, true)),
    button("Open all groups, as far as they can be drawn", "Expand", () => expandAll(state)),
    button("Close all groups", "Collapse", () => {
      state.open.clear();
      drawGraph(state);
      fit(state);
    }),
  );
}

function listen(state) {
  state.picture.addEventListener(
    "wheel",
    (event) => {
      event.preventDefault();
      const box = state.picture.getBoundingClientRect();
      const factor = event.deltaY < 0 ? 1.15 : 1 / 1.15;
      zoomBy(state, factor, event.clientX - box.left, event.clientY - box.top);
    },
    { passive: false },
  );
  dragging(state.picture, (dx, dy) => moveBy(state, dx, dy));
  const keys = {
    ArrowLeft: () => moveBy(state, 40, 0),
    ArrowRight: () => moveBy(state, -40, 0),
    ArrowUp: () => moveBy(state, 0, 40),
    ArrowDown: () => moveBy(state, 0, -40),
    "+": () => zoomBy(state, 1.3),
    "=": () => zoomBy(state, 1.3),
    "-": () => zoomBy(state, 1 / 1.3),
    0: () => fit(state, true),
    n: () => stepBox(state, 1),
    p: () => stepBox(state, -1),
    Enter: () => openChosen(state),
  };
  onKeys(state.picture, keys);
}

function stepBox(state, by) {
  const boxes = state.shown.boxes;
  const at = boxes.findIndex((item) => item.id === state.chosen);
  const item = boxes[at < 0 ? 0 : (at + by + boxes.length) % boxes.length];
  center(state, item.id);
  choose(state, item);
}

// Of a node, its group is closed; of a group, what it holds is shown or put away.
function openChosen(state) {
  const { boxes, frames } = state.shown;
  const item = [...boxes, ...frames].find((b) => b.id === state.chosen);
  const target = item?.children ? item : state.parents.get(item?.id);
  if (target && target !== state.root) toggle(state, target);
}

function moveBy(state, dx, dy) {
  state.box.x += dx;
  state.box.y += dy;
  place(state);
}

function zoomBy(state, factor, x, y) {
  x ??= state.picture.clientWidth / 2;
  y ??= state.picture.clientHeight / 2;
  const next = Math.min(3, Math.max(0.03, state.box.scale * factor));
  const by = next / state.box.scale;
  state.box = { x: x - (x - state.box.x) * by, y: y - (y - state.box.y) * by, scale: next };
  place(state);
}

function center(state, id) {
  const at = state.layout.at.get(id);
  if (!at) return;
  const scale = Math.max(state.box.scale, 0.8);
  const { clientWidth: w, clientHeight: h } = state.picture;
  const x = w / 2 - (at.x + at.width / 2) * scale;
  state.box = { scale, x, y: h / 2 - (at.y + Math.min(at.height, h / scale) / 2) * scale };
  place(state);
}

// The whole of it where that can be read, or where it was asked for; else from the first box on.
function fit(state, all = false) {
  const { width, height, at } = state.layout;
  const { clientWidth: w, clientHeight: h } = state.picture;
  if (!w || !h) return;
  const whole = Math.min(w / width, h / height);
  const scale = Math.min(1.1, all || whole > 0.6 ? whole : 0.85);
  const first = [...at.values()].reduce((a, b) => (b.y < a.y ? b : a));
  const isNarrow = width * scale <= w;
  const x = isNarrow ? (w - width * scale) / 2 : w / 2 - (first.x + first.width / 2) * scale;
  state.box = { scale, x, y: Math.max(0, (h - height * scale) / 2) };
  place(state);
}

function place(state) {
  const { x, y, scale } = state.box;
  const moved = `translate(${x.toFixed(2)} ${y.toFixed(2)}) scale(${scale.toFixed(4)})`;
  state.layer.setAttribute("transform", moved);
}
