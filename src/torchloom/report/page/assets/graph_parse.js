// Printed graphs back to nodes. Two forms: FX's readable text and torchloom's own pass text.

const GRAPH_KINDS =
  "dynamo pre_grad joint forward backward inference before_post_grad post_grad body".split(" ");

// Returns nodes {name, kind, target, shape, expr, inputs, after, line, text, source, module} in
// order; moduleOf: the modules of inputs whose names do not tell them.
function parseGraph(text, moduleOf = new Map()) {
  const lines = text.split("\n");
  const isLoom = lines.some((l) => /^%\w+ /.test(l)) && !/^class \w+\(/m.test(text);
  const { nodes, alias } = isLoom ? parseLoom(lines) : parseReadable(lines);
  const known = new Map(nodes.map((n) => [n.name, n]));
  const placed = new Map(nodes.map((n, i) => [n.name, i]));
  nodes.forEach((n, i) => {
    const read = namesIn(n.expr, isLoom).map((name) => alias.get(name) || name);
    // A name may only be used below its line: what looks otherwise is a word in a text.
    n.inputs = [...new Set(read)].filter((name) => placed.get(name) < i);
    n.kind = kindOf(n);
    if (n.kind === "input") n.module = moduleOf.get(n.name) || modulePath(n.name);
  });
  const flat = [...new Set(moduleOf.values())]
    .sort((a, b) => b.length - a.length)
    .map((path) => [path.replaceAll(".", "_") + "_", path]);
  for (const n of nodes) {
    if (n.kind !== "input") n.module = moduleOfNode(n, known, flat);
  }
  orderByWaits(nodes);
  return nodes;
}

// A wait returns nothing: what reads the values it waited for comes after it all the same.
function orderByWaits(nodes) {
  const waits = new Map();
  for (const n of nodes) {
    n.after = [...new Set(n.inputs.map((i) => waits.get(i)).filter(Boolean))];
    const values = /wait_(?:\.default)?\(\[([^\]]*)\]/.exec(n.kind === "wait" ? n.expr : "");
    for (const name of values ? values[1].split(",") : []) {
      waits.set(name.trim().replace("%", ""), n.name);
    }
  }
}

// A node is of the module that a text in it names, that its name begins with, or whose weight it
// reads. What moves weights of several modules at once is of none.
function moduleOfNode(n, known, flat) {
  if (n.kind === "output") return "";
  const named = modulePath(n.text);
  if (named || (n.kind !== "compute" && n.kind !== "view")) return named;
  const begins = n.target !== "getitem" && flat.find(([start]) => n.name.startsWith(start));
  if (begins) return begins[1];
  const read = n.inputs.map((name) => known.get(name)).filter((i) => i.kind === "input");
  const modules = new Set(read.map((i) => i.module).filter(Boolean));
  return modules.size === 1 ? [...modules][0] : "";
}

function parseLoom(lines) {
  const nodes = [];
  lines.forEach((text, line) => {
    const m = /^%([\w.]+)(?: : (.*?))? = (.*)$/.exec(text);
    if (m) {
      const expr = m[3].replace(/\s+# .*$/, "");
      const target = /^[\w.]+/.exec(expr)?.[0] || expr;
      nodes.push({ name: m[1], shape: m[2] || "", expr, line, text, target });
    } else if (/^return\b/.test(text)) {
      nodes.push({ name: "output", shape: "", expr: text, line, text, target: "output" });
    }
  });
  return { nodes, alias: new Map() };
}

const TYPED = /(\w+)\s*:\s*"([^"]*)"/g;
const DELETED = /;\s+(?:\w+ = )+None$/;

function parseReadable(lines) {
  const nodes = [];
  const alias = new Map();
  const add = (name, shape, expr, line, text, target, source) =>
    nodes.push({ name, shape: shape || "", expr, line, text: text.trim(), target, source });
  const given = (name, shape, line, text) =>
    add(name, shape, "placeholder", line, text, "placeholder");
  let source;
  let isSignature = false;
  for (let i = 0; i < lines.length; i++) {
    const text = lines[i].trim();
    isSignature ||= /^def forward\(/.test(text);
    const input = /^(\w+): "([^"]*)"\s*(#.*)?$/.exec(text); // of a joint graph
    const m = /^(\w+)(?:\s*:\s*"([^"]*)")?\s*=\s*(.*)$/.exec(text);
    if (isSignature) {
      const comment = /"\s*,?(\s+# .*)$/.exec(text)?.[1] || "";
      for (const [whole, name, shape] of text.matchAll(TYPED)) {
        given(name, shape, i, whole + comment);
      }
      isSignature = !/\):$/.test(text);
    } else if (text.startsWith("#")) source = sourceOf(text);
    else if (/^return\b/.test(text)) {
      const whole = statement(lines, i);
      add("output", "", whole, i, whole.slice(0, 2000), "output");
      break;
    } else if (input) given(input[1], input[2], i, text);
    else if (m && !/\bfx_pytree\b/.test(text)) {
      const expr = m[3].replace(DELETED, "");
      const isAlias = /^\w+$/.test(expr) && expr.toLowerCase() === m[1].toLowerCase();
      if (isAlias) alias.set(m[1], expr); // l_x_ = L_x_
      else add(m[1], m[2], expr, i, text.replace(DELETED, ""), targetOf(expr), source);
    }
  }
  return { nodes, alias };
}

