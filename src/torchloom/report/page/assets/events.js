// torchloom's own events, in the order in which they came.

const EVENTS_SHOWN = 500;

function eventsView() {
  const all = data.record.events;
  if (!all.length)
    return empty(
      "torchloom emitted no event while watching: only torch.compile by itself was at work.",
    );
  const kinds = [...new Set(all.map((e) => e.kind))].sort();
  const first = all.reduce((t, e) => Math.min(t, e.data.start_s ?? e.at_s), Infinity);
  const out = el("div", {}),
    told = el("span", { class: "told", role: "status" });
  const state = { kind: "", word: "" };
  const draw = () => {
    const found = all.filter(
      (e) =>
        (!state.kind || e.kind === state.kind) &&
        (!state.word || eventText(e, first).toLowerCase().includes(state.word)),
    );
    told.textContent =
      count(found.length, "event") +
      (found.length > EVENTS_SHOWN ? `, the first ${EVENTS_SHOWN} shown` : "");
    out.replaceChildren(
      found.length
        ? table(
            [{ name: "after", class: "num" }, { name: "event" }, { name: "what" }],
            found
              .slice(0, EVENTS_SHOWN)
              .map((e) => [
                seconds(e.at_s - first),
                e.kind,
                el("span", { class: "wrap" }, eventText(e, first)),
              ]),
          )
        : empty("No event holds these words."),
    );
  };
  const input = el("input", {
    type: "search",
    placeholder: "Filter",
    "aria-label": "Filter events",
    oninput: debounce(() => {
      state.word = input.value.toLowerCase();
      draw();
    }, 120),
  });
  draw();
  return [
    el(
      "div",
      { class: "bar" },
      input,
      choice(
        "Kind",
        [{ value: "", name: "all kinds" }, ...kinds.map((k) => ({ value: k, name: k }))],
        "",
        (v) => {
          state.kind = v;
          draw();
        },
      ),
      told,
    ),
    out,
  ];
}

const EPOCH_S = 1e8; // larger numbers of seconds are times of day, told from the first event on

function eventText(event, first) {
  const told = ([key, value]) => {
    if (key === "num_bytes") return bytes(value);
    const name = key.replace(/^num_/, "").replace(/_s$/, "").replaceAll("_", " ");
    if (typeof value === "number" && /_s$/.test(key)) {
      return value < EPOCH_S ? `${name} ${seconds(value)}` : `${name} at ${seconds(value - first)}`;
    }
    const text = typeof value === "string" ? value : JSON.stringify(value);
    return `${name} ${text.length > 300 ? text.slice(0, 300) + " ..." : text}`;
  };
  return Object.entries(event.data)
    .filter(([, value]) => value !== null)
    .map(told)
    .join(", ");
}
