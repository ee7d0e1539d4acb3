// A line diff: Myers' shortest edit between what is left after the common ends are cut off.

const MAX_EDITS = 3000,
  AROUND = 3;

// Returns [sign, text] rows, sign one of " ", "-", "+".
function diffLines(before, after) {
  const a = before.split("\n"),
    b = after.split("\n");
  let head = 0,
    tail = 0;
  while (head < a.length && head < b.length && a[head] === b[head]) head++;
  while (
    tail < a.length - head &&
    tail < b.length - head &&
    a[a.length - 1 - tail] === b[b.length - 1 - tail]
  )
    tail++;
  const left = a.slice(head, a.length - tail),
    right = b.slice(head, b.length - tail);
  return [
    ...a.slice(0, head).map((l) => [" ", l]),
    ...(myers(left, right) || [...left.map((l) => ["-", l]), ...right.map((l) => ["+", l])]),
    ...a.slice(a.length - tail).map((l) => [" ", l]),
  ];
}

// Null where the two differ by more than MAX_EDITS lines: the search is quadratic in that number.
function myers(a, b) {
  const most = Math.min(a.length + b.length, MAX_EDITS),
    trace = [];
  let v = new Int32Array(2 * most + 3);
  for (let d = 0; d <= most; d++) {
    trace.push(v.slice(most - d, most + d + 3));
    for (let k = -d; k <= d; k += 2) {
      const at = most + 1 + k;
      let x = k === -d || (k !== d && v[at - 1] < v[at + 1]) ? v[at + 1] : v[at - 1] + 1;
      let y = x - k;
      while (x < a.length && y < b.length && a[x] === b[y]) {
        x++;
        y++;
      }
      v[at] = x;
      if (x >= a.length && y >= b.length) return backtrack(a, b, trace);
    }
  }
  return null;
}

function backtrack(a, b, trace) {
  const rows = [];
  let x = a.length,
    y = b.length;
  for (let d = trace.length - 1; d >= 0; d--) {
    const v = trace[d],
      get = (k) => v[k + d + 1],
      k = x - y;
    const down = k === -d || (k !== d && get(k - 1) < get(k + 1));
    const fromK = down ? k + 1 : k - 1;
    const px = d === 0 ? 0 : get(fromK),
      py = d === 0 ? 0 : px - fromK;
    while (x > px && y > py && x > 0 && y > 0) {
      rows.push([" ", a[--x]]);
      y--;
    }
    if (d === 0) break;
    if (down) rows.push(["+", b[--y]]);
    else rows.push(["-", a[--x]]);
  }
  return rows.reverse();
}

function diffView(before, after) {
  const rows = diffLines(before, after);
  const near = new Uint8Array(rows.length);
  rows.forEach(([sign], i) => {
    if (sign !== " ") near.fill(1, Math.max(0, i - AROUND), i + AROUND + 1);
  });
  const lines = [],
    signs = [];
  let skipped = 0;
  rows.forEach(([sign, text], i) => {
    if (!near[i]) {
      skipped++;
      return;
    }
    if (skipped) {
      lines.push(`  ... ${count(skipped, "line")} alike`);
      signs.push("gap");
      skipped = 0;
    }
    lines.push(`${sign} ${text}`);
    signs.push({ "+": "add", "-": "cut", " ": "" }[sign]);
  });
  if (skipped) {
    lines.push(`  ... ${count(skipped, "line")} alike`);
    signs.push("gap");
  }
  const added = rows.filter((r) => r[0] === "+").length,
    cut = rows.filter((r) => r[0] === "-").length;
  return el(
    "div",
    {},
    el(
      "p",
      { class: "told" },
      `${count(added, "line")} added, ${cut} removed, of ${rows.length - added}`,
    ),
    codeView(lines.join("\n"), { language: "plain", classes: (i) => signs[i], label: "difference" })
      .box,
  );
}
