// Elements: nodes that Python wrote as plain data, and the parts of which views consist. Text of a
// record only ever passes through text nodes and attributes.

const { h, render, html, useState, useRef, useMemo, useEffect, useLayoutEffect } = htmPreact;

const Fragment = ({ children }) => children;
const count = (n, word, many) => `${n} ${n === 1 ? word : many || word + "s"}`;

// A node is text, [tag, ...children] with a tag as "p.told", {is, ...props} of a component, or
// what a template made.
function draw(node) {
  if (!node || typeof node === "string" || node.type) return node;
  if (!Array.isArray(node)) return h(COMPONENTS[node.is], node);
  const [head, ...children] = node;
  if (head === "a") return h("a", { href: "#" + children[0] }, ...children.slice(1).map(draw));
  const [tag, ...classes] = head.split(".");
  const attrs = classes.length ? { class: classes.join(" ") } : null;
  return h(tag || Fragment, attrs, ...children.map(draw));
}

const Empty = ({ children }) => html`<p class="empty">${children}</p>`;

const Section = ({ title, children }) => html`<section><h2>${title}</h2>${children}</section>`;

const ROWS_SHOWN = 500;
const ROWS_MORE = 2000;

// On narrow screens each row becomes a block, with every cell under its name.
function Table({ columns, rows, name = "" }) {
  const [shown, setShown] = useState(ROWS_SHOWN);
  const more = Math.min(ROWS_MORE, rows.length - shown);
  const heads = columns.map((c) => (c[0] === "#" ? { name: c.slice(1), num: "num" } : { name: c }));
  return html`<div class="scroll" tabindex="0" role="region" aria-label="table">
    <table class="stack ${name}">
      <thead>
        <tr>
          ${heads.map((head) => html`<th scope="col" class=${head.num}>${head.name}</th>`)}
        </tr>
      </thead>
      <tbody>
        ${rows.slice(0, shown).map(
          (row) => html`<tr>
            ${row.map((cell, i) => {
              const { name, num } = heads[i];
              return html`<td class=${num} data-name=${name}>${draw(cell)}</td>`;
            })}
          </tr>`,
        )}
      </tbody>
    </table>
    ${more > 0 &&
    html`<button type="button" onclick=${() => setShown(shown + ROWS_MORE)}>
      Show ${more} more
    </button>`}
  </div>`;
}

// What is under a title that opens it; drawn when it is opened first.
function Fold({ title, body, isFirst }) {
  const [isOpen, setOpen] = useState(isFirst);
  return html`<details open=${isFirst} ontoggle=${(event) => setOpen(event.target.open)}>
    <summary>${draw(title)}</summary>
    ${isOpen && draw(body)}
  </details>`;
}

// A bar of the share of the longest, in percent.
const Bar = ({ share }) =>
  html`<span class="bar-line"><span style="width:${share.toFixed(2)}%"></span></span>`;

function Stacked({ label, parts, limit }) {
  return html`<div class="stacked" role="img" aria-label=${label}>
    ${parts.map(
      ([share, color, title]) =>
        html`<span class="part ${color}" style="width:${share.toFixed(3)}%" title=${title}></span>`,
    )}
    ${limit && html`<i class="limit" style="left:${limit[0].toFixed(3)}%" title=${limit[1]}></i>`}
  </div>`;
}

