// Programs that serve ranges of sizes: for which, of how many graphs, and on what they rely.

const ASSUMED_SHOWN = 40;

function programs() {
  const all = data.record.events.filter((e) => e.kind === "ProgramReady").map((e) => e.data);
  if (!all.length) return null;
  return section("Programs for ranges of sizes", all.map(program));
}

function program(p) {
  const rows = p.boxes.map((box, i) => [box, String(p.num_calls[i])]);
  return el(
    "div",
    { class: "program" },
    el("h3", {}, p.model),
    el(
      "p",
      { class: "told" },
      `${p.origin} in ${seconds(p.seconds)}: ${count(p.boxes.length, "program")} of ` +
        `${count(p.num_graphs, "different graph")}; no call compiles anything. `,
    ),
    pairs([
      ["contract", el("code", { class: "wrap" }, p.contract)],
      ["name in the store", p.key ? el("code", { class: "wrap" }, p.key) : ""],
    ]),
    table([{ name: "sizes" }, { name: "graphs run in a call", class: "num" }], rows),
    assumed(p.verdicts),
  );
}

function assumed(verdicts) {
  if (!verdicts.length) return empty("Nothing was assumed of sizes.");
  const more = verdicts.length - ASSUMED_SHOWN;
  return el(
    "details",
    {},
    el("summary", {}, `${count(verdicts.length, "assumption")} about sizes, and for which they hold`),
    el(
      "ul",
      {},
      verdicts.slice(0, ASSUMED_SHOWN).map((text) => el("li", { class: "wrap" }, text)),
      more > 0 ? el("li", {}, `and ${more} more in the record`) : null,
    ),
  );
}
