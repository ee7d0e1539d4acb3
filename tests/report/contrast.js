// Contrast of all text and marks that are in sight, by WCAG 2: computed styles in the real browser.
// Returns {texts, marks}, each a list of [what, ratio, colour, background].

const parse = (text) => {
  const m = /^rgba?\(([^)]+)\)/.exec(text);
  if (!m) return [0, 0, 0, 0];
  const [r, g, b, a = 1] = m[1].split(/[ ,/]+/).map(Number);
  return [r, g, b, a];
};
const over = (top, under) => {
  const a = top[3];
  return [0, 1, 2].map((i) => top[i] * a + under[i] * (1 - a)).concat(1);
};
const luminance = (c) => {
  const [r, g, b] = c.slice(0, 3).map((v) => v / 255)
    .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const ratio = (a, b) => {
  const [high, low] = [luminance(a), luminance(b)].sort((x, y) => y - x);
  return (high + 0.05) / (low + 0.05);
};
const faded = (c, alpha) => [...c.slice(0, 3), c[3] * alpha];
const opacity = (e) => {
  let a = 1;
  for (; e; e = e.parentElement) a *= Number(getComputedStyle(e).opacity);
  return a;
};

// What lies behind an element: backgrounds of it and of what it is in, and shapes drawn before it.
const behind = (element, withOwn) => {
  const chain = [];
  for (let e = withOwn ? element : element.parentElement; e; e = e.parentElement) chain.push(e);
  let color = [255, 255, 255, 1];
  for (const e of chain.reverse()) color = over(parse(getComputedStyle(e).backgroundColor), color);
  const root = element.closest("svg");
  if (!root || root === element) return color;
  const box = element.getBoundingClientRect();
  const [x, y] = [(box.left + box.right) / 2, (box.top + box.bottom) / 2];
  for (const shape of root.querySelectorAll("rect")) {
    if (shape === element) break;
    if (!(shape.compareDocumentPosition(element) & Node.DOCUMENT_POSITION_FOLLOWING)) break;
    const r = shape.getBoundingClientRect();
    if (x < r.left || x > r.right || y < r.top || y > r.bottom) continue;
    const style = getComputedStyle(shape);
    color = over(faded(parse(style.fill), Number(style.fillOpacity) * opacity(shape)), color);
  }
  return color;
};
const isShown = (e) =>
  e.checkVisibility({ opacityProperty: true, visibilityProperty: true }) &&
  e.getBoundingClientRect().width > 0;

const texts = [], marks = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
for (let node; (node = walker.nextNode()); ) {
  const e = node.parentElement;
  if (!node.data.trim() || /^(SCRIPT|STYLE|NOSCRIPT|OPTION|TITLE|title)$/.test(e.tagName)) continue;
  if (!isShown(e) || e.closest(".skip")) continue;
  const style = getComputedStyle(e);
  const back = behind(e, true);
  const ink = over(faded(parse(e.closest("svg") ? style.fill : style.color), opacity(e)), back);
  texts.push([`${e.tagName}.${e.getAttribute("class") || ""} ${node.data.trim().slice(0, 30)}`,
    ratio(ink, back), ink, back]);
}
for (const e of document.querySelectorAll("select, input")) {
  if (!isShown(e)) continue;
  const back = behind(e, true);
  for (const part of e.tagName === "INPUT" ? [null, "::placeholder"] : [null]) {
    const ink = parse(getComputedStyle(e, part).color);
    texts.push([`${e.tagName}${part || ""}`, ratio(ink, back), ink, back]);
  }
}

// Of a mark, the stronger of its edge and its filling counts.
const MARKS = {
  ".lanes .b": ["fill"],
  ".box > rect": ["stroke", "fill"],
  ".frame > rect": ["stroke"],
  ".toggle rect": ["stroke"],
  ".edge": ["stroke"],
  ".key": ["borderTopColor"],
  ".bar-line span": ["backgroundColor"],
  "button:not(.plain):not([role=tab]):not(:disabled)": ["borderTopColor"],
  "select": ["borderTopColor"],
  "input": ["borderTopColor"],
  "[role=tab][aria-selected=true]": ["borderBottomColor"],
  ".break": ["borderLeftColor"],
  ".fix": ["borderLeftColor"],
  ".card.bad": ["borderLeftColor"],
  ".loud": ["borderLeftColor"],
  ".stacked .part": ["backgroundColor"],
  ".stacked .limit": ["borderLeftColor"],
  ".swatch": ["backgroundColor"],
};
for (const [selector, properties] of Object.entries(MARKS)) {
  for (const e of document.querySelectorAll(selector)) {
    if (!isShown(e)) continue;
    const back = behind(e, false);
    const style = getComputedStyle(e);
    // An edge in the colour of the paper would thin out what is only pixels wide.
    const width = e.getBoundingClientRect().width;
    if (selector === ".lanes .b" && width < 4 && style.stroke !== "none") {
      marks.push([selector + " narrow with an edge", 1, style.stroke, back]);
    }
    const inks = properties.map((p) => over(faded(parse(style[p]), opacity(e)), back));
    const best = inks.sort((a, b) => ratio(b, back) - ratio(a, back))[0];
    marks.push([selector, ratio(best, back), best, back]);
  }
}
// Curves are drawn on a canvas, the outline of the focus only where the focus is: by their names.
const probe = document.body.appendChild(document.createElement("i"));
const back = behind(probe, true);
for (const name of ["focus", ...[0, 1, 2, 3, 4, 5, 6].map((i) => "i" + i)]) {
  probe.style.color = `var(--${name})`;
  const ink = parse(getComputedStyle(probe).color);
  marks.push(["--" + name, ratio(ink, back), ink, back]);
}
probe.remove();
return { texts, marks };