// Only web addresses become links: a record could hold javascript: ones.
function Web({ address }) {
  if (!/^https?:\/\//.test(address)) return html`<span>${address}</span>`;
  return html`<a href=${address} target="_blank" rel="noopener noreferrer">${address}</a>`;
}

function Choice({ label, options, first }) {
  const [at, setAt] = useState(first);
  const names = options.map(([name], i) => ({ value: i, name }));
  return html`<div class="bar">
      <${Select} label=${label} options=${names} value=${at} onpick=${(i) => setAt(Number(i))} />
    </div>
    <div key=${at}>${draw(options[at][1])}</div>`;
}

// options: {value, name}, or {name, items} of a group of them.
function Select({ label, options, value, onpick }) {
  const option = (o) =>
    html`<option value=${o.value} selected=${String(o.value) === String(value)}>${o.name}</option>`;
  return html`<label class="choice">
    <span>${label}</span>
    <select onchange=${(event) => onpick(event.target.value)}>
      ${options.map((o) =>
        o.items ? html`<optgroup label=${o.name}>${o.items.map(option)}</optgroup>` : option(o),
      )}
    </select>
  </label>`;
}

// A row of tabs: arrow keys, Home and End move, as the ARIA pattern has it.
function Tabs({ id, kind = "", label, names, current, onpick }) {
  const list = useRef();
  const keys = names.map(([key]) => key);
  // Of a view without a tab, the first tab is where the Tab key arrives.
  const reached = keys.includes(current) ? current : keys[0];
  useLayoutEffect(() => {
    const { current: box } = list;
    const chosen = box.querySelector("[aria-selected=true]");
    if (!chosen || box.scrollWidth <= box.clientWidth) return;
    box.scrollLeft = chosen.offsetLeft - box.offsetLeft - 40;
  }, [current]);
  const onkeydown = (event) => {
    const at = keys.indexOf(event.target.dataset.key);
    const steps = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: -1 };
    if (at < 0 || !(event.key in steps)) return;
    event.preventDefault();
    const key = keys.at(steps[event.key] % keys.length);
    onpick(key);
    list.current.querySelector(`[data-key="${key}"]`).focus();
  };
  return html`<div
    ...${{ id, onkeydown, ref: list, class: `tabs ${kind}`, role: "tablist", "aria-label": label }}
  >
    ${names.map(
      ([key, name]) => html`<button
        type="button"
        role="tab"
        id="${id}-${key}"
        data-key=${key}
        aria-selected=${String(key === current)}
        tabindex=${key === reached ? 0 : -1}
        onclick=${() => onpick(key)}
      >
        ${name}
      </button>`,
    )}
  </div>`;
}

const Button = ({ title, text, onclick, disabled }) => html`<button
  ...${{ type: "button", title, "aria-label": title, onclick, disabled }}
>
  ${text}
</button>`;

// A box that follows what is typed; Enter goes to the next place found, Shift+Enter back.
function Find({ label, hint = label, onword, onstep }) {
  const later = useRef(0);
  const oninput = ({ target }) => {
    clearTimeout(later.current);
    later.current = setTimeout(() => onword(target.value.toLowerCase()), 120);
  };
  const onkeydown = (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault();
    onstep(event.shiftKey ? -1 : 1);
  };
  const props = { type: "search", placeholder: hint, oninput, onkeydown };
  return html`<input ...${props} aria-label=${label} />`;
}

// Keys of a focused picture; combinations stay the browser's.
const onKeys = (keys) => (event) => {
  const act = keys[event.key];
  if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  act();
};

// What a picture listens to that is dragged: onmove gets the way since the last event. A click
// that ends a drag finds data-moved on the picture.
function useDragging(onmove) {
  const last = useRef(null);
  const end = ({ currentTarget }) => {
    last.current = null;
    setTimeout(() => delete currentTarget.dataset.moved, 0);
  };
  return {
    onpointerdown: (e) => (last.current = { x: e.clientX, y: e.clientY }),
    onpointermove: (e) => {
      if (!last.current || !(e.buttons & 1)) return;
      const [dx, dy] = [e.clientX - last.current.x, e.clientY - last.current.y];
      const isMoved = Boolean(e.currentTarget.dataset.moved);
      if (!isMoved && Math.hypot(dx, dy) < 4) return;
      if (!isMoved) e.currentTarget.setPointerCapture(e.pointerId);
      e.currentTarget.dataset.moved = "1";
      last.current = { x: e.clientX, y: e.clientY };
      onmove(dx, dy);
    },
    onpointerup: end,
    onpointercancel: end,
  };
}

// The width of an element, as it is now.
function useWidth(box) {
  const [width, setWidth] = useState(0);
  useLayoutEffect(() => {
    const seen = new ResizeObserver(() => setWidth(box.current.clientWidth));
    seen.observe(box.current);
    setWidth(box.current.clientWidth);
    return () => seen.disconnect();
  }, []);
  return width;
}

function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  for (; Math.abs(n) >= 1024 && i < units.length - 1; i++) n /= 1024;
  return `${i && Math.abs(n) < 100 ? n.toFixed(1) : Math.round(n)} ${units[i]}`;
}

function seconds(s) {
  const a = Math.abs(s);
  if (a === 0) return "0 s";
  if (a < 1e-3) return `${(s * 1e6).toFixed(a < 1e-4 ? 1 : 0)} µs`;
  if (a < 1) return `${(s * 1e3).toFixed(a < 0.01 ? 2 : a < 0.1 ? 1 : 0)} ms`;
  return `${s.toFixed(a < 10 ? 2 : 1)} s`;
}

const rounded = (n) => (n < 100 ? n.toPrecision(3) : Math.round(n).toLocaleString("en-US"));
