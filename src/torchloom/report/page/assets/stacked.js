// A bar of parts beside the table that names them, and the layers that names of modules belong to.

// parts: {name, value, color, note}; limit: {value, name} is marked on the bar.
function stackedBar(parts, { label, show, limit = null, columns }) {
  const shown = parts.filter((p) => p.value > 0);
  const total = shown.reduce((sum, p) => sum + p.value, 0);
  const whole = Math.max(total, limit?.value || 0) || 1;
  const width = (value) => `${((100 * value) / whole).toFixed(3)}%`;
  const bar = el(
    "div",
    { class: "stacked", role: "img", "aria-label": `${label}: ${show(total)}` },
    shown.map((p) =>
      el("span", {
        class: `part ${p.color}`,
        style: `width:${width(p.value)}`,
        title: `${p.name}: ${show(p.value)}`,
      }),
    ),
    limit && el("i", { class: "limit", style: `left:${width(limit.value)}`, title: limit.name }),
  );
  const rows = shown.map((p) => [
    el("span", {}, el("span", { class: `swatch ${p.color}`, "aria-hidden": "true" }), p.name),
    show(p.value),
    `${((100 * p.value) / (total || 1)).toFixed(1)}%`,
    el("span", { class: "faint" }, p.note || ""),
  ]);
  const [first, second] = columns;
  return [
    bar,
    table(
      [
        { name: first },
        { name: second, class: "num" },
        { name: "share", class: "num" },
        { name: "what it is" },
      ],
      rows,
      { class: "parts" },
    ),
  ];
}

const moduleOf = (param) => param.slice(0, Math.max(0, param.lastIndexOf(".")));

// The repeated block that a module lies in: `layers.3.attention.wq` is in `layers.3`.
function blockOf(layer) {
  const numbered = /^(.*?\.\d+|\d+)(?=\.|$)/.exec(layer);
  return numbered ? numbered[0] : layer.split(".")[0];
}

// The block that all parameters of a collective lie in, or from which to which they reach.
function movedLayer(params) {
  if (!params.length) return "not recorded";
  const blocks = [...new Set(params.map((name) => blockOf(moduleOf(name) || name)))];
  return blocks.length === 1 ? blocks[0] : `${blocks[0]} … ${blocks.at(-1)}`;
}

// What a collective carries, in few words: one layer, or from where to where.
function carried(params) {
  if (!params.length) return "not recorded";
  if (params.length === 1) return params[0];
  const layers = [...new Set(params.map(moduleOf))];
  const many = count(params.length, "parameter");
  if (layers.length === 1) return `${layers[0] || "model"} (${many})`;
  const blocks = [...new Set(layers.map(blockOf))];
  if (blocks.length === 1) return `${blocks[0]} (${many})`;
  return `${blocks[0]} … ${blocks.at(-1)} (${many})`;
}
