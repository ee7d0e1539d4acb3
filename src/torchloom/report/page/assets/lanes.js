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

function stretchOf(bars) {
  const from = bars.reduce((t, bar) => Math.min(t, bar.start), Infinity);
  return { from, to: bars.reduce((t, bar) => Math.max(t, bar.end), from + SHORTEST) };
}

// bars: {lane, start, end, name, color, title, thin}, in seconds; view: what is in sight, from and
// to, with the origin from which times count; onview: called with what is to be in sight.
function Lanes({ lanes, bars, label, gutter = 0, view, onview }) {
  const box = useRef();
  const width = Math.max(200, useWidth(box));
  const [chosen, setChosen] = useState(null);
  const [told, setTold] = useState(LANE_HELP);
  const whole = useMemo(() => stretchOf(bars), [bars]);
  const long = view.to - view.from;

  const show = (from, to) => {
    const size = Math.min(whole.to - whole.from, Math.max(to - from, SHORTEST));
    const begin = Math.max(whole.from, Math.min(from, whole.to - size));
    onview({ ...view, from: begin, to: begin + size });
  };
  const zoom = (factor, at = 0.5) => {
    const size = Math.max(long * factor, SHORTEST);
    const begin = view.from + at * (long - size);
    show(begin, begin + size);
  };
  const move = (part) => show(view.from + part * long, view.to + part * long);
  const showAll = () => show(whole.from, whole.to);
  const choose = (bar) => {
    setChosen(bar);
    setTold(bar.title);
  };
  // To the next bar that begins after the chosen one; the chart moves along with it.
  const step = (by) => {
    const sorted = [...bars].sort((a, b) => a.start - b.start || a.lane - b.lane);
    const isIn = ({ start }) => start >= view.from && start <= view.to;
    const at = chosen ? sorted.indexOf(chosen) : sorted.findIndex(isIn) - by;
    const bar = sorted[Math.max(0, Math.min(sorted.length - 1, at + by))];
    choose(bar);
    if (!isIn(bar)) show(bar.start - long / 10, bar.start + 0.9 * long);
  };

  const onwheel = (event) => {
    const isWhole = long >= (whole.to - whole.from) * 0.999;
    const isSideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
    if (isWhole && (isSideways || event.deltaY > 0)) return; // nothing to do: the page scrolls
    event.preventDefault();
    const { left } = box.current.getBoundingClientRect();
    const at = Math.max(0, (event.clientX - left - gutter) / (width - gutter));
    if (isSideways) move(Math.sign(event.deltaX || event.deltaY) * 0.1);
    else zoom(event.deltaY > 0 ? 1.25 : 0.8, at);
  };
  const onkeydown = onKeys({
    ArrowLeft: () => move(-0.2),
    ArrowRight: () => move(0.2),
    "+": () => zoom(0.5),
    "=": () => zoom(0.5),
    "-": () => zoom(2),
    0: showAll,
    n: () => step(1),
    p: () => step(-1),
  });
  const dragging = useDragging((dx) => move(-dx / Math.max(1, width - gutter)));
  const height = lanes.length * LANE_STEP + LANES_TOP;
  const picture = { class: "lanes", height, viewBox: `0 0 ${width} ${height}`, role: "group" };
  return html`<div class="chart">
    <div class="bar">
      <${Button} title="Zoom in" text="+" onclick=${() => zoom(0.5)} />
      <${Button} title="Zoom out" text="−" onclick=${() => zoom(2)} />
      <${Button} title="Earlier" text="←" onclick=${() => move(-0.3)} />
      <${Button} title="Later" text="→" onclick=${() => move(0.3)} />
      <${Button} title="Show all" text="All" onclick=${showAll} />
    </div>
    <svg
      ...${{ ...picture, ...dragging, onwheel, onkeydown, tabindex: 0 }}
      aria-label="${label}. ${LANE_HELP}"
      ref=${box}
    >
      <${LaneBars} ...${{ lanes, bars, gutter, view, width, chosen, choose, setTold }} />
    </svg>
    <p class="detail" aria-live="polite">${told}</p>
  </div>`;
}

