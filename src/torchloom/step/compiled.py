"""A running compiled step: one session and its schedule, which optimizer steps advance.

advance   runs after an optimizer step. It captures the model again when another entry of the schedule is due,
          or when a pass asked for resident weights in a graph that was compiled already. Weights, optimizer
          and counters stay. The code of the first plan is kept until all ranks have compiled the second
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import InitVar, dataclass
from functools import partial
from typing import Any

from torch import nn

from torchloom import events
from torchloom._torch.inductor import load_inductor, why_cache_is_open
from torchloom._torch.module_calls import call_in_place, compile_in_place, compiled_in_place
from torchloom.exchange import Agreement
from torchloom.graph import GraphPass
from torchloom.log import get_logger
from torchloom.pipeline import CompileSession
from torchloom.pipeline.schedule import ScheduleEntry
from torchloom.shard import detach_hooks
from torchloom.shard.regather import around_compiled
from torchloom.step.description import StepDescription
from torchloom.step.interfaces import SHARDS, HostMemory
from torchloom.step.planner import keep_figures, plan_again
from torchloom.step.standing import Standing

logger = get_logger(__name__)


@dataclass(kw_only=True)
class CompiledStep:
    """A model compiled in place that follows a schedule of passes; made by `build_step`."""

    model: InitVar[nn.Module]
    session: CompileSession
    description: StepDescription
    entry: ScheduleEntry
    """The entry of the schedule that runs now."""
    ranks: Agreement
    host: HostMemory
    standing: Standing
    replan_step: int
    """Optimizer step at which to plan again from measured times; 0: already done, or never."""
    _first_call: Callable[..., Any] | None = None
    """Calls the code of the first plan while the second is being tried."""

    def __post_init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)  # the engine or loop that drives the step owns it
        self._place()

    def advance(self, step: int) -> bool:
        """Switch to the entry that is due before optimizer step `step` runs. All ranks must call.

        Returns:
            Whether the model will be captured anew.

        Raises:
            AgreementError: the ranks switch to different entries.
        """
        entry = self.description.timetable.due(step)
        switches = entry.passes != self.entry.passes
        self._conclude(is_last=switches)
        if not switches:
            self._place()
        if not switches and not self.session.is_outdated and not self._plans_again(step):
            self.entry = entry
            return False
        passes = entry.passes if switches else None
        self.host.make_room()  # the new graphs may have another peak
        start_compiled(self._owner(), self.session, passes, **self.description.compile_kwargs)
        self.entry = entry
        self.host.follow([each.name for each in entry.passes])
        if switches:
            logger.info("step %d: the schedule's entry of step %d is compiled", step, entry.step)
        self.ranks.check_facts(f"the passes from step {step} on", self.session.facts)
        return True

    def _owner(self) -> nn.Module:
        model = self._model()
        assert model is not None, "its driver has let go of it"
        return model

    def _place(self) -> None:
        """Move optimizer states and shards to the host as the passes require, and no more than the budget needs."""
        self.host.follow([each.name for each in self.entry.passes])
        plans = self.session.plans
        peaks = [p.batch_bytes + p.peak_bytes + p.beside_bytes for p in plans]
        if SHARDS in self.host.names and plans:
            self.host.keep_shards({name for plan in plans for name in plan.pieces})
        if self.standing.budget_bytes is not None and plans:
            spare = self.standing.budget_bytes - self.standing.base_bytes
            self.host.fit(spare - max(peaks), spare - self.standing.step_bytes)

    def _plans_again(self, step: int) -> bool:
        planner, ranks, device = self.session.planner, self.ranks, self.description.device
        if planner is None or not 0 < self.replan_step <= step:
            return False
        self.replan_step = 0
        started = time.perf_counter()
        first = planner.costs
        changes = plan_again(planner, ranks, device)
        duration_s = time.perf_counter() - started
        events.emit(events.PlanReviewed(step=step, duration_s=duration_s, changes=changes))
        if changes:
            logger.info("step %d: measured times change the plan, which is compiled", step)
            self._first_call = compiled_in_place(self._owner())
            self.session.start_replan(
                ranks.texts, first, lambda: keep_figures(planner, ranks, device)
            )
        return changes

    def _conclude(self, *, is_last: bool) -> None:
        """Drop the first plan once all ranks have compiled the second; return to it if one could not."""
        became = self.session.conclude_replan()
        if became == "kept":
            self._first_call = None
        elif became == "refused" or (became == "open" and is_last):
            call_in_place(self._owner(), self._first_call)
            self._first_call = None
            self.session.give_up_replan()


def start_compiled(
    model: nn.Module,
    session: CompileSession,
    passes: tuple[GraphPass, ...] | None = None,
    **kwargs: Any,
) -> None:
    """Let calls of a sharded model go through a session from now on.

    Args:
        model: sharded.
        session: what compiles its graphs.
        passes: the passes to run from now on; None: the session's passes.
        kwargs: more arguments of `torch.compile`.
    """
    if session.backend == "inductor":
        load_inductor()
        if (reason := why_cache_is_open()) and session.announce:
            logger.warning("%s", reason)
    around = partial(around_compiled, regather=session.regather, before=session.before_forward)
    session.begin(passes)
    # Dynamo keys its entries by backend: under the new one that this makes it captures the module again.
    compile_in_place(model, session, around=around, **kwargs)
    detach_hooks(model)  # last, so that a failure above leaves the model unchanged
