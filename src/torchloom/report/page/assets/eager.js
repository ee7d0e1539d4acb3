// Functions and calls that ran eagerly although they were to be compiled.

// What a function that is not compiled any more says of itself, or null.
function limitText(f) {
  const calls = f.num_eager_calls ? `; ${count(f.num_eager_calls, "call")} ran eagerly` : "";
  if (f.recompile_limit !== null && f.recompile_limit !== undefined) {
    return `reached the recompile limit of ${f.recompile_limit}${calls}`;
  }
  return f.num_eager_calls ? `is not compiled any more${calls}` : null;
}

const LIMIT_FIX =
  "Fix: end the recompiles below, or raise `torch._dynamo.config.recompile_limit`. Calls that an " +
  "entry fits stay compiled; all others run eagerly, without a word from torch.";

function eagerCalls() {
  const known = data.functions.reduce((n, item) => n + (item.fn.num_eager_calls || 0), 0);
  return known + (data.record.num_unknown_eager_calls || 0);
}

function limitBanner(item) {
  const text = limitText(item.fn);
  if (!text) return null;
  return el(
    "div",
    { class: "loud", role: "note" },
    el("strong", {}, `${nameOf(item.fn)} ${text}.`),
    el("p", {}, prose(LIMIT_FIX)),
  );
}

function limitItems() {
  const items = data.functions
    .filter((item) => limitText(item.fn))
    .map((item) =>
      el(
        "li",
        {},
        el("span", { class: "tag bad" }, "recompile limit"),
        " ",
        jump(fnHash(item), nameOf(item.fn)),
        el("strong", {}, ` ${limitText(item.fn)}`),
        el("p", { class: "fix" }, prose(LIMIT_FIX)),
      ),
    );
  const unknown = data.record.num_unknown_eager_calls || 0;
  if (unknown) {
    items.push(
      el(
        "li",
        {},
        el("span", { class: "tag bad" }, "eager calls"),
        ` ${count(unknown, "call")} of functions that could not be told apart ran eagerly: no ` +
          "entry fitted, and nothing is compiled any more.",
      ),
    );
  }
  return items;
}

// Functions of which nothing is compiled; those at their limit stand under what to fix.
function skippedFunctions() {
  const items = data.functions.filter((item) => item.fn.skipped && !limitText(item.fn));
  if (!items.length) return null;
  const rows = items.map((item) => [
    el(
      "span",
      {},
      jump(fnHash(item), nameOf(item.fn)),
      el("span", { class: "faint" }, ` ${sourcePlace(item.fn)}`),
    ),
    el("span", { class: "wrap" }, item.fn.skipped),
    String(entriesOf(item).length),
  ]);
  return section(
    "Functions that run eagerly",
    table([{ name: "function" }, { name: "why" }, { name: "entries", class: "num" }], rows, {
      class: "skipped",
    }),
  );
}
