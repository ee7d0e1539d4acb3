"""Plans as text for people: what was decided, and what differs between two plans."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence

from torchloom.plan.model import Decision, GraphPlan, Plan

_FIGURES = (
    "budget_bytes",
    "peak_bytes",
    "saved_bytes",
    "extra_us",
    "overhead_us",
    "copy_us",
    "states_us",
    "bucket_bytes",
    "prefetch_bytes",
)
_OF_RUN = ("world_size", "budget_bytes", "base_bytes", "optimizer_bytes", "peak_bytes")
_MOST_NAMES = 8
_UNITS = ("B", "kB", "MB", "GB", "TB")


def show_plan(plan: Plan, max_values: int | None = 20) -> str:
    """Return a plan as tables.

    Args:
        plan: what to show.
        max_values: how many values to list for each graph, biggest first; None lists all.

    Example:
        >>> print(show_plan(Plan(world_size=2, budget_bytes=4_000_000, base_bytes=1_000_000)))
        2 ranks, budget 4.00 MB, predicted peak 1.00 MB
          live before and after (parameters, optimizer states, gradients kept): 1.00 MB
          no graph has been planned yet
    """
    budget = "none" if plan.budget_bytes is None else show_bytes(plan.budget_bytes)
    ranks = "1 rank" if plan.world_size == 1 else f"{plan.world_size} ranks"
    lines = [f"{ranks}, budget {budget}, predicted peak {show_bytes(plan.peak_bytes)}"]
    lines.append(
        "  live before and after (parameters, optimizer states, gradients kept): "
        f"{show_bytes(plan.base_bytes)}"
    )
    if plan.optimizer_bytes:
        lines.append(f"  the optimizer's step adds {show_bytes(plan.optimizer_bytes)}")
    if not plan.graphs:
        lines.append("  no graph has been planned yet")
    for graph in plan.graphs:
        lines += ["", *_graph_lines(graph, max_values)]
    return "\n".join(lines)


def diff_plans(before: Plan, after: Plan) -> str:
    """Return what differs between two plans, one line each; empty when nothing does."""
    lines = list(_figures_that_differ(before, after, _OF_RUN))
    old_graphs = {graph.graph: graph for graph in before.graphs}
    new_graphs = {graph.graph: graph for graph in after.graphs}
    lines += [f"graph {name}: only before" for name in old_graphs if name not in new_graphs]
    lines += [f"graph {name}: only after" for name in new_graphs if name not in old_graphs]
    for name, old_graph in old_graphs.items():
        if name in new_graphs:
            lines += [f"graph {name}: {line}" for line in _changes(old_graph, new_graphs[name])]
    return "\n".join(lines)


def show_bytes(num_bytes: int) -> str:
    """Return a size with three digits and a decimal unit, as budgets are written.

    Example:
        >>> show_bytes(1_234_567)
        '1.23 MB'
    """
    value = float(num_bytes)
    for unit in _UNITS:
        if abs(value) < 1000 or unit == _UNITS[-1]:
            break
        value /= 1000
    digits = 0 if unit == "B" else max(0, 3 - len(str(int(abs(value)))))
    return f"{value:.{digits}f} {unit}"


def _graph_lines(graph: GraphPlan, max_values: int | None) -> Iterator[str]:
    yield f"graph {graph.graph}"
    allowed = "all that it wants" if graph.budget_bytes is None else show_bytes(graph.budget_bytes)
    yield (
        f"  adds at most {show_bytes(graph.peak_bytes)} of {allowed}; no plan found needs less than "
        f"{show_bytes(graph.min_peak_bytes)}; {show_bytes(graph.saved_bytes)} cross to backward"
    )
    yield (
        f"  time {_ms(graph.step_us)}: compute {_ms(graph.compute_us)} (measured here: "
        f"{graph.measured_us / max(graph.compute_us, 1e-9):.0%}, else modelled), computed again "
        f"{_ms(graph.extra_us)}, transfers add {_ms(graph.overhead_us)}; at most {graph.gap:.1%} "
        "above the best within this budget"
    )
    if graph.states_us:
        yield f"  optimizer states that wait on the host add {_ms(graph.states_us)}"
    if graph.resident:
        yield (
            f"  {len(graph.resident)} weights stay gathered from step to step: "
            f"{show_bytes(graph.resident_bytes)}"
        )
    if graph.pieces:
        yield (
            f"  {len(graph.pieces)} shards of parameters stay on the device: "
            f"{show_bytes(sum(graph.pieces.values()))}"
        )
    if graph.bucket_bytes is not None:
        size = show_bytes(graph.bucket_bytes)
        yield (
            f"  transfers are merged up to {size}"
            if graph.bucket_bytes
            else "  no transfers are merged"
        )
    if graph.prefetch_bytes is not None:
        yield f"  weights are gathered {show_bytes(graph.prefetch_bytes)} ahead of their use"
    for rows in graph.loss_rows:
        yield f"  a loss computes logits of {rows} rows at a time"
    totals: defaultdict[str, list[Decision]] = defaultdict(list)
    for decision in graph.decisions:
        totals[decision.action].append(decision)
    for action, decisions in sorted(totals.items()):
        size = show_bytes(sum(each.num_bytes for each in decisions))
        yield f"  {action}: {len(decisions)} values, {size}"
    shown = graph.decisions if max_values is None else graph.decisions[:max_values]
    yield from _table(shown)
    left_out = len(graph.decisions) - len(shown)
    if left_out:
        yield f"  ... and {left_out} smaller values"


def _table(decisions: Sequence[Decision]) -> Iterator[str]:
    if not decisions:
        return
    rows = [("action", "size", "again", "value", "operator", "where")]
    rows += [
        (d.action, show_bytes(d.num_bytes), _ms(d.cost_us), d.value, d.op, d.where)
        for d in decisions
    ]
    for line in aligned(rows, (1, 2)):
        yield f"    {line}"


def aligned(rows: Sequence[Sequence[str]], right: Collection[int]) -> Iterator[str]:
    """Yield rows as lines whose columns stand below each other.

    Args:
        rows: equally many texts in each.
        right: columns that end at the same place, as numbers do; the others begin there.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(cells).rstrip()


