// What to mend first: recompile limits, then graph breaks and recompiles, the costliest on top.

function hasFixes() {
  return data.breaks.length + recompileCauses().length + limitItems().length > 0;
}

function fixFirst() {
  const title = "What to fix first";
  if (!hasFixes()) {
    const text = data.entries.length
      ? "Nothing: no graph break and no recompile was seen."
      : "Nothing was compiled while watching, so there is nothing to fix.";
    return section(title, empty(text));
  }
  const causes = recompileCauses();
  const breaks = breakCauses();
  const items = [
    ...limitItems(),
    ...breaks.slice(0, 10).map(breakItem),
    ...causes.slice(0, 10).map(recompileItem),
  ];
  const rest = Math.max(0, breaks.length - 10) + Math.max(0, causes.length - 10);
  return section(
    title,
    el("ol", { class: "fixes" }, items),
    rest ? el("p", { class: "told" }, `and ${rest} more, at their functions`) : null,
  );
}

// Breaks of one kind that one change of habit ends, with all their places.
function breakCauses() {
  const found = new Map();
  for (const each of data.breaks) {
    const key = [each.each.gb_type || each.each.reason, each.each.hints[0]].join("\n");
    found.set(key, [...(found.get(key) || []), each]);
  }
  return [...found.values()];
}

const PLACES_NAMED = 4;

function breakItem(all) {
  const [{ each, owner }] = all;
  const times = all.reduce((n, b) => n + b.count, 0);
  const more = all.length - PLACES_NAMED;
  const places = all
    .slice(0, PLACES_NAMED)
    .flatMap((b, i) => [i ? ", " : "", el("code", {}, short(b.place))]);
  return el(
    "li",
    {},
    el("span", { class: "tag bad" }, all.length > 1 ? `${all.length} graph breaks` : "graph break"),
    " ",
    el("strong", {}, prose(each.reason)),
    " at ",
    places,
    more > 0 ? ` and ${more} more places` : "",
    times > all.length ? `, met ${times} times` : "",
    " in ",
    jump(fnHash(owner), nameOf(owner.fn)),
    each.hints.length ? el("p", { class: "fix" }, "Fix: ", prose(each.hints[0])) : null,
  );
}

function recompileItem({ item, each, entries, values, checks, followers }) {
  const few = (set) => [...set].slice(0, 4).join(", ") + (set.size > 4 ? ", ..." : "");
  return el(
    "li",
    {},
    el(
      "span",
      { class: "tag warn" },
      entries.size === 1 ? "recompile" : `${entries.size} recompiles`,
    ),
    " of ",
    jump(fnHash(item.owner), nameOf(item.owner.fn)),
    ": ",
    each.source ? [el("strong", {}, each.source), " "] : null,
    each.expected
      ? [
          "was expected as ",
          el("code", {}, few(checks)),
          values.size ? [", came as ", el("code", {}, few(values))] : null,
        ]
      : each.text,
    followers.size ? `; so did, with it, ${few(followers)}` : null,
    each.fix ? el("p", { class: "fix" }, "Fix: ", prose(each.fix)) : null,
  );
}
