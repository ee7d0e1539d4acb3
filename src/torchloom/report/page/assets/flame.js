// The spans of a compile as a flame chart.

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
  return laneChart(Array(depth).fill(""), items, { label }).node;
}

// Over all entries: the time in each phase, without the phases inside it.
function phases() {
  const self = new Map();
  for (const { entry } of data.entries) {
    for (const item of flame(entry.spans)) {
      const seen = self.get(item.name) || { us: 0, n: 0 };
      seen.us += Math.max(0, item.self_us);
      seen.n++;
      self.set(item.name, seen);
    }
  }
  if (!self.size) return empty("No compile spans were recorded, so time cannot be told by phase.");
  const all = [...self].sort((a, b) => b[1].us - a[1].us);
  const total = all.reduce((s, [, v]) => s + v.us, 0),
    top = all.slice(0, 14);
  const rest = all.slice(14).reduce((s, [, v]) => s + v.us, 0);
  if (rest) top.push([`${all.length - 14} others`, { us: rest, n: 0 }]);
  const most = Math.max(...top.map(([, v]) => v.us));
  return [
    el(
      "p",
      { class: "told" },
      "Time in each phase itself, without the phases inside it, over all entries. " +
        "Each entry has a flame chart of its own.",
    ),
    el(
      "div",
      { class: "bars" },
      top.map(([name, v]) => [
        el("span", { class: "bar-name", title: name }, name),
        el(
          "span",
          { class: "bar-line" },
          el("span", { style: `width:${((100 * v.us) / most).toFixed(2)}%` }),
        ),
        el(
          "span",
          { class: "num" },
          `${seconds(v.us / 1e6)}  ${((100 * v.us) / total).toFixed(0)}%`,
        ),
      ]),
    ),
  ];
}
