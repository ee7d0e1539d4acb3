// Bars on lanes over a time axis: flame charts and timelines. Only what is in sight is drawn.

const LANE = 20;
const LANE_STEP = LANE + 2;
const LANES_TOP = 22;
const THIN = 7;
const SLIM = 4; // pixels: the edge between neighbours would hide what is narrower
const LANE_LETTER = 6.7;
const MAX_BARS = 2500;
const SHORTEST = 1e-5; // seconds in sight at most zoom: times of day are exact to 0.2 µs
const LANE_HELP =
  "Point at a bar to read it. Wheel or + and − zoom, dragging or arrow keys move, " +
  "n and p go from bar to bar, 0 shows all.";

// lanes: names; items: {lane, start, end, name, color, title, thin}; times in seconds.
// start: what is in sight at first, as [from, to]; onview: called with that when it changes.
// Returns {node, show}: show(from, to, origin) brings a stretch of time into sight; times count from origin.
function laneChart(lanes, items, { label, gutter = 0, start = null, onview = null }) {
  const first = items.reduce((t, i) => Math.min(t, i.start), Infinity);
  const last = items.reduce((t, i) => Math.max(t, i.end), first + SHORTEST);
  const height = lanes.length * LANE_STEP + LANES_TOP;
  const drawing = svg("svg", {
    class: "lanes",
    height,
    role: "group",
    tabindex: "0",
    "aria-label": `${label}. ${LANE_HELP}`,
  });
  const detail = el("p", { class: "detail", "aria-live": "polite" }, LANE_HELP);
  const chart = { lanes, items, gutter, first, last, origin: first, drawing, detail, onview, chosen: null };
  chart.view = { from: first, to: last };
  laneListen(chart);
  const node = el("div", { class: "chart" }, laneBar(chart), drawing, detail);
  const show = (from, to, origin = first) => {
    chart.origin = origin;
    laneShow(chart, from, to);
  };
  if (start) show(...start);
  new ResizeObserver(() => drawLanes(chart)).observe(drawing);
  return { node, show };
}

function laneShow(chart, from, to) {
  const whole = chart.last - chart.first;
  const width = Math.min(whole, Math.max(to - from, SHORTEST));
  const begin = Math.max(chart.first, Math.min(from, chart.last - width));
  chart.view = { from: begin, to: begin + width };
  drawLanes(chart);
  chart.onview?.(chart.view);
}

function laneZoom(chart, factor, at = 0.5) {
  const { from, to } = chart.view;
  const width = Math.max((to - from) * factor, SHORTEST);
  const begin = from + at * (to - from) - at * width;
  laneShow(chart, begin, begin + width);
}

function laneMove(chart, part) {
  const { from, to } = chart.view;
  laneShow(chart, from + part * (to - from), to + part * (to - from));
}

function laneBar(chart) {
  return el(
    "div",
    { class: "bar" },
    button("Zoom in", "+", () => laneZoom(chart, 0.5)),
    button("Zoom out", "−", () => laneZoom(chart, 2)),
    button("Earlier", "←", () => laneMove(chart, -0.3)),
    button("Later", "→", () => laneMove(chart, 0.3)),
    button("Show all", "All", () => laneShow(chart, chart.first, chart.last)),
  );
}

function laneListen(chart) {
  const { drawing, gutter } = chart;
  drawing.addEventListener(
    "wheel",
    (event) => {
      const isWhole = chart.view.to - chart.view.from >= (chart.last - chart.first) * 0.999;
      const sideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
      if (isWhole && (sideways || event.deltaY > 0)) return; // nothing to do: the page scrolls
      event.preventDefault();
      const box = drawing.getBoundingClientRect();
      const at = Math.max(0, (event.clientX - box.left - gutter) / (box.width - gutter));
      if (sideways) laneMove(chart, Math.sign(event.deltaX || event.deltaY) * 0.1);
      else laneZoom(chart, event.deltaY > 0 ? 1.25 : 0.8, at);
    },
    { passive: false },
  );
  dragging(drawing, (dx) => laneMove(chart, -dx / Math.max(1, drawing.clientWidth - gutter)));
  onKeys(drawing, {
    ArrowLeft: () => laneMove(chart, -0.2),
    ArrowRight: () => laneMove(chart, 0.2),
    "+": () => laneZoom(chart, 0.5),
    "=": () => laneZoom(chart, 0.5),
    "-": () => laneZoom(chart, 2),
    0: () => laneShow(chart, chart.first, chart.last),
    n: () => laneStep(chart, 1),
    p: () => laneStep(chart, -1),
  });
}

