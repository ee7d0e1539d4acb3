// Boxes, frames and lines as SVG, at the places that the layout gave them.

const arrowHead = html`<defs>
  <marker
    ...${{ id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 6, markerHeight: 6 }}
    orient="auto"
  >
    <path d="M0 0L8 4L0 8z" class="head" />
  </marker>
</defs>`;

// scene: what is shown and where; marked: ids of boxes with something found; acts: choose, toggle.
function GraphBoxes({ scene, chosen, marked, acts }) {
  const { shown, layout } = scene;
  const look = (id) => (marked.has(id) ? " found" : "") + (id === chosen ? " chosen" : "");
  const each = (Part, items) =>
    items.map((item) => {
      const props = { item, at: layout.at.get(item.id), look: look(item.id), acts };
      return html`<${Part} key=${item.id} ...${props} />`;
    });
  return html`<g>${each(GraphFrame, shown.frames)}</g>
    <g>
      ${layout.lines.map(
        ({ from, to, points }) => html`<path
          ...${{ d: pathOf(points), "marker-end": "url(#arrow)", "data-v": from, "data-w": to }}
          class="edge ${[from, to].includes(chosen) ? "on" : ""}"
        />`,
      )}
    </g>
    <g>${each(FrameTitle, shown.frames)}</g>
    <g>${each(GraphBox, shown.boxes)}</g>`;
}

const pathOf = (points) =>
  "M" + points.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L");

const boxProps = (item, at, acts) => ({
  "data-id": item.id,
  transform: `translate(${at.x} ${at.y})`,
  onclick: () => acts.current.choose(item),
  ondblclick: () => item.children && acts.current.toggle(item),
});

function GraphBox({ item, at, look, acts }) {
  const kind = item.node ? "k-" + item.node.kind : "k-group k-" + mainKind(item);
  const [name, what] = boxLabel(item);
  const left = item.children ? 28 : 9;
  return html`<g ...${boxProps(item, at, acts)} class="box ${kind}${look}">
    <title>${item.node ? item.node.text.slice(0, 600) : item.label}</title>
    <rect width=${at.width} height=${at.height} rx=${item.node ? 3 : 7} />
    <text x=${left} y="16" class="name">${name}</text>
    <text x=${left} y="30" class="what">${what}</text>
    ${item.children && html`<${Toggle} ...${{ item, acts }} sign="+" what="Open this group" />`}
  </g>`;
}

const frameName = (item) => `${item.label}  (${count(item.nodes.length, "node")})`;

function GraphFrame({ item, at, look, acts }) {
  return html`<g ...${boxProps(item, at, acts)} class="frame${look}">
    <title>${frameName(item)}</title>
    <rect width=${at.width} height=${at.height} rx="8" />
  </g>`;
}

// Above the lines, some of which pass the upper edge of the frame.
function FrameTitle({ item, at, acts }) {
  const room = Math.floor((at.width - 36) / NAME_WIDTH);
  const whole = frameName(item);
  const cut = item.label.length > room ? item.label.slice(0, room - 1) + "…" : item.label;
  return html`<g ...${boxProps(item, at, acts)} class="frame-title">
    <title>${whole}</title>
    <text x="28" y="17" class="name">${whole.length <= room ? whole : cut}</text>
    <${Toggle} ...${{ item, acts }} sign="−" what="Close this group" />
  </g>`;
}

function Toggle({ item, acts, sign, what }) {
  const onclick = (event) => {
    event.stopPropagation();
    acts.current.toggle(item);
  };
  return html`<g class="toggle" onclick=${onclick} ondblclick=${(event) => event.stopPropagation()}>
    <title>${what}</title>
    <rect x="6" y="5" width="16" height="16" rx="3" />
    <text x="14" y="17" text-anchor="middle">${sign}</text>
  </g>`;
}

// A closed group takes the colour of the rarest thing inside it that a reader looks for.
function mainKind(item) {
  const inside = new Set(item.nodes.map((n) => n.kind));
  return ["layer", "offload", "reduce", "gather", "output"].find((k) => inside.has(k)) || "plain";
}
