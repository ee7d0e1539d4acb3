"""One captured graph, compiled until its code keeps the memory budget.

A plan counts on the graphs; the code that a compiler makes of them may need more or less. What was learned
of it goes into the next plan, for a few rounds, and the fastest code that fits is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from torchloom._torch.aot import copy_graph_module
from torchloom.errors import PlanError, RegionError
from torchloom.pipeline.report import GraphReport
from torchloom.pipeline.setup import CompileSetup
from torchloom.pipeline.sidecar import calling_text
from torchloom.pipeline.weaving import Weaving
from torchloom.plan import GraphPlan

_MAX_ROUNDS = 4
_MAX_ROUNDS_OF_BODIES = 2
"""Of graphs that call bodies, which start soon: where their code does not fit, the whole graph's may."""


@dataclass
class _Form:
    """Whether the next round compiles equal parts as one body or the whole graph."""

    flat_because: tuple[str, ...] = ()
    _num_of_bodies: int = 0
    """Rounds that compiled bodies."""

    def has_another(self, report: GraphReport, wants_another: bool, *, fits: bool) -> bool:
        """Choose the form of the next round; False: there is none.

        Args:
            report: of the round that ended.
            wants_another: whether planning again may give better code of the same form.
            fits: whether code of any round keeps the budget.
        """
        if not report.regions:
            self.flat_because = report.flat_because
            return wants_another
        self._num_of_bodies += 1
        if wants_another and self._num_of_bodies < _MAX_ROUNDS_OF_BODIES:
            return True
        self.flat_because = ("code of equal parts does not keep the memory budget",)
        return not fits


def compile_within_budget(
    setup: CompileSetup,
    gm: fx.GraphModule,
    unwoven: fx.GraphModule,
    example_inputs: Sequence[Any],
    report: GraphReport,
    *,
    backward_at_once: bool,
) -> Callable[..., Any]:
    """Compile; compile again while the code needs more memory than the plan predicted.

    Args:
        setup: the session.
        gm: the captured graph; compilers may rewrite it.
        unwoven: a copy that nobody rewrites.
        example_inputs: its inputs.
        report: receives what was woven in the round whose code is kept.
        backward_at_once: whether backward is compiled with forward in any case.

    Returns:
        The fastest code that fits, or the only one where nothing is planned.

    Raises:
        PlanError: no code fits; the text says by how much to raise the budget.
    """
    best: tuple[GraphPlan, Callable[..., Any], Weaving] | None = None
    least_bytes, refusal, planner = 0, "", setup.planner
    before: list[tuple[str, float]] = []
    calling = calling_text(example_inputs)
    ignores_caches, form = False, _Form()
    for _ in range(_MAX_ROUNDS):
        report.num_tries += planner is not None
        own = replace(report, compile_s=[], passes=[], collectives={}, planning_s=0.0)
        weaving = Weaving(
            setup,
            own,
            calling,
            ignores_caches=ignores_caches,
            flat_because=form.flat_because,
            must_outline=best is not None and bool(best[2].report.regions),
            backward_at_once=backward_at_once,
        )
        try:
            compiled = weaving.compile(gm, example_inputs)
        except RegionError:
            if best is None:
                raise
            break  # what was to be gained is not worth a compile of the whole graph
        weaving.finish()
        report.planning_s += own.planning_s
        if weaving.lacks_plan:  # unknown whether the cached code keeps the budget
            ignores_caches, gm = True, copy_graph_module(unwoven)
            continue
        plan = own.plan
        if plan is None or planner is None:
            weaving.report_to(report)
            return compiled
        needed_bytes = plan.peak_bytes + plan.beside_bytes
        least_bytes = min(least_bytes or needed_bytes, needed_bytes)
        if plan.budget_bytes is not None:
            refusal = planner.refusal(plan.budget_bytes + plan.beside_bytes, least_bytes)
        if plan.fits and (best is None or plan.step_us < best[0].step_us):
            best = plan, compiled, weaving
        if not form.has_another(own, weaving.wants_another, fits=best is not None):
            break
        if own.regions and form.flat_because:
            planner.drop(plan)  # the whole graph is another one
        before += own.compile_s
        gm = copy_graph_module(unwoven)
    if best is None or planner is None:
        raise PlanError(refusal)
    plan, compiled, weaving = best
    planner.settle(plan)
    weaving.report.compile_s[:0] = before
    weaving.report_to(report)
    return compiled
