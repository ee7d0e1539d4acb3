"""What one asks first of a run: its speed, its loss, its memory, what was predicted, the slowest rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torchloom.records.summary import count
from torchloom.report.page.elements import (
    Node,
    percent,
    prose,
    rounded,
    seconds,
    section,
    size,
    table,
    told,
)  # fmt: skip
from torchloom.report.page.figures import RunFigures, known

_BUDGET: Node = prose("set `compile.memory_budget`")
_CURVES = {
    "loss": "Loss over steps",
    "tokens_per_s": "Tokens per second over steps",
    "memory_bytes": "Memory over steps",
}
Values = Sequence[float | None]


def headline(run: RunFigures) -> Node:
    """Return the first figures, the curves, predictions and ranks."""
    return [
        "",
        ["div.headline", _step(run), _tokens(run), _loss(run), _memory(run)],
        curves([("", run)]),
        [
            "div.columns",
            section("Predicted and measured", _predictions(run)),
            section(
                "Ranks",
                *_ranks(run),
                none="No rank recorded its steps: torchloom train --report, or an engine in a watch.",
            ),
        ],
    ]


def curves(runs: Sequence[tuple[str, RunFigures]]) -> Node:
    """Return one chart for each quantity, with a line for each run."""
    charts = []
    for key, title in _CURVES.items():
        lines: list[tuple[str, dict[float | None, float | None]]] = []
        for name, run in runs:
            lines.append((name or "training", _by_step(run.curves, key)))
            if key == "loss":
                lines.append((f"{name} held-out".strip(), _by_step(run.heldout, key)))
        full = [(label, at) for label, at in lines if len(known([*at.values()])) > 1]
        xs = sorted({x for _, at in full for x in at if x is not None})
        chart = {
            "is": "LineChart", "title": title, "x": "step", "xs": xs, "small": True,
            "series": [{"label": label, "ys": [at.get(x) for x in xs]} for label, at in full],
            "shows": "bytes" if key == "memory_bytes" else "number",
        }  # fmt: skip
        charts += [chart] if full else []
    return ["div.curves", *charts] if charts else None


def _by_step(columns: dict[str, list[float | None]], key: str) -> dict[float | None, float | None]:
    return dict(zip(columns.get("step", ()), columns.get(key, ()), strict=True))


def _figure(name: str, value: str | None, note: str, missing: str, is_bad: bool = False) -> Node:
    """Return a figure under its name, with a note; without a value, what records it."""
    if value is None:
        shown = ["strong", "not recorded"], ["small", prose(missing)]
        return ["div.figure.none", ["span", name], *shown]
    kind = "div.figure.bad" if is_bad else "div.figure"
    return [kind, ["span", name], ["strong", value], ["small", note]]


def _step(run: RunFigures) -> Node:
    value, note, step = None, "", run.step_s
    if step is not None:
        left = f", {run.num_compiled} that compiled left out" if run.num_compiled else ""
        half = f"middle half {seconds(step.low)} to {seconds(step.high)}"
        value, note = seconds(step.median), f"{half}; {count(step.num, 'step')}{left}"
    return _figure("step time", value, note, "torchloom train and engines record steps")


def _tokens(run: RunFigures) -> Node:
    value = None if run.tokens_per_s is None else rounded(run.tokens_per_s)
    note = "all ranks together" if run.mfu is None else f"all ranks; {100 * run.mfu:.1f}% MFU"
    return _figure("tokens/s", value, note, "needs token ids, and `gradient_clipping`")


def _loss(run: RunFigures) -> Node:
    held_out = _ends(run.heldout.get("loss", ()))
    note = f"held-out {held_out}" if held_out else "training loss, mean of all ranks"
    loss = _ends(run.curves.get("loss", ()))
    return _figure("loss, first → last", loss, note, "set `gradient_clipping`")


def _ends(values: Values) -> str | None:
    found = known(values)
    return f"{rounded(found[0])} → {rounded(found[-1])}" if found else None


def _memory(run: RunFigures) -> Node:
    """The measured peak where there is one, else the predicted: against the budget, else the prediction."""
    is_measured = run.measured_bytes is not None
    peak = run.measured_bytes if is_measured else run.predicted_bytes
    limit = run.budget_bytes or (run.predicted_bytes if is_measured else None)
    is_known = limit is not None and peak is not None
    what = "predicted" if run.budget_bytes is None else "budget"
    note = f"{percent(peak, limit)} of {size(limit)} {what}" if is_known else "tensors; no budget"
    if run.memory_bytes is not None:
        own = "the whole process" if run.is_process_memory else "allocated"
        note += f"; {own} {size(run.memory_bytes)}"
    return _figure(
        f"peak memory, {'measured' if is_measured else 'predicted'}",
        None if peak is None else size(peak),
        note,
        "a compiled engine records it",
        is_bad=is_known and peak > limit,
    )


def _predictions(run: RunFigures) -> Node:
    later = _BUDGET if run.predicted_s is None else "a few steps after the compile"

    def row(
        what: str, show: Callable[[float], str], predicted: float | None, measured: float | None
    ) -> list[Node]:
        return [
            what,
            _BUDGET if predicted is None else show(predicted),
            later if measured is None else show(measured),
            f"{measured / predicted:.2f}x" if predicted and measured is not None else "",
        ]

    rows = [
        row("forward and backward", seconds, run.predicted_s, run.measured_s),
        row("peak memory", size, run.predicted_bytes, run.measured_bytes),
    ]
    return table(["of a step", "#predicted", "#measured", "#ratio"], rows, "predictions")


def _ranks(run: RunFigures) -> list[Node]:
    if not run.ranks:
        return []
    by_work = sorted(run.ranks, key=lambda each: each.works_s)
    fastest, slowest, num = by_work[0], by_work[-1], len(run.ranks)
    more = percent(slowest.works_s - fastest.works_s, fastest.works_s)
    rows: list[list[Node]] = [
        [
            str(each.rank),
            seconds(each.step_s.median),
            f"{seconds(each.step_s.low)} to {seconds(each.step_s.high)}",
            seconds(each.works_s),
            seconds(each.waits_s),
        ]
        for each in run.ranks
    ]
    watched = f"In {count(slowest.step_s.num, 'step')} while watched."
    if num < run.world_size:
        watched += f" {num} of {run.world_size} ranks recorded: open torchloom.watch(path) on each."
    slow = f": it works {seconds(slowest.works_s)} of a step, {more} more than rank {fastest.rank}."
    return [
        ["p", ["strong", f"Rank {slowest.rank} is the slowest"], slow] if num > 1 else None,
        table(["rank", "#median step", "#middle half", "#works", "#waits"], rows, "ranks"),
        told(watched),
    ]
