// One compiled version of a function, under tabs of its own.

const ENTRY_TABS = [
  ["guards", "Guards"],
  ["graphs", "Graphs"],
  ["passes", "Passes"],
  ["kernels", "Kernels"],
  ["code", "Generated code"],
  ["bytecode", "Bytecode"],
  ["recompile", "Recompile"],
  ["time", "Time"],
];

function entryView(id, sub) {
  if (!data.entries.length)
    return empty("Nothing was compiled while watching, so there is no entry.");
  const item = data.entries.find((e) => e.id === id) || data.entries[0];
  const current = ENTRY_TABS.some(([k]) => k === sub) ? sub : "guards";
  const pick = choice(
    "Entry",
    data.entries.map((e) => ({ value: e.id, name: `${e.name}  ${nameOf(e.owner.fn)}` })),
    item.id,
    (value) => {
      location.hash = entryHash(
        data.entries.find((e) => e.id === value),
        current,
      );
    },
  );
  const list = tabs(
    el("div", { class: "tabs sub", role: "tablist", "aria-label": "Parts of the entry" }),
    ENTRY_TABS,
    current,
    (key) => {
      history.pushState(null, "", "#" + entryHash(item, key));
      show(key);
    },
  );
  const panel = el("div", { role: "tabpanel" });
  const show = (key) => {
    markTab(list, key);
    panel.setAttribute("aria-labelledby", "sub-" + key);
    panel.replaceChildren(...[PARTS[key](item)].flat(Infinity).filter(Boolean));
  };
  show(current);
  return [el("div", { class: "bar" }, pick), entryHead(item), list, panel];
}

function entryHead(item) {
  const e = item.entry;
  const backend = el(
    "details",
    {},
    el("summary", {}, e.backend.split("(")[0]),
    el("code", { class: "wrap" }, e.backend),
  );
  const facts = pairs([
    ["function", jump(fnHash(item.owner), nameOf(item.owner.fn))],
    ["backend", e.backend.length > 90 ? backend : e.backend],
    ["status", e.status === "live" ? "live" : el("span", { class: "tag warn" }, e.status)],
    ["calls served", callsOf(e)],
    ["compile time", seconds(compileSeconds(e))],
    ["attempts", e.attempts > 1 ? e.attempts : null],
  ]);
  facts.classList.add("facts");
  return [facts, triggerView(e), stackView(e)];
}

// The calls of the user's code that led to the compile.
function stackView(entry) {
  const calls = entry.stack || [];
  if (!calls.length) return null;
  const rows = calls.map((call) => el("li", {}, el("code", {}, short(call))));
  return el(
    "details",
    { class: "trigger stack-of-calls" },
    el("summary", {}, "Compiled in the call at ", el("code", {}, short(calls.at(-1)))),
    el("ol", {}, rows),
  );
}

// The arguments of the call that made the entry: tensors and constants before mere types.
function triggerView(entry) {
  const isType = ([, value]) => /^an? `/.test(value);
  const all = Object.entries(entry.trigger);
  if (!all.length) return null;
  const telling = all.filter((pair) => !isType(pair));
  const rows = [...telling, ...all.filter(isType)];
  const first = rows.slice(0, 2).map(([name, value]) => `${name} ${value}`);
  const brief = prose(first.join("; ") + (rows.length > 2 ? "; ..." : ""));
  return el(
    "details",
    { class: "trigger" },
    el("summary", {}, "Made by a call with ", brief),
    pairs(rows.map(([name, value]) => [el("code", {}, name), prose(value)])),
  );
}

const PARTS = {
  guards: guardsView,
  graphs: graphsView,
  passes: passesView,
  kernels: kernelsView,
  code: (item) =>
    texts(
      item,
      ["output_code", "runnable"],
      "No generated code was recorded: the backend wrote none, or the entry came from a cache.",
    ),
  bytecode: bytecodeView,
  recompile: recompileView,
  time: timeView,
};