// To the next bar that begins after the chosen one; the chart moves along with it.
function laneStep(chart, by) {
  const { from, to } = chart.view;
  const sorted = [...chart.items].sort((a, b) => a.start - b.start || a.lane - b.lane);
  let at = sorted.indexOf(chart.chosen);
  if (at < 0) at = sorted.findIndex((i) => i.start >= from && i.start <= to) - by;
  const item = sorted[Math.max(0, Math.min(sorted.length - 1, at + by))];
  laneChoose(chart, item);
  if (item.start < from || item.start > to) {
    laneShow(chart, item.start - (to - from) / 10, item.start + ((to - from) * 9) / 10);
  } else drawLanes(chart);
}

function laneChoose(chart, item) {
  chart.chosen = item;
  chart.detail.textContent = item.title;
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

function drawLanes(chart) {
  const { drawing, lanes, view, gutter } = chart;
  const width = Math.max(200, drawing.clientWidth);
  const x = (t) => gutter + ((t - view.from) / (view.to - view.from)) * (width - gutter);
  const parts = ticks(view, chart.origin, width - gutter).map(([t, name]) =>
    svg(
      "g",
      {},
      svg("line", {
        x1: x(t),
        x2: x(t),
        y1: 16,
        y2: LANES_TOP + lanes.length * LANE_STEP,
        class: "tick",
      }),
      x(t) + 3 + name.length * LANE_LETTER < width &&
        svg("text", { x: x(t) + 3, y: 11, class: "axis" }, name),
    ),
  );
  let drawn = 0;
  const edge = new Map(); // right edge drawn per lane: bars thinner than a pixel are joined
  for (const item of chart.items) {
    if (item.end < view.from || item.start > view.to) continue;
    const a = Math.max(x(item.start), gutter);
    const b = Math.min(x(item.end), width);
    const key = item.lane + (item.thin ? "t" : "");
    if (item !== chart.chosen && b - a < 1 && edge.get(key) >= b) continue;
    if (++drawn > MAX_BARS) continue;
    edge.set(key, Math.max(a + 1, b));
    parts.push(drawBar(chart, item, a, Math.max(1, b - a), x));
  }
  lanes.forEach((name, i) => {
    const y = LANES_TOP + i * LANE_STEP + 14;
    if (name && gutter) parts.push(svg("text", { x: 0, y, class: "lane" }, name));
  });
  if (drawn > MAX_BARS) {
    const y = LANES_TOP + lanes.length * LANE_STEP - 4;
    const note = `${drawn - MAX_BARS} more bars are not drawn: zoom in to see them`;
    parts.push(svg("text", { x: gutter + 4, y, class: "lane" }, note));
  }
  drawing.setAttribute("viewBox", `0 0 ${width} ${drawing.getAttribute("height")}`);
  drawing.replaceChildren(...parts);
}

// Thin bars lie at the lower edge of their lane, with their name above them.
function drawBar(chart, item, x, width, place) {
  const y = LANES_TOP + item.lane * LANE_STEP;
  const height = item.thin ? THIN : LANE;
  const end = item.nameEnd ? Math.max(x, Math.min(place(item.nameEnd), x + width)) : x + width;
  const room = Math.floor((end - x - 6) / LANE_LETTER);
  const cut = item.name.length > room ? item.name.slice(0, room - 1) + "…" : item.name;
  const tell = () => (chart.detail.textContent = item.title);
  const pick = () => {
    laneChoose(chart, item);
    drawLanes(chart);
  };
  const chosen = item === chart.chosen ? " chosen" : "";
  return svg(
    "g",
    { onpointerenter: tell, onclick: pick, class: (item.thin ? "thin" : "full") + chosen },
    item.thin && svg("rect", { x, y, width, height: LANE - THIN, class: "catch" }),
    svg(
      "rect",
      {
        x,
        y: y + LANE - height,
        width,
        height,
        class: `b ${item.color}${width < SLIM ? " slim" : ""}`,
      },
      svg("title", {}, item.title),
    ),
    room >= 3 && svg("text", { x: x + 3, y: y + (item.thin ? 10 : 14), class: "in" }, cut),
  );
}

const TICK_ROOM = 100; // pixels: the longest label and a gap

// Round times with labels in one unit, with as many digits as tell neighbours apart.
function ticks(view, origin, room) {
  const rough = (view.to - view.from) / Math.max(2, Math.min(8, room / TICK_ROOM));
  const base = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * base).find((s) => s >= rough);
  const far = Math.max(Math.abs(view.from - origin), Math.abs(view.to - origin));
  const [unit, size] = TICK_UNITS.find(([, s]) => far >= s) || TICK_UNITS.at(-1);
  const digits = Math.max(0, Math.ceil(-Math.log10(step / size) - 1e-6));
  const found = [];
  for (let n = Math.ceil((view.from - origin) / step); origin + n * step <= view.to; n++) {
    const t = (n * step) / size;
    found.push([origin + n * step, n === 0 ? "0" : `${t.toFixed(digits)} ${unit}`]);
  }
  return found;
}

const TICK_UNITS = [
  ["s", 1],
  ["ms", 1e-3],
  ["µs", 1e-6],
];