def _changes(before: GraphPlan, after: GraphPlan) -> Iterator[str]:
    yield from _figures_that_differ(before, after, _FIGURES)
    for what, names in (
        ("gathered again for each use", before.resident.keys() - after.resident.keys()),
        ("stay gathered", after.resident.keys() - before.resident.keys()),
        ("shards wait on the host", before.pieces.keys() - after.pieces.keys()),
        ("shards stay on the device", after.pieces.keys() - before.pieces.keys()),
    ):
        if names:
            yield f"{what}: {_shortened(sorted(names))}"
    old_actions = {each.value: each for each in before.decisions}
    moved: dict[tuple[str, str], list[Decision]] = defaultdict(list)
    for each in after.decisions:
        old = old_actions.get(each.value)
        if old is not None and old.action != each.action:
            moved[old.action, each.action].append(each)
    for (old_action, new_action), decisions in sorted(moved.items()):
        size = show_bytes(sum(each.num_bytes for each in decisions))
        yield f"{old_action} -> {new_action}: {len(decisions)} values, {size}: {_shortened([d.value for d in decisions])}"


def _figures_that_differ(before: object, after: object, names: Sequence[str]) -> Iterator[str]:
    for name in names:
        old, new = getattr(before, name), getattr(after, name)
        if old != new:
            yield f"{name}: {_figure(name, old)} -> {_figure(name, new)}"


def _shortened(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def _figure(name: str, value: float | None) -> str:
    if value is None:
        return "none"
    if name.endswith("_bytes"):
        return show_bytes(int(value))
    return _ms(value) if name.endswith("_us") else str(value)


def _ms(microseconds: float) -> str:
    return f"{microseconds / 1000:.3f} ms"
