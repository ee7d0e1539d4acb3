// The first view: where the time and the memory went, what to mend first, what was compiled.

const isRun = () => data.record.events.some((r) => r.kind === "PhaseRan");

function overviewView() {
  const r = data.record;
  return [
    headline(),
    cards(),
    isRun() ? null : el("p", { class: "told" }, WORDS),
    hasFixes() ? fixFirst() : null,
    beside(runTime(), runMemory()),
    exposedCommunication(),
    beside(runPlan(), ownPhases()),
    hasFixes() ? null : fixFirst(),
    programs(),
    section("Functions", functionTree()),
    skippedFunctions(),
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

// Next to each other where the screen is wide enough.
function beside(...parts) {
  const own = parts.filter(Boolean);
  return own.length > 1 ? el("div", { class: "pair" }, own) : own;
}

function cards() {
  const uses = data.entries.flatMap((e) => e.entry.caches);
  const hits = uses.filter((u) => u.outcome === "hit").length;
  const recompiles = data.functions.reduce((n, f) => n + Math.max(0, f.fn.entries.length - 1), 0);
  const total = data.entries.reduce((s, e) => s + compileSeconds(e.entry), 0);
  const exposed = exposedTotal();
  const card = (number, name, bad) =>
    el(
      "div",
      { class: "card" + (bad ? " bad" : "") },
      el("strong", {}, number),
      el("span", {}, name),
    );
  const many = (n, one, more) => card(n, n === 1 ? one : more);
  const bad = (n, one, more) => card(n, n === 1 ? one : more || one + "s", n);
  return el(
    "div",
    { class: "cards" },
    many(data.functions.length, "function", "functions"),
    many(data.entries.length, "entry", "entries"),
    bad(data.breaks.length, "graph break"),
    bad(recompiles, "recompile"),
    eagerCalls() ? bad(eagerCalls(), "call ran eagerly", "calls ran eagerly") : null,
    card(seconds(total), "compiling"),
    uses.length ? card(`${hits} of ${uses.length}`, "cache lookups hit") : null,
    exposed === null
      ? null
      : card(`${(100 * exposed).toFixed(1)}%`, "of a step is exposed communication"),
  );
}

const WORDS =
  "A function is compiled into entries: each is one compiled version, with guards that say for " +
  "which calls it may be used. A call that fits none makes a recompile; a graph break cuts a " +
  "function into pieces that are compiled apart.";

// `code` in a sentence.
function prose(text) {
  return text
    .split(/(`[^`]+`)/)
    .map((part) => (/^`.+`$/.test(part) ? el("code", {}, part.slice(1, -1)) : part));
}

function functionTree() {
  if (!data.functions.length) {
    return empty(
      "No function was compiled while watching. Was the compiled function called inside the watch?",
    );
  }
  const rows = data.functions.map((item) => [
    el(
      "span",
      { style: `padding-left:${item.depth * 1.4}em` },
      item.depth ? "↳ " : "",
      jump(fnHash(item), nameOf(item.fn)),
      el("span", { class: "faint" }, ` ${sourcePlace(item.fn)}`),
    ),
    functionStatus(item),
    entryLinks(item),
    String(item.fn.num_hits),
    seconds(item.fn.entries.reduce((s, e) => s + compileSeconds(e), 0)),
  ]);
  return table(
    [
      { name: "function" },
      { name: "status" },
      { name: "entries", class: "entries" },
      { name: "calls served", class: "num" },
      { name: "compile time", class: "num" },
    ],
    rows,
  );
}

const ENTRIES_LINKED = 6;

function entryLinks(item) {
  const all = entriesOf(item);
  const more = all.length - ENTRIES_LINKED;
  return el(
    "span",
    {},
    all.slice(0, ENTRIES_LINKED).map((e) => [jump(entryHash(e), e.name), " "]),
    more > 0 ? `and ${more} more` : "",
    all.length ? "" : "none",
  );
}

function functionStatus(item) {
  const f = item.fn;
  const tag = (kind, text) => [el("span", { class: "tag " + kind }, text), " "];
  if (limitText(f)) return tag("bad", limitText(f));
  if (f.skipped) return tag("warn", "runs eagerly: " + f.skipped);
  const dead = f.entries.filter((e) => e.status !== "live");
  const breaks = data.breaks.filter((b) => b.owner === item).length;
  const parts = [
    breaks ? tag("bad", count(breaks, "graph break")) : [],
    dead.length === 1 ? tag("warn", dead[0].status) : [],
    dead.length > 1 ? tag("warn", `${dead.length} entries not live`) : [],
    f.entries.length > 1 ? tag("warn", count(f.entries.length - 1, "recompile")) : [],
  ].flat();
  return el("span", {}, parts.length ? parts : tag("good", "live"));
}

function settings(config) {
  const names = Object.keys(config);
  if (!names.length) return empty("None: Dynamo and Inductor ran with their defaults.");
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

const COSTS = { tap_ms: "listening to torch's log", build_ms: "making the record" };

function overhead() {
  const rows = Object.entries(data.record.overhead);
  if (!rows.length) return empty("Not measured.");
  const name = (key) => COSTS[key] || key.replace(/_ms$/, "").replaceAll("_", " ");
  const dropped = /_dropped$/;
  const told = ([key, value]) =>
    dropped.test(key)
      ? [`${key.replace(dropped, "")} left out`, String(value)]
      : [name(key), seconds(value / 1e3)];
  return pairs(rows.map(told));
}
