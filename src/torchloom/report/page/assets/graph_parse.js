// Printed graphs back to nodes. Two forms: FX's readable text and torchloom's own pass text.

const GRAPH_KINDS = [
  "dynamo",
  "pre_grad",
  "joint",
  "forward",
  "backward",
  "inference",
  "before_post_grad",
  "post_grad",
  "body",
];

// Returns {nodes, output}: nodes are {name, kind, target, shape, inputs, line, text, source, module}.
function parseGraph(text, moduleOf = new Map()) {
  const lines = text.split("\n");
  const loom = lines.some((l) => /^%\w+ /.test(l)) && !/^class \w+\(/m.test(text);
  const graph = loom ? parseLoom(lines) : parseReadable(lines, text);
  const known = new Map(graph.nodes.map((n) => [n.name, n]));
  for (const node of graph.nodes) {
    node.inputs = [...new Set(names(node.expr, loom))]
      .filter((n) => n !== node.name)
      .map((n) => graph.alias.get(n) || n)
      .filter((n) => known.has(n));
    node.kind = kindOf(node);
    if (node.kind === "input") node.module = moduleOf.get(node.name) || modulePath(node.name);
  }
  const flat = [...new Set(moduleOf.values())]
    .sort((a, b) => b.length - a.length)
    .map((path) => [path.replaceAll(".", "_") + "_", path]);
  for (const node of graph.nodes) {
    if (node.kind !== "input") node.module = moduleOfNode(node, known, flat);
  }
  const placed = new Map(graph.nodes.map((n, i) => [n.name, i]));
  // A name may only be used below its line: what looks otherwise is a word in a text.
  for (const node of graph.nodes) {
    node.inputs = node.inputs.filter((n) => placed.get(n) < placed.get(node.name));
  }
  orderByWaits(graph.nodes);
  return graph;
}

// A wait returns nothing: what reads the values it waited for comes after it all the same.
function orderByWaits(nodes) {
  const waits = new Map();
  for (const n of nodes) {
    n.after = [...new Set(n.inputs.map((i) => waits.get(i)).filter(Boolean))];
    const values = /wait_(?:\.default)?\(\[([^\]]*)\]/.exec(n.kind === "wait" ? n.expr : "");
    for (const name of values ? values[1].split(",") : [])
      waits.set(name.trim().replace("%", ""), n.name);
  }
}

// A node is of the module that a text in it names, that its name begins with, or whose weight it
// reads. What moves weights of several modules at once is of none.
function moduleOfNode(n, known, flat) {
  if (n.kind === "output") return "";
  const named = modulePath(n.text);
  if (named) return named;
  if (n.kind !== "compute" && n.kind !== "view") return "";
  const begins = n.target !== "getitem" && flat.find(([start]) => n.name.startsWith(start));
  if (begins) return begins[1];
  const read = new Set(
    n.inputs
      .map((i) => known.get(i))
      .filter((i) => i.kind === "input")
      .map((i) => i.module)
      .filter(Boolean),
  );
  return read.size === 1 ? [...read][0] : "";
}

function node(name, shape, expr, line, text, source, target) {
  return { name, shape, expr, line, text: text.trim(), source, target, inputs: [], module: "" };
}

function parseLoom(lines) {
  const nodes = [];
  lines.forEach((raw, i) => {
    const m = /^%([\w.]+)(?: : (.*?))? = (.*)$/.exec(raw);
    if (m) {
      const expr = m[3].replace(/\s+# .*$/, "");
      const target = /^[\w.]+/.exec(expr)?.[0] || expr;
      nodes.push(node(m[1], m[2] || "", expr, i, raw, "", target));
    } else if (/^return\b/.test(raw)) {
      nodes.push(node("output", "", raw, i, raw, "", "output"));
    }
  });
  return { nodes, alias: new Map() };
}

function parseReadable(lines, text) {
  const nodes = [],
    alias = new Map();
  const state = { source: "", signature: false };
  for (let i = 0; i < lines.length; i++) {
    const line = lines[i].trim();
    if (/^def forward\(/.test(line)) state.signature = true;
    if (state.signature) {
      for (const m of line.matchAll(/(\w+)\s*:\s*"([^"]*)"/g)) {
        nodes.push(node(m[1], m[2], "placeholder", i, m[0] + commentOf(line), "", "placeholder"));
      }
      if (/\):$/.test(line)) state.signature = false;
      continue;
    }
    if (line.startsWith("#")) {
      state.source = sourceOf(line);
      continue;
    }
    if (/^return\b/.test(line)) {
      const whole = statement(lines, i);
      nodes.push(node("output", "", whole, i, whole.slice(0, 2000), "", "output"));
      break;
    }
    readStatement(line, i, state.source, nodes, alias);
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

function readStatement(line, i, source, nodes, alias) {
  let m = /^(\w+): "([^"]*)"\s*(#.*)?$/.exec(line); // an input of a joint graph
  if (m) {
    nodes.push(node(m[1], m[2], "placeholder", i, line, "", "placeholder"));
    return;
  }
  m = /^(\w+)(?:\s*:\s*"([^"]*)")?\s*=\s*(.*)$/.exec(line);
  if (!m || /\bfx_pytree\b/.test(line)) return;
  const expr = m[3].replace(/;\s+(?:\w+ = )+None$/, "");
  if (/^\w+$/.test(expr) && expr.toLowerCase() === m[1].toLowerCase()) {
    alias.set(m[1], expr); // l_x_ = L_x_
    return;
  }
  nodes.push(
    node(
      m[1],
      m[2] || "",
      expr,
      i,
      line.replace(/;\s+(?:\w+ = )+None$/, ""),
      source,
      targetOf(expr),
    ),
  );
}

