// Boxes, frames and lines as SVG, at the places that the layout gave them.

function arrowHead() {
  const marker = {
    id: "arrow",
    viewBox: "0 0 8 8",
    refX: 7,
    refY: 4,
    markerWidth: 6,
    markerHeight: 6,
    orient: "auto",
  };
  return svg("defs", {}, svg("marker", marker, svg("path", { d: "M0 0L8 4L0 8z", class: "head" })));
}

function drawGraph(state) {
  state.shown = visible(state.root, state.open);
  state.layout = layoutGraph(state.graph, state.root, state.shown, state.layouts);
  const frames = state.shown.frames.map((item) => drawFrame(state, item));
  const lines = state.layout.lines.map((line) =>
    svg("path", {
      d: path(line.points),
      class: "edge",
      "marker-end": "url(#arrow)",
      "data-v": line.from,
      "data-w": line.to,
    }),
  );
  const titles = state.shown.frames.map((item) => drawTitle(state, item));
  const boxes = state.shown.boxes.map((item) => drawBox(state, item));
  const layers = [frames, lines, titles, boxes].map((parts) => svg("g", {}, parts));
  state.layer.replaceChildren(...layers);
  tellShown(state);
  mark(state);
}

// What is in sight, what is not, and how to see that.
function tellShown(state) {
  const { boxes } = state.shown;
  const closed = boxes.filter((item) => item.children);
  const hidden = closed.reduce((n, item) => n + item.nodes.length, 0);
  const parts = [`${count(state.graph.nodes.length - hidden, "node")} shown`];
  if (hidden) {
    parts.push(
      `${hidden} inside ${count(closed.length, "closed group")}: ` +
        "the + of a group opens it, Find reaches into all of them",
    );
  }
  if (state.layout.hidden) parts.push(`${state.layout.hidden} lines to the output are left out`);
  state.told.textContent = parts.join("; ");
}

function path(points) {
  const [first, ...rest] = points.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`);
  return `M${first}L${rest.join("L")}`;
}

function drawBox(state, item) {
  const at = state.layout.at.get(item.id);
  const kind = item.node ? "k-" + item.node.kind : "k-group k-" + mainKind(item);
  const [name, what] = boxLabel(item);
  const left = item.children ? 28 : 9;
  return svg(
    "g",
    { ...handlers(state, item), class: "box " + kind, transform: `translate(${at.x} ${at.y})` },
    svg("title", {}, item.node ? item.node.text.slice(0, 600) : item.label),
    svg("rect", { width: at.width, height: at.height, rx: item.node ? 3 : 7 }),
    svg("text", { x: left, y: 16, class: "name" }, name),
    svg("text", { x: left, y: 30, class: "what" }, what),
    item.children && drawToggle(state, item, "+", "Open this group"),
  );
}

function drawFrame(state, item) {
  const at = state.layout.at.get(item.id);
  return svg(
    "g",
    { ...handlers(state, item), class: "frame", transform: `translate(${at.x} ${at.y})` },
    svg("title", {}, frameName(item)),
    svg("rect", { width: at.width, height: at.height, rx: 8 }),
  );
}

// Above the lines, some of which pass the upper edge of the frame.
function drawTitle(state, item) {
  const at = state.layout.at.get(item.id);
  const room = Math.floor((at.width - 36) / NAME_WIDTH);
  const whole = frameName(item);
  const cut = item.label.length > room ? item.label.slice(0, room - 1) + "…" : item.label;
  return svg(
    "g",
    { ...handlers(state, item), class: "frame-title", transform: `translate(${at.x} ${at.y})` },
    svg("title", {}, whole),
    svg("text", { x: 28, y: 17, class: "name" }, whole.length <= room ? whole : cut),
    drawToggle(state, item, "−", "Close this group"),
  );
}

const frameName = (item) => `${item.label}  (${count(item.nodes.length, "node")})`;

function drawToggle(state, item, sign, what) {
  const onclick = (event) => {
    event.stopPropagation();
    if (!state.picture.dataset.moved) toggle(state, item);
  };
  return svg(
    "g",
    { class: "toggle", onclick, ondblclick: (event) => event.stopPropagation() },
    svg("title", {}, what),
    svg("rect", { x: 6, y: 5, width: 16, height: 16, rx: 3 }),
    svg("text", { x: 14, y: 17, "text-anchor": "middle" }, sign),
  );
}

function handlers(state, item) {
  return {
    "data-id": item.id,
    onclick: () => !state.picture.dataset.moved && choose(state, item),
    ondblclick: () => item.children && toggle(state, item),
  };
}

// A closed group takes the colour of the rarest thing inside it that a reader looks for.
function mainKind(item) {
  const inside = new Set(item.nodes.map((n) => n.kind));
  return ["layer", "offload", "reduce", "gather", "output"].find((k) => inside.has(k)) || "plain";
}

function mark(state) {
  const hits = new Set(state.hits.map((n) => state.shown.holder.get(n)));
  for (const box of state.layer.querySelectorAll(".box, .frame")) {
    box.classList.toggle("found", hits.has(box.dataset.id));
    box.classList.toggle("chosen", box.dataset.id === state.chosen);
  }
  for (const line of state.layer.querySelectorAll(".edge")) {
    const ends = [line.dataset.v, line.dataset.w];
    line.classList.toggle("on", ends.includes(state.chosen));
  }
}
