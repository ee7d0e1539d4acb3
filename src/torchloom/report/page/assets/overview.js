// The first view: what was compiled, what to mend first, where the time went.

function overviewView() {
  const r = data.record;
  return [
    cards(),
    fixFirst(),
    section("Functions", functionTree()),
    section("Compile time by phase", phases()),
    el(
      "div",
      { class: "columns" },
      section(
        "Versions and machine",
        pairs([
          ["torchloom", r.torchloom],
          ["torch", r.torch],
          ["Python", r.python],
          ["platform", r.platform],
          ["device", r.device],
          ["rank", `${r.rank} of ${r.world_size}`],
          ["watched for", seconds(r.duration_s)],
          [
            "started",
            r.started_at_s
              ? new Date(r.started_at_s * 1000).toISOString().replace("T", " ").slice(0, 19) +
                " UTC"
              : "",
          ],
          ["resets of Dynamo", r.num_resets],
        ]),
      ),
      section("Settings that are not at their defaults", settings(r.config)),
      section("What watching cost", overhead()),
    ),
    r.orphans.length
      ? section(
          "Logged about no function in particular",
          r.orphans.map((o) => el("pre", { class: "text" }, o)),
        )
      : null,
    Object.keys(r.unknown).length
      ? section("Trace records that this torchloom does not read", pairs(Object.entries(r.unknown)))
      : null,
  ];
}

function cards() {
  const uses = data.entries.flatMap((e) => e.entry.caches);
  const hits = uses.filter((u) => u.outcome === "hit").length;
  const recompiles = data.functions.reduce((n, f) => n + Math.max(0, f.fn.entries.length - 1), 0);
  const total = data.entries.reduce((s, e) => s + compileSeconds(e.entry), 0);
  const card = (number, name, bad) =>
    el(
      "div",
      { class: "card" + (bad ? " bad" : "") },
      el("strong", {}, number),
      el("span", {}, name),
    );
  return el(
    "div",
    { class: "cards" },
    card(data.functions.length, data.functions.length === 1 ? "function" : "functions"),
    card(data.entries.length, data.entries.length === 1 ? "entry" : "entries"),
    card(
      data.breaks.length,
      data.breaks.length === 1 ? "graph break" : "graph breaks",
      data.breaks.length,
    ),
    card(recompiles, recompiles === 1 ? "recompile" : "recompiles", recompiles),
    card(seconds(total), "compiling"),
    card(`${hits} of ${uses.length}`, "cache lookups hit"),
  );
}

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
    jump(fnHash(owner), owner.fn.name),
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
    jump(fnHash(item.owner), item.owner.fn.name),
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

// `code` in a sentence.
function prose(text) {
  return text
    .split(/(`[^`]+`)/)
    .map((part) => (/^`.+`$/.test(part) ? el("code", {}, part.slice(1, -1)) : part));
}

function functionTree() {
  if (!data.functions.length)
    return empty(
      "No function was compiled while watching. Was the compiled function called inside the watch?",
    );
  const rows = [];
  for (const item of data.functions) {
    const f = item.fn;
    const time = f.entries.reduce((s, e) => s + compileSeconds(e), 0);
    rows.push([
      el(
        "span",
        { style: `padding-left:${item.depth * 1.4}em` },
        item.depth ? "↳ " : "",
        jump(fnHash(item), f.name),
        el("span", { class: "faint" }, ` ${short(f.file)}:${f.line}`),
      ),
      el(
        "span",
        {},
        entriesOf(item)
          .slice(0, 6)
          .map((e) => [jump(entryHash(e), e.name), " "]),
        f.entries.length > 6 ? `and ${f.entries.length - 6} more` : "",
        f.entries.length ? "" : "none",
      ),
      String(f.num_hits),
      seconds(time),
      functionStatus(f),
    ]);
  }
  return table(
    [
      { name: "function" },
      { name: "entries" },
      { name: "calls served", class: "num" },
      { name: "compile time", class: "num" },
      { name: "status" },
    ],
    rows,
  );
}

function functionStatus(f) {
  if (f.skipped) return el("span", { class: "tag warn" }, "runs eagerly: " + f.skipped);
  const dead = f.entries.filter((e) => e.status !== "live");
  const breaks = f.breaks.length + f.entries.reduce((n, e) => n + e.breaks.length, 0);
  const parts = [];
  if (breaks) parts.push(el("span", { class: "tag bad" }, count(breaks, "graph break")), " ");
  if (dead.length)
    parts.push(
      el(
        "span",
        { class: "tag warn" },
        dead.length === 1 ? dead[0].status : `${dead.length} entries not live`,
      ),
      " ",
    );
  if (f.entries.length > 1)
    parts.push(el("span", { class: "tag warn" }, count(f.entries.length - 1, "recompile")));
  return parts.length ? el("span", {}, parts) : el("span", { class: "tag good" }, "live");
}

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
      "Time in each phase itself, without the phases inside it, over all entries. Each entry has a flame chart of its own.",
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

function settings(config) {
  const names = Object.keys(config);
  if (!names.length) return empty("None was recorded.");
  return names.map((name) => {
    const value = config[name];
    const lines = Array.isArray(value)
      ? value.map(String)
      : value && typeof value === "object"
        ? Object.entries(value).map(([k, v]) => `${k} = ${v}`)
        : [String(value)];
    return [el("h3", {}, name), el("pre", { class: "text" }, lines.join("\n"))];
  });
}

function overhead() {
  const rows = Object.entries(data.record.overhead);
  if (!rows.length) return empty("Not measured.");
  return pairs(
    rows.map(([k, v]) => [k.replace(/_ms$/, "").replaceAll("_", " "), seconds(v / 1e3)]),
  );
}
