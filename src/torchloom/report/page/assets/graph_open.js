// Opening and closing groups, and finding nodes, also those inside closed groups.

function expandAll(state) {
  let level = state.root.children;
  let size = visible(state.root, state.open).boxes.length;
  let isCut = false;
  while (level.length && !isCut) {
    const next = [];
    for (const item of level.filter((i) => i.children)) {
      if (!state.open.has(item.id)) {
        if (size + item.children.length - 1 > SHOWN_MOST) {
          isCut = true;
          continue;
        }
        size += item.children.length - 1;
        state.open.add(item.id);
      }
      next.push(...item.children);
    }
    level = next;
  }
  drawGraph(state);
  fit(state);
  if (isCut) {
    state.told.textContent +=
      `; some groups stay closed, as more than ${SHOWN_MOST} boxes at once would be slow: ` +
      "close others to open them";
  }
}

function toggle(state, item) {
  const before = state.layout.at.get(item.id);
  if (state.open.has(item.id)) state.open.delete(item.id);
  else if (state.shown.boxes.length + item.children.length - 1 > SHOWN_MOST) {
    state.told.textContent =
      `Not opened: more than ${SHOWN_MOST} boxes at once would be slow. ` +
      "Close another group first, or Collapse all.";
    return;
  } else state.open.add(item.id);
  drawGraph(state);
  const after = state.layout.at.get(item.id);
  if (before && after) {
    // What was clicked stays under the pointer.
    const { scale } = state.box;
    moveBy(state, (before.x - after.x) * scale, (before.y - after.y) * scale);
  }
  choose(state, item);
}

function choose(state, item) {
  state.chosen = item.id;
  mark(state);
  const detail = item.node ? nodeDetail(state, item) : groupDetail(state, item);
  state.detail.replaceChildren(...detail);
}

function findNodes(state, word) {
  const low = word.toLowerCase();
  const holds = (n) => n.text.toLowerCase().includes(low);
  state.hits = low ? state.graph.nodes.filter(holds).map((n) => n.name) : [];
  state.at = -1;
  mark(state);
  if (!low) tellShown(state);
  else if (!state.hits.length) state.told.textContent = "No node found, in closed groups either.";
  else nextHit(state, 1);
}

function nextHit(state, by) {
  if (!state.hits.length) return;
  state.at = (state.at + by + state.hits.length) % state.hits.length;
  const name = state.hits[state.at];
  const note = reveal(state, name);
  const place = `${state.at + 1} of ${count(state.hits.length, "node")} found: ${name}`;
  state.told.textContent = place + (note ? "; " + note : "");
}

// Open the groups around a node, then go to it; returns what else had to happen, as text.
function reveal(state, name) {
  const way = wayTo(state.root, name);
  const box = way.pop();
  if (!box) return "";
  const shut = way.filter((group) => !state.open.has(group.id));
  let note = "";
  if (shut.length) {
    const more = shut.reduce((n, group) => n + group.children.length - 1, 0);
    if (state.shown.boxes.length + more > SHOWN_MOST) {
      state.open.clear();
      note = "other groups were closed to make room";
    }
    for (const group of way) state.open.add(group.id);
    drawGraph(state);
    note ||= `opened ${way.at(-1).label}`;
  }
  center(state, box.id);
  choose(state, box);
  return note;
}
