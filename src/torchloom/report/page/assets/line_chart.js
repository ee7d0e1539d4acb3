// Lines over steps or nodes, drawn by uPlot: zoomed by dragging, reset by a double click.

const NUM_INKS = 7; // colours --i0 to --i6
const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3], [5, 2]];
const BINARY = Array.from({ length: 50 }, (_, i) => 2 ** i);

// series: {label, ys}, one y for each x, null where there is none; show: text of a y.
function lineChart(title, xLabel, xs, series, { show, incrs, height = 260, size = 74 }) {
  const box = el("figure", { class: "memory" }, el("figcaption", {}, title));
  const draw = () => {
    box.querySelector(".uplot")?.remove();
    const style = getComputedStyle(document.body);
    const tone = (name) => style.getPropertyValue("--" + name).trim();
    const grid = { stroke: tone("line"), width: 1 };
    const axis = { stroke: tone("ink"), grid, ticks: grid };
    const lines = series.map(({ label }, i) => ({
      label,
      stroke: tone("i" + (i % NUM_INKS)),
      width: 1.6,
      dash: DASHES[i % DASHES.length],
      spanGaps: true,
      points: { show: xs.length < 30, size: 5 },
      value: (_, v) => (v === null || v === undefined ? "" : show(v)),
    }));
    new uPlot(
      {
        width: Math.max(260, box.clientWidth || 700),
        height,
        legend: { show: series.length > 1 || height > 200, live: (box.clientWidth || 700) > 500 },
        scales: { x: { time: false } },
        axes: [
          height > 200 ? { ...axis, label: xLabel, labelSize: 22 } : { ...axis, size: 28 },
          { ...axis, size, incrs, values: (_, v) => v.map(show) },
        ],
        series: [{ label: xLabel.split(" ")[0] }, ...lines],
      },
      [xs, ...series.map(({ ys }) => ys)],
      box,
    );
  };
  redrawOnTheme(box, draw);
  return box;
}

// Charts on canvas take their colours and width when drawn: again at each change of those.
function redrawOnTheme(box, draw) {
  let width = 0;
  new ResizeObserver(() => {
    if (box.clientWidth && Math.abs(box.clientWidth - width) > 4) {
      width = box.clientWidth;
      draw();
    }
  }).observe(box);
  document.addEventListener("themechange", () => box.isConnected && draw());
}
