// Code with line numbers and search; long texts draw only the lines in sight.

const LINE = 18;
const LINES_SHOWN = 34;
const ALL_LINES = 400;

// hit: the line to bring into sight; classes: a class for each line.
function Code({ text, language, classes = [], label = "code", missing, hit = -1 }) {
  const box = useRef();
  const [top, setTop] = useState(0);
  const lines = useMemo(() => (text || "").replace(/\n$/, "").split("\n"), [text]);
  const modes = useMemo(() => colourModes(lines, language), [lines, language]);
  const widest = useMemo(() => lines.reduce((n, line) => Math.max(n, line.length), 0), [lines]);
  useLayoutEffect(() => {
    if (!box.current) return;
    box.current.scrollTop = Math.max(0, hit * LINE - box.current.clientHeight / 3);
    setTop(box.current.scrollTop);
  }, [text, hit]);
  if (!text) return html`<${Empty}>${missing || "There is no text."}<//>`;
  const digits = String(lines.length + 1).length;
  const isAll = lines.length <= ALL_LINES;
  const from = isAll ? 0 : Math.max(0, Math.floor(top / LINE) - 20);
  const tall = box.current?.clientHeight || 0;
  const to = isAll ? lines.length : from + Math.max(LINES_SHOWN, Math.ceil(tall / LINE)) + 40;
  const size = `height:${Math.min(lines.length, LINES_SHOWN) * LINE + 26}px`;
  const onscroll = (event) => setTop(event.target.scrollTop);
  return html`<div
    ...${{ class: "code", tabindex: 0, role: "region", "aria-label": label, style: size }}
    ref=${box}
    onscroll=${isAll ? null : onscroll}
  >
    <div
      class="lines"
      style="height:${lines.length * LINE}px;min-width:${widest + digits + 4}ch"
    >
      ${lines.slice(from, to).map((line, n) => {
        const i = from + n;
        const more = `${classes[i] || ""} ${i === hit ? "hit" : ""}`;
        return html`<div key=${i} class="line ${more}" style="top:${i * LINE}px">
          <span class="no" aria-hidden="true">${String(i + 1).padStart(digits)}</span>
          ${colour(line, modes[i])}
        </div>`;
      })}
    </div>
  </div>`;
}

// A code view under a box that finds lines; line: the one to show at first.
function Searchable({ text, language, label, line = -1 }) {
  const [word, setWord] = useState("");
  const [at, setAt] = useState(0);
  const lines = useMemo(() => text.replace(/\n$/, "").split("\n"), [text]);
  const hits = useMemo(
    () => (word ? [...lines.keys()].filter((i) => lines[i].toLowerCase().includes(word)) : []),
    [lines, word],
  );
  const step = (by) => setAt((hits.length + at + by) % (hits.length || 1));
  const find = (typed) => {
    setWord(typed);
    setAt(0);
  };
  const where = hits.length ? `${at + 1} of ${count(hits.length, "line")}` : "no line";
  return html`<div>
    <div class="bar">
      <${Find} label="Search the text" hint="Search" onword=${find} onstep=${step} />
      <${Button} title="Previous line" text="↑" onclick=${() => step(-1)} />
      <${Button} title="Next line" text="↓" onclick=${() => step(1)} />
      <span class="told" role="status">${word ? where : count(lines.length, "line")}</span>
    </div>
    <${Code} ...${{ text, language, label }} hit=${word ? hits[at] : line} />
  </div>`;
}

const MAX_EDITS = 3000; // lines: the search for the shortest difference is quadratic in them
const AROUND = 3;

// What a pass changed, with some lines around each change.
function Difference({ before, after }) {
  const { rows, added, cut } = useMemo(() => {
    const [a, b] = [before.split("\n"), after.split("\n")];
    const whole = [
      { removed: true, value: a },
      { added: true, value: b },
    ];
    const parts = Diff.diffArrays(a, b, { maxEditLength: MAX_EDITS }) || whole;
    const sum = (key) => parts.reduce((n, part) => n + (part[key] ? part.value.length : 0), 0);
    return { rows: parts.flatMap(changedRows), added: sum("added"), cut: sum("removed") };
  }, [before, after]);
  const all = before.split("\n").length;
  return html`<div>
    <p class="told">${count(added, "line")} added, ${cut} removed, of ${all}</p>
    <${Code}
      text=${rows.map(([, text]) => text).join("\n")}
      language="plain"
      classes=${rows.map(([kind]) => kind)}
      label="difference"
    />
  </div>`;
}

// [class, text] of each line of a part; of lines that are alike, those next to a change.
function changedRows({ added, removed, value }, i, parts) {
  if (added) return value.map((line) => ["add", `+ ${line}`]);
  if (removed) return value.map((line) => ["cut", `- ${line}`]);
  const head = i === 0 ? 0 : AROUND;
  const tail = i === parts.length - 1 ? 0 : AROUND;
  const skipped = value.length - head - tail;
  const same = value.map((line) => ["", `  ${line}`]);
  if (skipped <= 0) return same;
  const gap = ["gap", `  ... ${count(skipped, "line")} alike`];
  return [...same.slice(0, head), gap, ...same.slice(value.length - tail)];
}

// The text of a function: breaks and guards are texts by line, start is where it begins.
function Source({ text, first, start, breaks, guards }) {
  const whole = text.trimEnd().split("\n");
  const widths = whole.filter((line) => line.trim()).map((line) => line.search(/\S/));
  const lines = whole.map((line) => line.slice(Math.min(...widths)));
  const modes = colourModes(lines);
  const mark = (kind, name, found) =>
    found && html`<span class="tag ${kind}" title=${found.join("\n")}>${name}</span>`;
  return html`<div class="scroll" tabindex="0" role="region" aria-label="source">
    <table class="source">
      <tbody>
        ${lines.map((line, i) => {
          const n = first + i;
          const [ends, born] = [breaks[n], guards[n]];
          return html`<tr class=${ends ? "cut" : n === start ? "start" : null}>
            <td class="no">${n}</td>
            <td class="marks">
              ${mark("bad", "break", ends)}
              ${mark("info", born && count(born.length, "guard"), born)}
            </td>
            <td><pre>${colour(line, modes[i])}</pre></td>
          </tr>`;
        })}
      </tbody>
    </table>
  </div>`;
}
