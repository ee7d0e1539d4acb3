// Search over the whole record: functions with their entries, guards, graphs and code, events.

const MAX_LINE = 240; // letters
const WHEN_COLUMNS = ["#when", "event", "what"];

const holds = (word, ...texts) => texts.some((text) => (text || "").toLowerCase().includes(word));

function Search({ id = "" }) {
  const wanted = id.trim().toLowerCase();
  if (!wanted) {
    const hint = "Type into the box above: names, lines, operators, guards, parameters, events.";
    return html`<${Empty}>${hint}<//>`;
  }
  const parts = [
    ["Functions and entries", ["where", "what"], foundEntries(wanted)],
    ["Guards", ["where", "condition", "#calls rejected"], foundGuards(wanted)],
    ["Graphs and code", ["where", "line"], foundTexts(wanted)],
    ["Events", WHEN_COLUMNS, eventCells(([, ...texts]) => holds(wanted, ...texts))],
  ].filter(([, , rows]) => rows.length);
  if (!parts.length) return html`<${Empty}>Nothing in this record holds these words.<//>`;
  return parts.map(
    ([title, columns, rows]) => html`<${Section} title="${title}: ${rows.length}">
      <${Table} key=${wanted} columns=${columns} rows=${rows} />
    <//>`,
  );
}

function foundEntries(word) {
  const functions = data.functions
    .filter(({ id, name, place }) => holds(word, id, name, place))
    .map((item) => [fnLink(item), item.place]);
  const breaks = data.breaks
    .filter(({ reason, explanation, place }) => holds(word, reason, explanation, place))
    .map((b) => [fnLink(data.functions[b.owner]), `${b.reason} at ${b.place}`]);
  const entries = data.entries.flatMap((item) => {
    const { backend, status, recompiles, kernels } = item.entry;
    const at = (part) => ["a", entryHash(item, part), `${item.name} ${item.owner.name}`];
    const why = recompiles.find((r) => holds(word, r.source, r.text, r.fix));
    const names = kernels.map((k) => k.name).filter((name) => holds(word, name));
    return [
      holds(word, item.name, backend, status) && [at(), backend],
      why && [at("recompile"), `recompile: ${why.text}`],
      names.length && [at("kernels"), names.join(", ")],
    ].filter(Boolean);
  });
  return [...functions, ...breaks, ...entries];
}

function foundGuards(word) {
  return data.entries.flatMap((item) =>
    item.entry.guards
      .filter((g) => holds(word, g.english, g.text, g.source, g.user_line, g.kind))
      .map((g) => [
        ["a", entryHash(item, "guards"), `${item.name} ${item.owner.name}`],
        ["span.wrap", g.english || g.text.slice(0, MAX_LINE)],
        String(g.num_fails),
      ]),
  );
}

// Of each text the first line that holds the words, and how many others do.
function foundTexts(word) {
  return data.entries.flatMap((item) =>
    item.entry.artifacts
      .filter((a) => holds(word, a.text))
      .map((a) => {
        const lines = a.text.split("\n").filter((line) => holds(word, line));
        const part = /^(output_code|runnable)$/.test(a.kind) ? "code" : "graphs";
        const more = lines.length > 1 ? ` (and ${count(lines.length - 1, "other line")})` : "";
        const found = lines[0]?.trim().slice(0, MAX_LINE) || "";
        const where = ["a", entryHash(item, part), `${item.name} ${a.title || a.kind}`];
        return [where, ["", ["code.wrap", found], more]];
      }),
  );
}

const eventCells = (isShown = () => true) =>
  data.events.filter(isShown).map(([when, kind, text]) => [when, kind, ["span.wrap", text]]);

function Events() {
  const all = data.events;
  if (!all.length) {
    const none = "torchloom emitted no event while watching: only torch.compile was at work.";
    return html`<${Empty}>${none}<//>`;
  }
  return html`<p class="told">
      ${count(all.length, "event")}; times count from the start of a step. The search above
      finds events by their words.
    </p>
    <${Table} columns=${WHEN_COLUMNS} rows=${eventCells()} />`;
}
