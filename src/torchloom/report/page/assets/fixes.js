// What to mend first: graph breaks and recompiles, those that cost most on top.

function fixFirst() {
  const items = [
    ...data.breaks.slice(0, 10).map(breakItem),
    ...recompileCauses().slice(0, 10).map(recompileItem),
  ];
  const rest = Math.max(0, data.breaks.length - 10) + Math.max(0, recompileCauses().length - 10);
  if (!items.length) {
    return section(
      "What to fix first",
      empty(
        data.entries.length
          ? "Nothing: no graph break and no recompile was seen."
          : "Nothing was compiled while watching, so there is nothing to fix.",
      ),
    );
  }
  return section(
    "What to fix first",
    el("ol", { class: "fixes" }, items),
    rest ? el("p", { class: "told" }, `and ${rest} more, at their functions`) : null,
  );
}

function breakItem({ each, place, owner, count: times }) {
  return el(
    "li",
    {},
    el("span", { class: "tag bad" }, "graph break"),
    " ",
    el("strong", {}, each.reason),
    " at ",
    el("code", {}, short(place)),
    times > 1 ? `, met ${times} times` : "",
    " in ",
    jump(fnHash(owner), nameOf(owner.fn)),
    each.hints.length ? el("p", { class: "fix" }, "Fix: ", prose(each.hints[0])) : null,
  );
}

function recompileItem({ item, each, entries, values, checks }) {
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
    each.fix ? el("p", { class: "fix" }, "Fix: ", prose(each.fix)) : null,
  );
}
