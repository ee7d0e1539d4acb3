// The bytecode of an entry, before and after Dynamo, and what it goes on with behind its break.

function bytecodeView(item) {
  const e = item.entry;
  if (!e.pseudo_source && !e.bytecode) return empty("No bytecode was recorded for this entry.");
  const listing = (text, label) =>
    code(text, { language: "plain", missing: "It was not recorded.", label });
  return [
    section(
      "What it does",
      code(e.pseudo_source, {
        language: "python",
        missing: "The bytecode could not be read back as source.",
        label: "pseudo source",
      }),
    ),
    continuations(item),
    el(
      "div",
      { class: "beside" },
      section("Bytecode that Python compiled", listing(e.original_bytecode, "original bytecode")),
      section("Bytecode that Dynamo wrote", listing(e.bytecode, "bytecode")),
    ),
  ];
}

function continuations(item) {
  const all = item.entry.continuations || [];
  if (!all.length) return null;
  return section(
    "What follows its graph break, in the order of the calls",
    all.map((each, i) => {
      const known = data.functions.find((f) => f.parent && f.fn.name === each.function);
      const name = nameOf({ name: each.function, line: each.line });
      const taken = each.num_entries
        ? [el("span", { class: "tag good" }, "taken"), `: ${versions(each.num_entries)}`]
        : el("span", { class: "tag warn" }, "not compiled: not taken, or it holds no operator");
      return el(
        "article",
        { class: "continuation" },
        el("h3", {}, `${i + 1}. `, known ? jump(fnHash(known), name) : name, " ", taken),
        code(each.source, {
          language: "python",
          missing: "Its bytecode could not be read back as source.",
          label: `source of ${each.name}`,
        }),
      );
    }),
  );
}

const versions = (n) => count(n, "compiled version");
