// The record and its views, read once; functions and entries under the names of their addresses.

const data = {};

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
  const { texts, ...parts } = JSON.parse(await new Response(stream).text());
  Object.assign(data, restore(parts, texts));
  if (data.record) index();
}

function restore(value, texts) {
  if (value === null || typeof value !== "object") return value;
  if (typeof value.$text === "number") return texts[value.$text];
  for (const key in value) {
    if (typeof value[key] === "object") value[key] = restore(value[key], texts);
  }
  return value;
}

// Python's views stand in the order of the record's functions and entries.
function index() {
  const entries = [];
  const walk = (fn) => {
    entries.push(...fn.entries);
    fn.children.forEach(walk);
  };
  data.record.functions.forEach(walk);
  data.entries.forEach((item, i) => {
    item.entry = entries[i];
    item.owner = data.functions[item.owner];
  });
}

const entryHash = (item, part) =>
  `entry/${encodeURIComponent(item.id)}` + (part ? `/${part}` : "");
const fnLink = (item) => ["a", `fn/${encodeURIComponent(item.id)}`, item.name];
