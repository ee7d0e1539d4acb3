// Why entries were made: which older one was rejected, for what, and what the call brought.

// The check may not say what came; what the new entry was made for does.
function actualOf(each, item) {
  if (each.actual && each.actual !== "another value") return each.actual;
  const pinned = item.entry.trigger[each.source.replace(/^argument /, "")];
  return pinned ? pinned.replace(/^== /, "") : each.actual;
}

// One line for tables: the newest of the older entries speaks for all that were rejected alike.
function whyMade(item) {
  const all = item.entry.recompiles;
  if (!all.length) return entriesOf(item.owner)[0] === item ? "first entry" : "not recorded";
  const first = all[0];
  const actual = actualOf(first, item);
  const source = first.source ? `${first.source}: ` : "";
  const alike = all.filter((r) => r.source === first.source && r.expected !== first.expected);
  if (alike.length === all.length - 1 && alike.length && actual) {
    return `${source}got ${actual}, which none of ${all.length} older entries expects`;
  }
  const more = all.length > 1 ? ` (and ${all.length - 1} more)` : "";
  if (!first.expected) return first.text + more;
  return `${source}expected ${first.expected}, got ${actual || "another value"}${more}`;
}

// Recompiles that one fix would end: of one function about one value, or by one call to mark a size.
function recompileCauses() {
  const found = new Map();
  for (const item of data.entries) {
    for (const each of item.entry.recompiles) {
      // Without a source, the check itself names the value: `n == 'a'`.
      const named = each.expected.split(/ (?:==|!=|<=|>=|<|>|is|in) /)[0];
      const value = each.source || named || each.text;
      const fix = each.fix.replace(/^now dynamic: entry [^;]*; /, "");
      const isShared = / (?:call of|compile|compiling) /.test(` ${fix}`);
      const key = isShared ? fix : [item.owner.id, value, each.fix].join("\n");
      if (!found.has(key)) {
        const sets = { entries: new Set(), values: new Set(), checks: new Set() };
        found.set(key, { item, each, value, followers: new Set(), ...sets });
      }
      const seen = found.get(key);
      const actual = actualOf(each, item);
      seen.entries.add(item);
      if (item.owner !== seen.item.owner || value !== seen.value) {
        seen.followers.add(`${value} of ${nameOf(item.owner.fn)}`);
        continue;
      }
      if (each.expected) seen.checks.add(each.expected.trim());
      if (actual) seen.values.add(actual);
    }
  }
  return [...found.values()].sort((a, b) => b.entries.size - a.entries.size);
}

function recompileView(item) {
  const all = item.entry.recompiles;
  if (!all.length) {
    return empty(
      entriesOf(item.owner)[0] === item
        ? "This is the first entry of its function: nothing was recompiled for it."
        : "Why older entries could not serve was not recorded.",
    );
  }
  const columns = ["older entry", "rejected for", "expected", "came as", "check"];
  const rows = all.map((r) => {
    const older = entryByName(item, r.entry);
    return [
      older ? jump(entryHash(older), r.entry) : r.entry,
      r.source,
      el("code", {}, r.expected),
      el("code", {}, actualOf(r, item)),
      el("code", { class: "sub wrap" }, r.text),
    ];
  });
  const fixes = [...new Set(all.map((r) => r.fix).filter(Boolean))];
  const list = el(
    "ul",
    {},
    fixes.map((f) => el("li", {}, prose(f))),
  );
  return [
    el("p", {}, "This entry was made because no older one could serve the call."),
    table(
      columns.map((name) => ({ name })),
      rows,
    ),
    fixes.length ? section("Fix", list) : null,
  ];
}
