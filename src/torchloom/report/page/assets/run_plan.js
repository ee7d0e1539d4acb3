// The plan that keeps the memory budget, and its reasons.

const DECISIONS_SHOWN = 40;
const ACTIONS = {
  keep: "kept from forward to backward",
  recompute: "computed again in backward",
  offload: "waits in host memory",
  unused: "not needed by backward",
};

const microseconds = (us) => seconds(us / 1e6);
const percent = (part, whole) => `${((100 * part) / (whole || 1)).toFixed(1)}%`;

function runPlan() {
  const plans = [...newest(data.record.plans).values()];
  if (!plans.length) return null;
  const out = el("div", {});
  const draw = (graph) => out.replaceChildren(...planView(plans.find((p) => p.graph === graph)));
  draw(plans.at(-1).graph);
  const pick =
    plans.length > 1 &&
    choice(
      "Graph",
      plans.map((p) => ({ value: p.graph, name: p.graph })),
      plans.at(-1).graph,
      draw,
    );
  return section("The plan and its reasons", pick && el("div", { class: "bar" }, pick), out);
}

function planView(plan) {
  const rows = plan.decisions.filter((d) => d.action !== "unused");
  const more = rows.length - DECISIONS_SHOWN;
  const cells = rows.slice(0, DECISIONS_SHOWN).map((d) => [
    el("code", {}, d.value),
    d.where,
    bytes(d.num_bytes),
    el("span", { class: `tag ${d.action === "keep" ? "good" : "info"}` }, ACTIONS[d.action]),
    microseconds(d.cost_us),
    d.num_bytes ? microseconds((d.cost_us * (1 << 20)) / d.num_bytes) : "",
  ]);
  const columns = [
    { name: "value" },
    { name: "layer" },
    { name: "bytes", class: "num" },
    { name: "decision" },
    { name: "computing it again takes", class: "num" },
    { name: "time per MiB freed", class: "num" },
  ];
  return [
    el(
      "ul",
      { class: "reasons" },
      planReasons(plan).map((text) => el("li", {}, text)),
    ),
    cells.length
      ? el(
          "details",
          {},
          el("summary", {}, `${count(rows.length, "value")} between forward and backward`),
          table(columns, cells, { class: "decisions" }),
          more > 0 ? el("p", { class: "told" }, `and ${more} smaller ones in the record`) : null,
        )
      : null,
  ].filter(Boolean);
}

function planReasons(plan) {
  return [
    budgetReason(plan),
    peakReason(plan),
    ...["keep", "recompute", "offload"].map((action) => actionReason(plan, action)),
    ...transferReasons(plan),
    timeReason(plan),
    comparedReason(),
    boundReason(plan),
    triesReason(plan),
  ].filter(Boolean);
}

function budgetReason(plan) {
  const standing = (data.record.standing || []).at(-1);
  if (plan.budget_bytes === null) return "No budget bounds this graph.";
  if (!standing?.budget_bytes) return `Forward and backward may add ${bytes(plan.budget_bytes)}.`;
  return (
    `The budget is ${bytes(standing.budget_bytes)} for everything. Between steps ` +
    `${bytes(standing.base_bytes)} live on (parameters, optimizer states), so forward and ` +
    `backward may add ${bytes(plan.budget_bytes)}` +
    (Object.keys(plan.resident).length ? " beside the weights that stay gathered." : ".")
  );
}

function peakReason(plan) {
  const least = `The least that any plan found needs is ${bytes(plan.min_peak_bytes)}.`;
  if (plan.budget_bytes === null) return `They add ${bytes(plan.peak_bytes)} at the peak. ${least}`;
  return (
    `They add ${bytes(plan.peak_bytes)} at the peak, ` +
    `${percent(plan.peak_bytes, plan.budget_bytes)} of that. ${least}`
  );
}