const commentOf = (line) => /"\s*,?(\s+# .*)$/.exec(line)?.[1] || "";

function sourceOf(comment) {
  const m = /File: (\S+:\d+) in ([^,]+), code: (.*)$/.exec(comment);
  return m ? { place: m[1], where: m[2], code: m[3] } : "";
}

function targetOf(expr) {
  const call = /^([A-Za-z_][\w.]*)\(/.exec(expr);
  if (call) {
    const path = call[1].replace(/^torch\.ops\./, "").replace(/\.default$/, "");
    const m = /^(\w+)\.(\w+)$/.exec(path);
    return m &&
      !/^(torch|aten|torchloom|prims|operator|_C|inductor)$/.test(m[1]) &&
      !call[1].startsWith("torch.")
      ? "." + m[2]
      : path;
  }
  if (/^\w+\[[^\]]*\]$/.test(expr)) return "getitem";
  if (/^-/.test(expr)) return "neg";
  const sign = / (\*\*|\/\/|[-+*\/@<>&|^]|==|!=|<=|>=) /.exec(expr);
  return sign ? sign[1] : expr.replace(/^\w+\./, ".").slice(0, 40);
}

function names(expr, loom) {
  const bare = expr.replace(/'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"/g, "''");
  if (loom) return [...bare.matchAll(/%([\w.]+)/g)].map((m) => m[1]);
  return [...bare.matchAll(/(?<![\w.])([A-Za-z_]\w*)(?!\w*\s*=[^=])/g)].map((m) => m[1]);
}

const VIEW_NAMES =
  "_unsafe_view|view|reshape|permute|transpose|expand|unsqueeze|squeeze|slice|select|alias|detach|" +
  "split|split_with_sizes|chunk|getitem|as_strided|unbind|t|flatten|unflatten|contiguous|clone";
const VIEWS = new RegExp(`(^|\\.)(${VIEW_NAMES})(\\.|$)`);

function kindOf(n) {
  if (n.target === "placeholder" || n.target === "get_attr") return "input";
  if (n.target === "output") return "output";
  const t = n.target;
  if (/^torchloom\.wait_|wait_tensor/.test(t)) return "wait";
  if (/^torchloom\.(gather|replicate)|all_gather|broadcast/.test(t)) return "gather";
  if (/^torchloom\.(reduce|sync)|reduce_scatter|all_reduce|all_to_all/.test(t)) return "reduce";
  if (/offload|reload|to_host|to_device|prefetch/.test(t)) return "offload";
  if (VIEWS.test(t)) return "view";
  if (/^torchloom\.region/.test(t)) return "layer";
  return "compute";
}

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
  if (/_modules_/.test(text)) {
    const m = /modules_(.*?)(?:_parameters_|_buffers_|$)/.exec(text);
    if (m) return m[1].split("_modules_").join(".");
  }
  const quoted = /'([A-Za-z_]\w*(?:\.\w+)+)'/.exec(text);
  return quoted && !/\.py$/.test(quoted[1]) ? quoted[1].split(".").slice(0, -1).join(".") : "";
}

// Names of AOT's inputs are numbers; their comments say which of Dynamo's inputs each one is.
function inputModules(entry, text) {
  const found = new Map();
  const dynamo = entry.artifacts.find((a) => a.kind === "dynamo");
  if (!dynamo) return found;
  const given = parseReadable(dynamo.text.split("\n"), dynamo.text)
    .nodes.filter((n) => n.target === "placeholder")
    .map((n) => modulePath(n.name));
  const commented = entry.artifacts.filter((a) =>
    ["joint", "forward", "backward", "inference"].includes(a.kind),
  );
  for (const each of [text, ...commented.map((a) => a.text)]) {
    for (const m of each.matchAll(/^\s*(primals_\d+|arg\d+_1):.*# PlainAOTInput\(idx=(\d+)\)/gm)) {
      if (given[Number(m[2])]) found.set(m[1], given[Number(m[2])]);
    }
  }
  return found;
}
