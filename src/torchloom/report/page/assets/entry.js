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

function EntryView({ id, part }) {
  if (!data.entries.length) {
    return html`<${Empty}>Nothing was compiled while watching, so there is no entry.<//>`;
  }
  const item = data.entries.find((e) => e.id === id) || data.entries[0];
  const current = ENTRY_TABS.some(([key]) => key === part) ? part : "guards";
  const drawn = { graphs: Graphs, passes: Passes }[current];
  const options = data.entries.map((e) => ({ value: e.id, name: `${e.name}  ${e.owner.name}` }));
  const goTo = (value) => {
    location.hash = entryHash({ id: value }, current);
  };
  const show = (key) => {
    location.hash = entryHash(item, key);
  };
  const tabs = { id: "sub", kind: "sub", label: "Parts of the entry", names: ENTRY_TABS };
  return html`<div class="bar">
      <${Select} label="Entry" options=${options} value=${item.id} onpick=${goTo} />
    </div>
    ${draw(item.views.head)}
    <${Tabs} ...${tabs} current=${current} onpick=${show} />
    <div role="tabpanel" aria-labelledby="sub-${current}" key=${`${item.id} ${current}`}>
      ${drawn ? html`<${drawn} item=${item} />` : draw(item.views[current])}
    </div>`;
}