// A statement that goes on until its brackets are closed, without its comments.
function statement(lines, i) {
  const parts = [];
  for (let depth = 0; i < lines.length; i++) {
    const line = lines[i].replace(/#.*/, "").trim();
    parts.push(line);
    for (const c of line) depth += "([{".includes(c) ? 1 : ")]}".includes(c) ? -1 : 0;
    if (depth <= 0) break;
  }
  return parts.join(" ");
}

function sourceOf(comment) {
  const m = /File: (\S+:\d+) in ([^,]+), code: (.*)$/.exec(comment);
  return m ? { place: m[1], where: m[2], code: m[3] } : undefined;
}

function targetOf(expr) {
  const call = /^([A-Za-z_][\w.]*)\(/.exec(expr)?.[1];
  if (call) {
    const path = call.replace(/^torch\.ops\./, "").replace(/\.default$/, "");
    const [, owner, method] = /^(\w+)\.(\w+)$/.exec(path) || [];
    const isSpace = /^(torch|aten|torchloom|prims|operator|_C|inductor)$/.test(owner);
    return method && !isSpace && !call.startsWith("torch.") ? "." + method : path;
  }
  if (/^\w+\[[^\]]*\]$/.test(expr)) return "getitem";
  if (/^-/.test(expr)) return "neg";
  const sign = / (\*\*|\/\/|[-+*\/@<>&|^]|==|!=|<=|>=) /.exec(expr);
  return sign ? sign[1] : expr.replace(/^\w+\./, ".").slice(0, 40);
}

function namesIn(expr, isLoom) {
  const bare = expr.replace(/'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"/g, "''");
  const name = isLoom ? /%([\w.]+)/g : /(?<![\w.])([A-Za-z_]\w*)(?!\w*\s*=[^=])/g;
  return [...bare.matchAll(name)].map((m) => m[1]);
}

const VIEW_NAMES =
  "_unsafe_view|view|reshape|permute|transpose|expand|unsqueeze|squeeze|slice|select|alias|" +
  "detach|split|split_with_sizes|chunk|getitem|as_strided|unbind|t|flatten|unflatten|contiguous|" +
  "clone";
// The first that a target fits.
const KIND_TARGETS = [
  ["input", /^(placeholder|get_attr)$/],
  ["output", /^output$/],
  ["wait", /^torchloom\.wait_|wait_tensor/],
  ["gather", /^torchloom\.(gather|replicate)|all_gather|broadcast/],
  ["reduce", /^torchloom\.(reduce|sync)|reduce_scatter|all_reduce|all_to_all/],
  ["offload", /offload|reload|to_host|to_device|prefetch/],
  ["view", new RegExp(`(^|\\.)(${VIEW_NAMES})(\\.|$)`)],
  ["layer", /^torchloom\.region/],
  ["compute", /(?:)/],
];
const kindOf = ({ target }) => KIND_TARGETS.find(([, fits]) => fits.test(target))[0];

// The body that a node calls, and which half of it: names are those of the record's bodies.
function bodyOf(n) {
  if (n.kind !== "layer") return null;
  const name = /\(\s*['"]?([0-9a-zA-Z-]+)/.exec(n.expr)?.[1] || "";
  return { name, half: /region_backward/.test(n.target) ? "backward" : "forward" };
}

// The module that a parameter's name tells of: `blocks.0.attention.q` of
// L_self_modules_blocks_modules_0_modules_attention_modules_q_parameters_weight_ and of
// a collective's 'blocks.0.attention.q.weight'.
function modulePath(text) {
  const m = /_modules_/.test(text) && /modules_(.*?)(?:_parameters_|_buffers_|$)/.exec(text);
  if (m) return m[1].split("_modules_").join(".");
  const quoted = /'([A-Za-z_]\w*(?:\.\w+)+)'/.exec(text);
  return quoted && !/\.py$/.test(quoted[1]) ? quoted[1].split(".").slice(0, -1).join(".") : "";
}

// Names of AOT's inputs are numbers; their comments say which of Dynamo's inputs each one is.
function inputModules(entry, text) {
  const found = new Map();
  const dynamo = entry.artifacts.find((a) => a.kind === "dynamo");
  if (!dynamo) return found;
  const given = parseReadable(dynamo.text.split("\n"))
    .nodes.filter((n) => n.target === "placeholder")
    .map((n) => modulePath(n.name));
  const commented = /^(joint|forward|backward|inference)$/;
  const comment = /^\s*(primals_\d+|arg\d+_1):.*# PlainAOTInput\(idx=(\d+)\)/gm;
  const texts = entry.artifacts.filter((a) => commented.test(a.kind)).map((a) => a.text);
  for (const each of [text, ...texts]) {
    for (const [, name, at] of each.matchAll(comment)) {
      if (given[at]) found.set(name, given[at]);
    }
  }
  return found;
}
