// Beside the picture: what is known of the box that was chosen.

const USERS_SHOWN = 30;

function GraphDetail({ item, graph, isOpen, parent, acts }) {
  if (!item) {
    return html`<p class="detail">
      Click a box for its details. The + of a group opens it, the − of a frame closes it. By
      keyboard: n and p choose a box, Enter opens or closes a group, arrows move, + and - zoom, 0
      fits.
    </p>`;
  }
  const isNode = Boolean(item.node);
  const layer = isNode ? item.node : item.nodes.find((n) => n.kind === "layer");
  const press = (text, onclick) => html`<button type="button" onclick=${onclick}>${text}</button>`;
  const { toggle, showLine, showBody, bodyFor } = acts.current;
  const body = layer && bodyFor(layer);
  return html`<h3>${isNode ? item.node.name : item.label}</h3>
    <dl>
      ${(isNode ? nodeFacts(item.node, graph, acts) : groupFacts(item))
        .filter(([, value]) => value)
        .map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}
    </dl>
    <p class="bar">
      ${isNode
        ? press("Show in the text", () => showLine(item.node.line))
        : press(isOpen ? "Close this group" : "Open this group", () => toggle(item))}
      ${body && press("Open the layer", () => showBody(body))}
      ${parent &&
      press(isNode ? "Close its group" : "Close what it is in", () => toggle(parent))}
    </p>`;
}

function nodeFacts(n, graph, acts) {
  const goTo = (name) => html`<button
    ...${{ type: "button", class: "plain", onclick: () => acts.current.reveal(name) }}
  >
    ${name}
  </button>`;
  const users = graph.filter((other) => other.inputs.includes(n.name)).map((other) => other.name);
  const more = users.length > USERS_SHOWN ? ` and ${users.length - USERS_SHOWN} more` : "";
  const { place, where, code } = n.source || {};
  return [
    ["kind", n.kind],
    ["operator", n.target],
    ["result", n.shape],
    ["module", n.module],
    ["user line", place && `${place.split("/").slice(-3).join("/")} in ${where}`],
    ["code", code && html`<code>${code}</code>`],
    ["reads", n.inputs.length ? n.inputs.map(goTo) : "nothing"],
    ["waits for", n.after.length > 0 && n.after.map(goTo)],
    ["read by", users.length ? [...users.slice(0, USERS_SHOWN).map(goTo), more] : "nothing"],
    ["text", html`<code class="wrap">${n.text}</code>`],
  ];
}

function groupFacts({ nodes }) {
  const kinds = new Map();
  for (const n of nodes) kinds.set(n.kind, (kinds.get(n.kind) || 0) + 1);
  return [
    ["nodes", String(nodes.length)],
    ["kinds", [...kinds].map(([kind, n]) => `${n} ${kind}`).join(", ")],
    ["from", nodes[0].name],
    ["to", nodes.at(-1).name],
  ];
}
