"""What one asks first of a run: its speed, its loss, its memory, what was predicted, the slowest rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torchloom.report.page.elements import (
    Node,
    count,
    el,
    empty,
    percent,
    rounded,
    seconds,
    section,
    size,
    table,
)  # fmt: skip
from torchloom.report.page.figures import RunFigures

_BUDGET: Node = ["", "set ", ["code", "compile.memory_budget"]]
_CURVES = (
    ("Loss over steps", "loss"),
    ("Tokens per second over steps", "tokens_per_s"),
    ("Memory over steps", "memory_bytes"),
)


def headline(run: RunFigures) -> Node:
    """Return the first figures, the curves, predictions and ranks."""
    return [
        "",
        ["div.headline", _step(run), _tokens(run), _loss(run), _memory(run)],
        curves([("", run)]),
        [
            "div.columns",
            section("Predicted and measured", _predictions(run)),
            section("Ranks", *_ranks(run)),
        ],
    ]


def curves(runs: Sequence[tuple[str, RunFigures]]) -> Node:
    """Return one chart for each quantity, with a line for each run."""
    charts = []
    for title, key in _CURVES:
        lines = []
        for name, run in runs:
            lines.append((name or "training", run.curves.get("step"), run.curves.get(key)))
            if key == "loss":
                held_out = f"{name} held-out".strip()
                lines.append((held_out, run.heldout.get("step"), run.heldout.get("loss")))
        full = [line for line in lines if len(_known(line[2])) > 1]
        if full:
            charts.append(_curve(title, key, full))
    return ["div.curves", *charts] if charts else None


def _curve(title: str, key: str, lines: Sequence[tuple]) -> Node:
    xs = sorted({x for _, own, _ in lines for x in own})
    found = [(label, dict(zip(own, ys, strict=True))) for label, own, ys in lines]
    series = [{"label": label, "ys": [at.get(x) for x in xs]} for label, at in found]
    shows = "bytes" if key == "memory_bytes" else "number"
    return {
        "is": "LineChart", "title": title, "x": "step", "xs": xs, "series": series, "shows": shows,
        "small": True,
    }  # fmt: skip


def _known(values: Sequence[float | None] | None) -> list[float]:
    return [value for value in values or () if value is not None]


def _figure(name: str, value: str | None, note: str, missing: Node, is_bad: bool = False) -> Node:
    """Return a figure under its name, with a note; without a value, what records it."""
    kind = "div.figure.none" if value is None else "div.figure.bad" if is_bad else "div.figure"
    shown = ["strong", "not recorded" if value is None else value]
    return [kind, ["span", name], shown, ["small", missing if value is None else note]]


def _step(run: RunFigures) -> Node:
    missing, step = "torchloom train and engines record steps", run.step_s
    if step is None:
        return _figure("step time", None, "", missing)
    left = f", {run.num_compiled} that compiled left out" if run.num_compiled else ""
    half = f"middle half {seconds(step.low)} to {seconds(step.high)}"
    note = f"{half}; {count(step.num, 'step')}{left}"
    return _figure("step time", seconds(step.median), note, missing)


def _tokens(run: RunFigures) -> Node:
    value = None if run.tokens_per_s is None else rounded(run.tokens_per_s)
    note = "all ranks together" if run.mfu is None else f"all ranks; {100 * run.mfu:.1f}% MFU"
    missing = ["", "needs token ids, and ", ["code", "gradient_clipping"]]
    return _figure("tokens/s", value, note, missing)


def _loss(run: RunFigures) -> Node:
    held_out = _ends(run.heldout.get("loss"))
    note = f"held-out {held_out}" if held_out else "training loss, mean of all ranks"
    missing = ["", "set ", ["code", "gradient_clipping"]]
    return _figure("loss, first → last", _ends(run.curves.get("loss")), note, missing)


def _ends(values: Sequence[float | None] | None) -> str | None:
    known = _known(values)
    return f"{rounded(known[0])} → {rounded(known[-1])}" if known else None


def _memory(run: RunFigures) -> Node:
    """The measured peak where there is one, else the predicted: against the budget, else the prediction."""
    is_measured = run.measured_bytes is not None
    peak = run.measured_bytes if is_measured else run.predicted_bytes
    limit = run.budget_bytes or (run.predicted_bytes if is_measured else None)
    notes = ["tensors; no budget"]
    if limit is not None and peak is not None:
        what = "predicted" if run.budget_bytes is None else "budget"
        notes = [f"{percent(peak, limit)} of {size(limit)} {what}"]
    if run.memory_bytes is not None:
        own = "the whole process" if run.is_process_memory else "allocated"
        notes.append(f"{own} {size(run.memory_bytes)}")
    return _figure(
        f"peak memory, {'measured' if is_measured else 'predicted'}",
        None if peak is None else size(peak),
        "; ".join(notes),
        "a compiled engine records it",
        is_bad=peak is not None and limit is not None and peak > limit,
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
        return [
            empty("No rank recorded its steps: torchloom train --report, or an engine in a watch.")
        ]
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
    told = f"In {count(slowest.step_s.num, 'step')} while watched."
    if num < run.world_size:
        told += f" {num} of {run.world_size} ranks recorded: open torchloom.watch(path) on each."
    slow = f": it works {seconds(slowest.works_s)} of a step, {more} more than rank {fastest.rank}."
    return [
        ["p", ["strong", f"Rank {slowest.rank} is the slowest"], slow] if num > 1 else None,
        table(["rank", "#median step", "#middle half", "#works", "#waits"], rows, "ranks"),
        el("p.told", told),
    ]
