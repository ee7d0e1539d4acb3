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
  const items = [
    ...limitItems(),
    ...data.breaks.slice(0, 10).map(breakItem),
    ...causes.slice(0, 10).map(recompileItem),
  ];
  const rest = Math.max(0, data.breaks.length - 10) + Math.max(0, causes.length - 10);
  return section(
    title,
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
    el("strong", {}, prose(each.reason)),
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
