// Bars on lanes over a time axis: flame charts and timelines. Only what is in sight is drawn.

const LANE = 20,
  MAX_BARS = 2500;

// lanes: names; items: {lane, start, end, name, color, title, faint}; times in seconds.
function laneChart(lanes, items, { label, gutter = 0 }) {
  const first = Math.min(...items.map((i) => i.start));
  const last = Math.max(...items.map((i) => i.end), first + 1e-6);
  const view = { from: first, to: last };
  const height = lanes.length * (LANE + 2) + 22;
  const drawing = svg("svg", { class: "lanes", height, role: "img", "aria-label": label });
  const detail = el(
    "p",
    { class: "detail", "aria-live": "polite" },
    "Point at a bar to read it. Wheel or buttons zoom, dragging moves.",
  );
  const draw = () => drawLanes(drawing, lanes, items, view, first, gutter, detail);
  const zoom = (factor, at = 0.5) => {
    const width = view.to - view.from,
      center = view.from + at * width;
    const next = Math.min(last - first, Math.max(width * factor, 1e-6));
    view.from = Math.max(first, Math.min(center - at * next, last - next));
    view.to = view.from + next;
    draw();
  };
  const move = (part) => {
    const width = view.to - view.from;
    view.from = Math.max(first, Math.min(view.from + part * width, last - width));
    view.to = view.from + width;
    draw();
  };
  drawing.addEventListener(
    "wheel",
    (event) => {
      event.preventDefault();
      const box = drawing.getBoundingClientRect();
      zoom(
        event.deltaY > 0 ? 1.25 : 0.8,
        Math.max(0, (event.clientX - box.left - gutter) / (box.width - gutter)),
      );
    },
    { passive: false },
  );
  dragging(drawing, (dx) => move(-dx / Math.max(1, drawing.clientWidth - gutter)));
  const bar = el(
    "div",
    { class: "bar" },
    button("Zoom in", "+", () => zoom(0.5)),
    button("Zoom out", "−", () => zoom(2)),
    button("Earlier", "←", () => move(-0.3)),
    button("Later", "→", () => move(0.3)),
    button("Show all", "All", () => {
      view.from = first;
      view.to = last;
      draw();
    }),
  );
  new ResizeObserver(() => draw()).observe(drawing);
  return el("div", { class: "chart" }, bar, drawing, detail);
}

function button(title, text, onclick) {
  return el("button", { type: "button", title, "aria-label": title, onclick }, text);
}

function dragging(target, onmove) {
  let last = null;
  target.addEventListener("pointerdown", (e) => {
    last = { x: e.clientX, y: e.clientY, moved: false };
  });
  target.addEventListener("pointermove", (e) => {
    if (!last || !(e.buttons & 1)) return;
    const dx = e.clientX - last.x,
      dy = e.clientY - last.y;
    if (!last.moved && Math.hypot(dx, dy) < 4) return;
    if (!last.moved) target.setPointerCapture(e.pointerId);
    last = { x: e.clientX, y: e.clientY, moved: true };
    target.dataset.moved = "1";
    onmove(dx, dy);
  });
  const end = () => {
    last = null;
    setTimeout(() => delete target.dataset.moved, 0);
  };
  target.addEventListener("pointerup", end);
  target.addEventListener("pointercancel", end);
}

function drawLanes(drawing, lanes, items, view, origin, gutter, detail) {
  const width = Math.max(200, drawing.clientWidth),
    inner = width - gutter;
  const x = (t) => gutter + ((t - view.from) / (view.to - view.from)) * inner;
  const parts = ticks(view, origin).map(([t, name]) =>
    svg(
      "g",
      {},
      svg("line", {
        x1: x(t),
        x2: x(t),
        y1: 16,
        y2: 22 + lanes.length * (LANE + 2),
        class: "tick",
      }),
      svg("text", { x: x(t) + 3, y: 11, class: "axis" }, name),
    ),
  );
  let drawn = 0;
  const edge = new Map(); // right edge drawn per lane: bars thinner than a pixel are joined
  for (const item of items) {
    if (item.end < view.from || item.start > view.to || drawn > MAX_BARS) continue;
    const a = Math.max(x(item.start), gutter),
      b = Math.min(x(item.end), width);
    const key = item.lane + (item.faint ? "f" : "");
    if (b - a < 1 && edge.get(key) >= b) continue;
    edge.set(key, Math.max(a + 1, b));
    drawn++;
    parts.push(laneBar(item, a, Math.max(1, b - a), detail));
  }
  lanes.forEach(
    (name, i) =>
      name &&
      gutter &&
      parts.push(svg("text", { x: 0, y: 22 + i * (LANE + 2) + 14, class: "lane" }, name)),
  );
  drawing.setAttribute("viewBox", `0 0 ${width} ${drawing.getAttribute("height")}`);
  drawing.replaceChildren(...parts);
}

function laneBar(item, x, width, detail) {
  const y = 22 + item.lane * (LANE + 2);
  const room = Math.floor((width - 6) / 6.3);
  const text =
    room >= 3 ? (item.name.length > room ? item.name.slice(0, room - 1) + "…" : item.name) : "";
  const show = () => {
    detail.textContent = item.title;
  };
  return svg(
    "g",
    { onpointerenter: show, onclick: show },
    svg(
      "rect",
      { x, y, width, height: LANE, class: "b " + item.color },
      svg("title", {}, item.title),
    ),
    text && svg("text", { x: x + 3, y: y + 14, class: "in" }, text),
  );
}

function ticks(view, origin) {
  const rough = (view.to - view.from) / 6;
  const base = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * base).find((s) => s >= rough);
  const found = [];
  for (let n = Math.ceil((view.from - origin) / step); origin + n * step <= view.to; n++) {
    found.push([origin + n * step, n === 0 ? "0" : seconds(n * step)]);
  }
  return found;
}

// Spans on lanes by what lies inside what; the depth of the record is the depth of its events,
// of which some may be missing.
function flame(spans) {
  const items = [],
    open = [];
  const sorted = [...spans].sort(
    (a, b) => a.start_us - b.start_us || b.duration_us - a.duration_us,
  );
  for (const span of sorted) {
    const end = span.start_us + span.duration_us;
    while (open.length && open.at(-1).end_us <= span.start_us + 1e-3) open.pop();
    const item = {
      span,
      end_us: end,
      self_us: span.duration_us,
      lane: open.length,
      name: span.name,
      start: span.start_us / 1e6,
      end: end / 1e6,
      color: "c" + (hash(span.name) % 6),
      title: `${span.name}: ${seconds(span.duration_us / 1e6)}`,
    };
    if (open.length)
      open.at(-1).self_us -= Math.max(0, Math.min(end, open.at(-1).end_us) - span.start_us);
    items.push(item);
    open.push(item);
  }
  return items;
}

function hash(text) {
  let h = 7;
  for (let i = 0; i < text.length; i++) h = (h * 31 + text.charCodeAt(i)) >>> 0;
  return h;
}

function flameChart(spans, label) {
  const items = flame(spans);
  const depth = Math.max(...items.map((i) => i.lane)) + 1;
  return laneChart(Array(depth).fill(""), items, { label });
}