function actionReason(plan, action) {
  const own = plan.decisions.filter((d) => d.action === action);
  if (!own.length) return null;
  const size = bytes(own.reduce((sum, d) => sum + d.num_bytes, 0));
  const what = `${count(own.length, "value")} (${size})`;
  if (action === "keep") return `Forward keeps ${what} for backward.`;
  if (action === "offload") {
    return `${what} wait in host memory between forward and backward; copies add ` +
      `${microseconds(plan.copy_us)}.`;
  }
  const cost =
    plan.extra_us > 0
      ? `to save their memory; this takes ${microseconds(plan.extra_us)}, ` +
        `${percent(plan.extra_us, plan.compute_us)} of compute`
      : "which takes no time that counts: cheap values that its kernels need anyway";
  return `Backward computes ${what} again, ${cost}.`;
}

function triesReason({ planning_s, num_tries }) {
  if (!planning_s) return "The plan came from the compiler's cache, with the code.";
  const took = `The planner took ${seconds(planning_s)}`;
  if (num_tries < 2) return `${took}; the code of its first plan was taken.`;
  return (
    `${took} in ${count(num_tries, "try", "tries")}: the code of a plan tells what the compiler ` +
    "needs beyond the graphs, and the next plan counts on it. The fastest that fits was taken."
  );
}

function transferReasons(plan) {
  const resident = Object.values(plan.resident);
  const pieces = Object.values(plan.pieces);
  const sum = (sizes) => bytes(sizes.reduce((a, b) => a + b, 0));
  return [
    resident.length
      ? `${count(resident.length, "weight")} (${sum(resident)}) ${resident.length > 1 ? "stay" : "stays"} ` +
        "gathered from step to step, as the budget has room: gathered once per optimizer step."
      : null,
    pieces.length
      ? `${count(pieces.length, "shard")} (${sum(pieces)}) ${pieces.length > 1 ? "stay" : "stays"} ` +
        "on the device, as the budget has room."
      : null,
    plan.bucket_bytes === 0 ? "Transfers are not merged: of the sizes tried, this was best." : null,
    plan.bucket_bytes
      ? `Transfers are merged up to ${bytes(plan.bucket_bytes)}, the best of the sizes tried.`
      : null,
    plan.prefetch_bytes === 0 ? "No weight is gathered ahead of its use." : null,
    plan.prefetch_bytes
      ? `Weights are gathered up to ${bytes(plan.prefetch_bytes)} ahead of their use.`
      : null,
  ];
}

function timeReason(plan) {
  const measured = percent(plan.measured_us, plan.compute_us);
  const states = plan.states_us
    ? `, optimizer states that wait on the host ${microseconds(plan.states_us)}`
    : "";
  return (
    `Predicted per run: compute ${microseconds(plan.compute_us)} (${measured} of it from ` +
    `operators measured on this machine, the rest modelled), computing again ` +
    `${microseconds(plan.extra_us)}, collectives and copies ${microseconds(plan.overhead_us)}${states}.`
  );
}

// Of a whole step, not of one graph: measured once for each plan.
function comparedReason() {
  const compared = data.record.events.filter((r) => r.kind === "PlanCompared").at(-1)?.data;
  if (!compared) return null;
  const predicted =
    compared.predicted_seconds === null ? "no one time" : seconds(compared.predicted_seconds);
  const times =
    compared.measured_seconds === null
      ? ""
      : `; forward and backward took ${seconds(compared.measured_seconds)}, where ${predicted} was predicted`;
  return (
    `Measured after step ${compared.step}: a peak of ${bytes(compared.measured_peak_bytes)}, where ` +
    `${bytes(compared.predicted_peak_bytes)} was predicted for everything${times}.`
  );
}

function boundReason(plan) {
  const added = plan.extra_us + plan.overhead_us + plan.states_us;
  const gap = added - plan.bound_us;
  return (
    `No plan of this kind within the budget adds less than ${microseconds(plan.bound_us)} to ` +
    `compute; this one adds ${microseconds(added)}, at most ` +
    `${percent(gap, plan.compute_us + plan.bound_us)} above the best time.`
  );
}
