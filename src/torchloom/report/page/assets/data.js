// The record: read once, then indexed by the names that the addresses of views use.

const data = { functions: [], entries: [], breaks: [], root: "" }; // and record, run or compare

async function readRecord() {
  if (typeof DecompressionStream === "undefined") {
    throw new Error(
      "This browser cannot unpack the record: it lacks DecompressionStream " +
        "(Chrome 80, Firefox 113, Safari 16.4 have it).",
    );
  }
  const coded = atob(document.getElementById("record").textContent.trim());
  const raw = Uint8Array.from(coded, (c) => c.charCodeAt(0));
  const stream = new Blob([raw]).stream().pipeThrough(new DecompressionStream("gzip"));
  const packed = JSON.parse(await new Response(stream).text());
  const { texts, ...parts } = packed;
  Object.assign(data, restore(parts, texts));
  if (data.record) index();
}

function restore(value, texts) {
  if (Array.isArray(value)) {
    for (let i = 0; i < value.length; i++) {
      if (typeof value[i] === "object") value[i] = restore(value[i], texts);
    }
    return value;
  }
  if (value === null || typeof value !== "object") return value;
  if (typeof value.$text === "number") return texts[value.$text];
  for (const key of Object.keys(value)) {
    if (typeof value[key] === "object") value[key] = restore(value[key], texts);
  }
  return value;
}

function index() {
  const walk = (f, parent, depth) => {
    const item = { fn: f, parent, depth, id: unique(f.name, data.functions) };
    data.functions.push(item);
    for (const entry of f.entries) {
      const epoch = entry.epoch ? `@${entry.epoch}` : "";
      const id = unique(entry.compile_id.replaceAll("/", "-") + epoch, data.entries);
      data.entries.push({ entry, owner: item, id, name: entry.compile_id + epoch });
    }
    for (const child of f.children) walk(child, item, depth + 1);
  };
  for (const f of data.record.functions) walk(f, null, 0);
  data.breaks = collectBreaks();
  data.root = commonFolder(data.functions.map((f) => f.fn.file));
}

function unique(name, items) {
  const taken = new Set(items.map((i) => i.id));
  let id = name,
    n = 2;
  while (taken.has(id)) id = `${name}~${n++}`;
  return id;
}

function commonFolder(files) {
  const paths = files.filter((f) => f.startsWith("/") && !f.includes("site-packages"));
  if (!paths.length) return "";
  let head = paths[0].slice(0, paths[0].lastIndexOf("/") + 1);
  for (const path of paths) {
    while (head && !path.startsWith(head))
      head = head.slice(0, head.lastIndexOf("/", head.length - 2) + 1);
  }
  return head.length > 1 ? head : "";
}

function collectBreaks() {
  const found = new Map();
  for (const owner of data.functions) {
    const own = owner.fn.breaks.map((each) => [each, null]);
    for (const item of data.entries.filter((e) => e.owner === owner)) {
      own.push(...item.entry.breaks.map((each) => [each, item]));
    }
    for (const [each, item] of own) {
      const place = placeOf(each);
      const key = (each.gb_type || each.reason) + "\n" + place;
      const seen = found.get(key);
      if (seen) seen.count += each.count;
      else found.set(key, { each, place, owner, item, count: each.count });
    }
  }
  return [...found.values()].sort((a, b) => b.count - a.count);
}

const placeOf = (each) => each.user_stack.at(-1) || "unknown";
// As torch's metrics tell; graphs that were captured to be served have spans alone.
function compileSeconds(entry) {
  if (entry.metrics.compile_s !== undefined) return Number(entry.metrics.compile_s);
  const whole = flame(entry.spans).filter((item) => item.lane === 0);
  return whole.reduce((sum, item) => sum + item.end - item.start, 0);
}
// Calls are counted at graphs; of an entry without one the number may not be known.
const callsOf = (entry) => (entry.is_counted === false ? "not counted" : String(entry.num_hits));
const sourcePlace = (fn) => (fn.file ? `${short(fn.file)}:${fn.line}` : "");
const entriesOf = (item) => data.entries.filter((e) => e.owner === item);
const fnHash = (item) => "fn/" + encodeURIComponent(item.id);
const entryHash = (item, sub) => "entry/" + encodeURIComponent(item.id) + (sub ? "/" + sub : "");
const entryByName = (item, name) =>
  data.entries.find(
    (e) =>
      e.owner === item.owner && e.entry.compile_id === name && e.entry.epoch === item.entry.epoch,
  );

// `file:line in function` to its parts.
function parsePlace(place) {
  const m = /^(.*):(\d+)(?: in (.*))?$/s.exec(place || "");
  return m ? { file: m[1], line: Number(m[2]), where: m[3] || "" } : null;
}

// What Dynamo calls torch_dynamo_resume_in_f_at_3 is the rest of f behind a graph break.
function nameOf(fn) {
  const rest = /^torch_dynamo_resume_in_(.+)_at_(\d+)$/.exec(fn.name);
  return rest ? `${rest[1]}, from line ${fn.line || rest[2]} on` : fn.name;
}
