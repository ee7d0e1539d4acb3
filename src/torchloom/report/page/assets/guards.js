// The conditions of an entry. Those about arguments come first: they are the ones that fail.

const GUARDS_SHOWN = 200;

function guardsView(item) {
  const all = item.entry.guards;
  if (!all.length) return empty("No guard was recorded for this entry.");
  const sorted = [...all].sort((a, b) => guardRank(a) - guardRank(b) || b.num_fails - a.num_fails);
  const kinds = new Map();
  for (const g of all) kinds.set(g.kind, (kinds.get(g.kind) || 0) + 1);
  const state = { word: "", kind: "", shown: GUARDS_SHOWN };
  const out = el("div", {}),
    told = el("span", { class: "told", role: "status" });
  const draw = () => {
    const word = state.word.toLowerCase();
    const found = sorted.filter(
      (g) =>
        (!state.kind || g.kind === state.kind) &&
        (!word ||
          `${g.english}\n${g.text}\n${g.source}\n${g.user_line}`.toLowerCase().includes(word)),
    );
    told.textContent =
      found.length === all.length
        ? count(all.length, "guard")
        : `${found.length} of ${count(all.length, "guard")}`;
    const rows = found.slice(0, state.shown).map(guardRow);
    out.replaceChildren(
      rows.length
        ? table(
            [
              { name: "condition" },
              { name: "kind" },
              { name: "user line" },
              { name: "calls rejected", class: "num" },
            ],
            rows,
            { class: "guards" },
          )
        : empty("No guard holds these words."),
    );
    if (found.length > rows.length) {
      out.append(
        el(
          "button",
          {
            type: "button",
            onclick: () => {
              state.shown += 1000;
              draw();
            },
          },
          `Show ${Math.min(1000, found.length - rows.length)} more`,
        ),
      );
    }
  };
  const input = el("input", {
    type: "search",
    placeholder: "Filter",
    "aria-label": "Filter guards",
    oninput: debounce(() => {
      state.word = input.value;
      draw();
    }, 120),
  });
  const pick = choice(
    "Kind",
    [
      { value: "", name: "all kinds" },
      ...[...kinds]
        .sort((a, b) => b[1] - a[1])
        .map(([k, n]) => ({ value: k, name: `${k} (${n})` })),
    ],
    "",
    (value) => {
      state.kind = value;
      draw();
    },
  );
  draw();
  const time = item.entry.guard_check_us;
  return [
    el(
      "div",
      { class: "bar" },
      input,
      pick,
      told,
      time !== null
        ? el("span", { class: "told" }, `checking all takes ${time.toFixed(1)} µs`)
        : null,
    ),
    out,
  ];
}

function guardRow(g) {
  return [
    el(
      "div",
      {},
      el("div", {}, prose(g.english || g.text)),
      el(
        "code",
        { class: "sub wrap" },
        g.text.length > 500 ? g.text.slice(0, 500) + " ..." : g.text,
      ),
    ),
    el("code", {}, g.kind),
    el("code", { class: "wrap" }, short(g.user_line) || ""),
    g.num_fails ? el("span", { class: "tag bad" }, g.num_fails) : "0",
  ];
}

function guardRank(g) {
  const state =
    /^(GLOBAL_STATE|TORCH_FUNCTION_MODE_STACK|DEFAULT_DEVICE|DETERMINISTIC_ALGORITHMS|GRAD_MODE)$/.test(
      g.kind,
    );
  if (state || g.source === "L") return 5;
  const tensor = /^TENSOR_MATCH|SHAPE_ENV|EQUALS_MATCH|CONSTANT_MATCH/.test(g.kind);
  if (/^L\['self'\]|__self__|_modules/.test(g.source)) return tensor ? 2 : 3;
  if (/^(G\[|torch\.)/.test(g.text)) return 4;
  if (g.source.startsWith("L[") || g.source === "") return tensor ? 0 : 1;
  return 4;
}
