// Beside the picture: what is known of the box that was chosen.

const USERS_SHOWN = 30;

function firstDetail() {
  return el(
    "p",
    { class: "detail" },
    "Click a box for its details. The + of a group opens it, the − of a frame closes it. ",
    "By keyboard: n and p choose a box, Enter opens or closes a group, arrows move, ",
    "+ and - zoom, 0 fits.",
  );
}

function nodeDetail(state, item) {
  const n = item.node;
  const goTo = (name) =>
    el("button", { type: "button", class: "plain", onclick: () => reveal(state, name) }, name);
  const users = state.users.get(n.name) || [];
  const more = users.length > USERS_SHOWN ? ` and ${users.length - USERS_SHOWN} more` : "";
  return [
    el("h3", {}, n.name),
    pairs([
      ["kind", n.kind],
      ["operator", n.target],
      ["result", n.shape],
      ["module", n.module],
      ["user line", n.source && `${short(n.source.place)} in ${n.source.where}`],
      ["code", n.source && el("code", {}, n.source.code)],
      ["reads", n.inputs.length ? n.inputs.map(goTo) : "nothing"],
      ["waits for", n.after.length ? n.after.map(goTo) : null],
      ["read by", users.length ? [users.slice(0, USERS_SHOWN).map(goTo), more] : "nothing"],
      ["text", el("code", { class: "wrap" }, n.text)],
    ]),
    el(
      "p",
      { class: "bar" },
      el("button", { type: "button", onclick: () => state.showLine(n.line) }, "Show in the text"),
      openLayer(state, n),
      closeAround(state, item, "Close its group"),
    ),
  ];
}

function groupDetail(state, item) {
  const kinds = new Map();
  for (const n of item.nodes) kinds.set(n.kind, (kinds.get(n.kind) || 0) + 1);
  const isOpen = state.open.has(item.id);
  return [
    el("h3", {}, item.label),
    pairs([
      ["nodes", item.nodes.length],
      ["kinds", [...kinds].map(([k, n]) => `${n} ${k}`).join(", ")],
      ["from", item.nodes[0].name],
      ["to", item.nodes.at(-1).name],
    ]),
    el(
      "p",
      { class: "bar" },
      el(
        "button",
        { type: "button", onclick: () => toggle(state, item) },
        isOpen ? "Close this group" : "Open this group",
      ),
      openLayer(
        state,
        item.nodes.find((n) => n.kind === "layer"),
      ),
      closeAround(state, item, "Close what it is in"),
    ),
  ];
}

// To the graph of what a call stands for, where the record has it.
function openLayer(state, node) {
  if (!node || !state.showBody(node, true)) return null;
  const open = () => state.showBody(node);
  return el("button", { type: "button", onclick: open }, "Open the layer");
}

function closeAround(state, item, text) {
  const parent = state.parents.get(item.id);
  if (!parent || parent === state.root) return null;
  return el("button", { type: "button", onclick: () => toggle(state, parent) }, text);
}
