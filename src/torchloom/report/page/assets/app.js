// The views by the address: #overview, #fn/NAME, #entry/ID/PART, #timeline, #events, #search/WORDS.

const VIEWS_BY_TAB = {
  overview: overviewView,
  fn: functionView,
  entry: entryView,
  timeline: timelineView,
  events: eventsView,
  search: searchView,
};
const MAIN_TABS = [
  ["overview", "Overview"],
  ["fn", "Functions"],
  ["entry", "Entries"],
  ["timeline", "Timeline"],
  ["events", "Events"],
];

function route() {
  const [tab, ...rest] = location.hash.slice(1).split("/").map(decode);
  if (tab === "view") return; // the skip link
  const key = VIEWS_BY_TAB[tab] ? tab : "overview";
  const view = document.getElementById("view");
  markTab(document.getElementById("tabs"), key);
  view.setAttribute("aria-labelledby", key === "search" ? key : "tabs-" + key);
  const box = document.getElementById("search");
  if (box !== document.activeElement) box.value = key === "search" ? rest[0] || "" : "";
  view.dataset.tab = key;
  try {
    view.replaceChildren(...[VIEWS_BY_TAB[key](...rest)].flat(Infinity).filter(Boolean));
  } catch (error) {
    console.error(error);
    view.replaceChildren(
      empty(`This view could not be drawn: ${error.message}. The other views may work.`),
    );
  }
  view.dataset.ready = String(Number(view.dataset.ready || 0) + 1);
}

function decode(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

const THEME_KEY = "torchloom-theme";

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  document.getElementById("theme").setAttribute("aria-pressed", String(name === "dark"));
  document.dispatchEvent(new Event("themechange"));
}

// The system's theme, until the user picks one. A page from a file may have no store.
function startTheme() {
  const system = matchMedia("(prefers-color-scheme: dark)");
  let kept = null;
  try {
    kept = localStorage.getItem(THEME_KEY);
  } catch {
    /* no store: the choice lasts as long as the page */
  }
  const ofSystem = () => (system.matches ? "dark" : "light");
  setTheme(kept === "dark" || kept === "light" ? kept : ofSystem());
  system.addEventListener("change", () => kept || setTheme(ofSystem()));
  document.getElementById("theme").addEventListener("click", () => {
    kept = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    setTheme(kept);
    try {
      localStorage.setItem(THEME_KEY, kept);
    } catch {
      /* as above */
    }
  });
}

async function start() {
  startTheme();
  const began = performance.now();
  try {
    await readRecord();
  } catch (error) {
    document.getElementById("view").replaceChildren(empty(error.message));
    return;
  }
  if (data.compare) {
    const view = document.getElementById("view");
    document.getElementById("search").remove();
    view.replaceChildren(...compareView(data.compare).filter(Boolean));
    view.dataset.openMs = (performance.now() - began).toFixed(0);
    return;
  }
  tabs(document.getElementById("tabs"), MAIN_TABS, "overview", (key) => {
    location.hash = key;
  });
  startSearch();
  addEventListener("hashchange", route);
  route();
  document.getElementById("view").dataset.openMs = (performance.now() - began).toFixed(0);
}

start();
