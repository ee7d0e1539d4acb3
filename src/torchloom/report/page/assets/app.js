// The views by the address: #overview, #fn/NAME, #entry/ID/PART, #timeline, #events, #search/WORDS.

// What nodes of Python name.
const COMPONENTS = { Table, Choice, Stacked, Bar, Web, Fold, Code, Searchable, Source };
Object.assign(COMPONENTS, { LineChart, Flame });
const MAIN_TABS = [
  ["overview", "Overview"],
  ["fn", "Functions"],
  ["entry", "Entries"],
  ["timeline", "Timeline"],
  ["events", "Events"],
];
const VIEWS = {
  overview: () => draw(data.overview),
  fn: FunctionView,
  entry: EntryView,
  timeline: Timeline,
  events: Events,
  search: Search,
};
const view = document.getElementById("view");
const box = document.getElementById("search");

function FunctionView({ id }) {
  if (!data.functions.length) return html`<${Empty}>No function was compiled while watching.<//>`;
  const item = data.functions.find((f) => f.id === id) || data.functions[0];
  const options = data.functions.map((f) => ({
    value: f.id,
    name: "\u00a0".repeat(f.depth * 2) + f.name,
  }));
  const goTo = (value) => {
    location.hash = "fn/" + encodeURIComponent(value);
  };
  return html`<div class="bar">
      <${Select} label="Function" options=${options} value=${item.id} onpick=${goTo} />
    </div>
    <${Fragment} key=${item.id}>${draw(item.view)}<//>`;
}

function route() {
  const [tab, ...rest] = location.hash.slice(1).split("/").map(decode);
  if (tab === "view") return; // the skip link
  const key = VIEWS[tab] ? tab : "overview";
  const tabs = { id: "tabs", label: "Views", names: MAIN_TABS, current: key };
  const onpick = (name) => {
    location.hash = name;
  };
  render(html`<${Tabs} ...${tabs} onpick=${onpick} />`, document.getElementById("nav"));
  view.setAttribute("aria-labelledby", key === "search" ? key : "tabs-" + key);
  if (box !== document.activeElement) box.value = key === "search" ? rest[0] || "" : "";
  view.dataset.tab = key;
  try {
    render(html`<${VIEWS[key]} key=${key} id=${rest[0]} part=${rest[1]} />`, view);
  } catch (error) {
    console.error(error);
    const told = `This view could not be drawn: ${error.message}. The other views may work.`;
    render(html`<${Empty}>${told}<//>`, view);
  }
}

function decode(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

// The box in the header: the view follows what is typed; "/" goes there, Escape leaves.
function startSearch() {
  let later = 0;
  const search = () => {
    const word = box.value.trim();
    history.replaceState(null, "", word ? `#search/${encodeURIComponent(word)}` : "#overview");
    route();
  };
  box.addEventListener("input", () => {
    clearTimeout(later);
    later = setTimeout(search, 120);
  });
  addEventListener("keydown", (event) => {
    const isTyping = event.target.closest?.("input, select, textarea");
    if (event.key !== "/" || isTyping || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    box.focus();
    box.select();
  });
  box.addEventListener("keydown", (event) => event.key === "Escape" && box.blur());
}

const THEME_KEY = "torchloom-theme";

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  document.getElementById("theme").setAttribute("aria-pressed", String(name === "dark"));
  document.dispatchEvent(new Event("themechange"));
}

// A page from a file may have no store: the choice then lasts as long as the page.
function store(act) {
  try {
    return act(localStorage);
  } catch {
    return null;
  }
}

// The system's theme, until the user picks one.
function startTheme() {
  const system = matchMedia("(prefers-color-scheme: dark)");
  let kept = store((of) => of.getItem(THEME_KEY));
  const ofSystem = () => (system.matches ? "dark" : "light");
  setTheme(kept === "dark" || kept === "light" ? kept : ofSystem());
  system.addEventListener("change", () => kept || setTheme(ofSystem()));
  document.getElementById("theme").addEventListener("click", () => {
    kept = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    setTheme(kept);
    store((of) => of.setItem(THEME_KEY, kept));
  });
}

async function start() {
  startTheme();
  const began = performance.now();
  try {
    await readRecord();
  } catch (error) {
    render(html`<${Empty}>${error.message}<//>`, view);
    return;
  }
  view.replaceChildren(); // what stood there while the record was read
  if (data.compare) {
    box.remove();
    render(draw(data.compare), view);
  } else {
    startSearch();
    addEventListener("hashchange", route);
    route();
  }
  view.dataset.openMs = (performance.now() - began).toFixed(0);
}

start();
