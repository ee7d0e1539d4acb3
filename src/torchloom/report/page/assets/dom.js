// Builders of elements. Text of a record only ever passes through text nodes and attributes.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attrs, children) {
  for (const [key, value] of Object.entries(attrs || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "text") node.textContent = value;
    else node.setAttribute(key, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : String(child));
  }
  return node;
}

function el(tag, attrs, ...children) {
  return fill(document.createElement(tag), attrs, children);
}

function svg(tag, attrs, ...children) {
  return fill(document.createElementNS(SVG, tag), attrs, children);
}

function empty(...text) {
  return el("p", { class: "empty" }, ...text);
}

// Only web addresses become links: a record could hold javascript: ones.
function link(address) {
  if (!/^https?:\/\//.test(address || "")) return el("span", {}, address || "");
  return el("a", { href: address, target: "_blank", rel: "noopener noreferrer" }, address);
}

function jump(hash, ...children) {
  return el("a", { href: "#" + hash }, ...children);
}

function section(title, ...children) {
  return el("section", {}, el("h2", {}, title), ...children);
}

// On narrow screens each row becomes a block, with every cell under its name.
function table(columns, rows, attrs = {}) {
  const head = columns.map((c) => el("th", { scope: "col", class: c.class }, c.name || c));
  const body = rows.map((row) =>
    el(
      "tr",
      {},
      row.map((cell, i) =>
        el("td", { class: columns[i].class, "data-name": columns[i].name || columns[i] }, cell),
      ),
    ),
  );
  return el(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": "table" },
    el(
      "table",
      { ...attrs, class: `stack ${attrs.class || ""}`.trim() },
      el("thead", {}, el("tr", {}, head)),
      el("tbody", {}, body),
    ),
  );
}

function pairs(rows) {
  const parts = rows
    .filter((r) => r[1] !== null && r[1] !== undefined && r[1] !== "")
    .map(([key, value]) => el("div", {}, el("dt", {}, key), el("dd", {}, value)));
  return el("dl", {}, parts);
}

function choice(label, options, value, onchange) {
  const select = el(
    "select",
    { onchange: () => onchange(select.value) },
    options.map((o) =>
      o.items
        ? el(
            "optgroup",
            { label: o.name },
            o.items.map((i) => option(i, value)),
          )
        : option(o, value),
    ),
  );
  return el("label", { class: "choice" }, el("span", {}, label), select);
}

function option(o, value) {
  return el("option", { value: o.value, selected: String(o.value) === String(value) }, o.name);
}

// A row of tabs: arrow keys, Home and End move, as the ARIA pattern has it.
function tabs(list, names, current, onpick) {
  const buttons = names.map(([key, name]) =>
    el(
      "button",
      {
        type: "button",
        role: "tab",
        id: `${list.id || "sub"}-${key}`,
        "data-key": key,
        "aria-selected": String(key === current),
        tabindex: key === current ? "0" : "-1",
        onclick: () => onpick(key),
      },
      name,
    ),
  );
  list.replaceChildren(...buttons);
  list.onkeydown = (event) => {
    const at = buttons.indexOf(document.activeElement);
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    let to = step ? (at + step + buttons.length) % buttons.length : -1;
    if (event.key === "Home") to = 0;
    if (event.key === "End") to = buttons.length - 1;
    if (at < 0 || to < 0) return;
    event.preventDefault();
    const key = buttons[to].dataset.key;
    onpick(key);
    list.querySelector(`[data-key="${key}"]`)?.focus();
  };
  return list;
}

function markTab(list, current) {
  for (const button of list.querySelectorAll("[role=tab]")) {
    const on = button.dataset.key === current;
    button.setAttribute("aria-selected", String(on));
    button.tabIndex = on ? 0 : -1;
    if (on && list.scrollWidth > list.clientWidth) {
      list.scrollLeft = button.offsetLeft - list.offsetLeft - 40;
    }
  }
  // Of a view without a tab, the first tab is where the Tab key arrives.
  if (!list.querySelector("[tabindex='0']")) list.firstElementChild.tabIndex = 0;
}

function button(title, text, onclick) {
  return el("button", { type: "button", title, "aria-label": title, onclick }, text);
}

// Keys of a focused picture; combinations stay the browser's.
function onKeys(target, keys) {
  target.addEventListener("keydown", (event) => {
    const act = keys[event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act();
  });
}

function debounce(call, wait_ms) {
  let timer = 0;
  return (...args) => {
    clearTimeout(timer);
    timer = setTimeout(() => call(...args), wait_ms);
  };
}

const count = (n, word, many) => `${n} ${n === 1 ? word : many || word + "s"}`;

function seconds(s) {
  if (!Number.isFinite(s)) return "unknown";
  const a = Math.abs(s);
  if (a === 0) return "0 s";
  if (a < 1e-3) return `${(s * 1e6).toFixed(a < 1e-4 ? 1 : 0)} µs`;
  if (a < 1) return `${(s * 1e3).toFixed(a < 0.01 ? 2 : a < 0.1 ? 1 : 0)} ms`;
  return `${s.toFixed(a < 10 ? 2 : 1)} s`;
}

function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  while (Math.abs(n) >= 1024 && i < units.length - 1) {
    n /= 1024;
    i++;
  }
  return `${i && Math.abs(n) < 100 ? n.toFixed(1) : Math.round(n)} ${units[i]}`;
}

// A path without the folder that all files of the record share; of one elsewhere, its end.
function short(place) {
  const text = place || "";
  if (data.root && text.startsWith(data.root)) return text.slice(data.root.length);
  const installed = text.replace(/^.*\/site-packages\//, "");
  return installed.replace(/^\/.*?((?:\/[^/]+){3})$/, "…$1");
}