function LaneBars({ lanes, bars, gutter, view, width, chosen, choose, setTold }) {
  const long = view.to - view.from;
  const x = (t) => gutter + ((t - view.from) / long) * (width - gutter);
  const bottom = LANES_TOP + lanes.length * LANE_STEP;
  const edge = new Map(); // right edge drawn per lane: bars thinner than a pixel are joined
  const shown = [];
  for (const bar of bars) {
    if (bar.end < view.from || bar.start > view.to) continue;
    const [a, b] = [Math.max(x(bar.start), gutter), Math.min(x(bar.end), width)];
    const key = bar.lane + (bar.thin ? "t" : "");
    if (bar !== chosen && b - a < 1 && edge.get(key) >= b) continue;
    edge.set(key, Math.max(a + 1, b));
    shown.push({ bar, from: a, size: Math.max(1, b - a), nameEnd: x(bar.nameEnd ?? bar.end) });
  }
  const more = shown.length - MAX_BARS;
  const acts = (bar) => ({ onpointerenter: () => setTold(bar.title), onclick: () => choose(bar) });
  return html`${ticks(view, width - gutter).map(
      ([t, name]) => html`<g>
        <line x1=${x(t)} x2=${x(t)} y1="16" y2=${bottom} class="tick" />
        ${x(t) + 3 + name.length * LANE_LETTER < width &&
        html`<text x=${x(t) + 3} y="11" class="axis">${name}</text>`}
      </g>`,
    )}
    ${shown
      .slice(0, MAX_BARS)
      .map((each) => html`<${LaneBar} ...${each} chosen=${chosen} acts=${acts(each.bar)} />`)}
    ${lanes.map(
      (name, i) =>
        name &&
        gutter > 0 &&
        html`<text x="0" y=${LANES_TOP + i * LANE_STEP + 14} class="lane">${name}</text>`,
    )}
    ${more > 0 &&
    html`<text x=${gutter + 4} y=${bottom - 4} class="lane">
      ${more} more bars are not drawn: zoom in to see them
    </text>`}`;
}

// Thin bars lie at the lower edge of their lane, with their name above them.
function LaneBar({ bar, from, size, nameEnd, chosen, acts }) {
  const y = LANES_TOP + bar.lane * LANE_STEP;
  const height = bar.thin ? THIN : LANE;
  const end = Math.max(from, Math.min(nameEnd, from + size));
  const room = Math.floor((end - from - 6) / LANE_LETTER);
  const name = bar.name.length > room ? bar.name.slice(0, room - 1) + "…" : bar.name;
  const kind = (bar.thin ? "thin" : "full") + (bar === chosen ? " chosen" : "");
  const look = `b ${bar.color}${size < SLIM ? " slim" : ""}`;
  return html`<g class=${kind} ...${acts}>
    ${bar.thin &&
    html`<rect x=${from} y=${y} width=${size} height=${LANE - THIN} class="catch" />`}
    <rect x=${from} y=${y + LANE - height} width=${size} height=${height} class=${look}>
      <title>${bar.title}</title>
    </rect>
    ${room >= 3 &&
    html`<text x=${from + 3} y=${y + (bar.thin ? 10 : 14)} class="in">${name}</text>`}
  </g>`;
}

const TICK_ROOM = 100; // pixels: the longest label and a gap
const TICK_UNITS = [
  ["s", 1],
  ["ms", 1e-3],
  ["µs", 1e-6],
];

// Round times with labels in one unit, with as many digits as tell neighbours apart.
function ticks({ from, to, origin }, room) {
  const rough = (to - from) / Math.max(2, Math.min(8, room / TICK_ROOM));
  const base = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * base).find((s) => s >= rough);
  const far = Math.max(Math.abs(from - origin), Math.abs(to - origin));
  const [unit, size] = TICK_UNITS.find(([, s]) => far >= s) || TICK_UNITS.at(-1);
  const digits = Math.max(0, Math.ceil(-Math.log10(step / size) - 1e-6));
  const found = [];
  for (let n = Math.ceil((from - origin) / step); origin + n * step <= to; n++) {
    const name = n === 0 ? "0" : `${((n * step) / size).toFixed(digits)} ${unit}`;
    found.push([origin + n * step, name]);
  }
  return found;
}

// The spans of a compile, by what lies inside what.
function Flame({ bars }) {
  const [view, setView] = useState(() => ({ ...stretchOf(bars), origin: stretchOf(bars).from }));
  const depth = bars.reduce((n, bar) => Math.max(n, bar.lane), 0) + 1;
  const lanes = Array(depth).fill("");
  const label = "flame chart of the compile";
  return html`<${Lanes} ...${{ lanes, bars, label, view }} onview=${setView} />`;
}
