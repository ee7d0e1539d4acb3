// Lines over steps or nodes, drawn by uPlot: zoomed by dragging, reset by a double click.

const NUM_INKS = 7; // colours --i0 to --i6
const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3], [5, 2]];
const BINARY = Array.from({ length: 50 }, (_, i) => 2 ** i);
const SHOWN = { bytes, number: (n) => (n ? rounded(n) : "0") };

// series: {label, ys}, one y for each x, null where there is none; shows: "bytes" or "number".
function LineChart(props) {
  const box = useRef();
  const width = useWidth(box);
  useLayoutEffect(() => {
    if (!width) return;
    let chart = null;
    const redraw = () => {
      chart?.destroy();
      chart = plot(box.current, width, props);
    };
    redraw();
    document.addEventListener("themechange", redraw);
    return () => {
      chart.destroy();
      document.removeEventListener("themechange", redraw);
    };
  }, [width, props.xs]);
  return html`<figure class="memory" ref=${box}><figcaption>${props.title}</figcaption></figure>`;
}

// Charts on canvas take their colours and width when drawn.
function plot(box, width, { x, xs, series, shows, small = false }) {
  const style = getComputedStyle(document.body);
  const tone = (name) => style.getPropertyValue("--" + name).trim();
  const grid = { stroke: tone("line"), width: 1 };
  const axis = { stroke: tone("ink"), grid, ticks: grid };
  const show = SHOWN[shows];
  const lines = series.map(({ label }, i) => ({
    label,
    stroke: tone("i" + (i % NUM_INKS)),
    width: 1.6,
    dash: DASHES[i % DASHES.length],
    spanGaps: true,
    points: { show: xs.length < 30, size: 5 },
    value: (_, v) => (v === null || v === undefined ? "" : show(v)),
  }));
  const options = {
    width: Math.max(260, width),
    height: small ? 170 : 260,
    legend: { show: series.length > 1 || !small, live: width > 500 },
    scales: { x: { time: false } },
    axes: [
      small ? { ...axis, size: 28 } : { ...axis, label: x, labelSize: 22 },
      {
        ...axis,
        size: small ? 66 : 74,
        incrs: shows === "bytes" ? BINARY : undefined,
        values: (_, v) => v.map(show),
      },
    ],
    series: [{ label: x.split(" ")[0] }, ...lines],
  };
  return new uPlot(options, [xs, ...series.map(({ ys }) => ys)], box);
}
