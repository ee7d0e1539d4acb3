"""The compiled side of an engine: one session, its schedule, and the clock that moves it.

start     the entry that is due is compiled
advance   after an optimizer step: when another entry is due, or a pass asked for residents in a
          graph that was compiled before, the model is captured anew with its weights, optimizer
          and counters as they are. The code of the first plan is kept until a second one has been
          compiled on all ranks
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from torchloom import _torch, events
from torchloom.config import Config
from torchloom.costs import NETWORKS, Network
from torchloom.engine.agreement import Agreement
from torchloom.engine.groups import World
from torchloom.engine.local import LocalParams
from torchloom.engine.offloads import PIECES, STATES, Offloads
from torchloom.engine.pieces import piece_bytes
from torchloom.engine.planning import (
    costs_of,
    keep_figures,
    load_pinned,
    make_planner,
    plan_again,
)
from torchloom.engine.standing import MayWait, Standing, standing_of
from torchloom.engine.standing_parts import found_standing
from torchloom.engine.symmetric import share_weights
from torchloom.engine.weave import build_session, extra_passes, start_compiled
from torchloom.errors import ConfigError, EngineError
from torchloom.log import get_logger
from torchloom.pipeline import CompileSession, PassItem, PassRegistry, Resolver, Schedule
from torchloom.pipeline.alike import Alike
from torchloom.pipeline.device import device_bytes
from torchloom.pipeline.schedule import Entry, Timetable
from torchloom.plan import Plan
from torchloom.runtime.lines import tell_graph
from torchloom.shard import Layout, layout_of, owners_of

logger = get_logger(__name__)


@dataclass(kw_only=True)
class Compiled:
    """A model that is compiled in place, by a schedule."""

    model: nn.Module
    session: CompileSession
    timetable: Timetable
    entry: Entry
    kwargs: dict[str, Any]
    agreement: Agreement
    device: torch.device
    offloads: Offloads
    standing: Standing
    replan_step: int = 0
    """When the plan is made again by measured times; 0: not any more, or never."""
    _first_call: Callable[..., Any] | None = None
    """What calls the code of the first plan while a second one is on trial."""

    def __post_init__(self) -> None:
        self._place()

    def advance(self, step: int) -> bool:
        """Switch to the entry that is due before optimizer step `step` runs.

        Returns:
            Whether the model will be captured anew.

        Raises:
            AgreementError: the ranks do not switch alike.
        """
        entry = self.timetable.due(step)
        switches = entry.passes != self.entry.passes
        self._conclude(is_last=switches)
        if not switches:
            self._place()
        if not switches and not self.session.is_outdated and not self._plans_again(step):
            self.entry = entry
            return False
        passes = entry.passes if switches else None
        self.offloads.make_room()  # what is compiled now may have another peak
        start_compiled(self.model, self.session, passes, **self.kwargs)
        self.entry = entry
        self.offloads.follow([each.name for each in entry.passes])
        if switches:
            logger.info("step %d: the schedule's entry of step %d is compiled", step, entry.step)
        self.agreement.check_facts(f"the passes from step {step} on", self.session.facts)
        return True

    def _place(self) -> None:
        """Let live on the host what the running passes say, as far as the budget asks for it."""
        self.offloads.follow([each.name for each in self.entry.passes])
        plans = self.session.plans
        peaks = [p.batch_bytes + p.peak_bytes + p.beside_bytes for p in plans]
        if PIECES in self.offloads.names and plans:
            self.offloads.keep_pieces({name for plan in plans for name in plan.pieces})
        if self.standing.budget_bytes is not None and plans:
            spare = self.standing.budget_bytes - self.standing.base_bytes
            self.offloads.fit(spare - max(peaks), spare - self.standing.gradient_bytes)

    def _plans_again(self, step: int) -> bool:
        planner = self.session.planner
        if planner is None or not 0 < self.replan_step <= step:
            return False
        self.replan_step = 0
        started = time.perf_counter()
        first = planner.costs
        changes = plan_again(planner, self.agreement, self.device)
        duration_s = time.perf_counter() - started
        events.emit(events.PlanReviewed(step=step, duration_s=duration_s, changes=changes))
        if changes:
            logger.info("step %d: measured times change the plan, which is compiled", step)
            self._first_call = _torch.compiled_in_place(self.model)
            self.session.start_second(
                self.agreement.texts,
                first,
                lambda: keep_figures(planner, self.agreement, self.device),
            )
        return changes

    def _conclude(self, *, is_last: bool) -> None:
        """Let go of the first plan, or return to it, once it is known what becomes of the second."""
        trial = self.session.trial
        if trial is None:
            return
        became = trial.conclude()
        if became == "kept":
            self.session.trial = self._first_call = None
        elif became == "refused" or is_last:
            _torch.call_in_place(self.model, self._first_call)
            self._first_call = None
            self.session.return_to_first()


def advance(compiled: Compiled | None, step: int) -> None:
    """Let a schedule, if there is one, know which optimizer step comes next."""
    if compiled is not None:
        compiled.advance(step)


def plan_of(compiled: Compiled | None, world: World) -> Plan:
    """Return the plan of what has been compiled so far, an empty one before."""
    size = world.comm.world_size
    if compiled is None:
        return Plan(world_size=size, budget_bytes=None, base_bytes=0)
    return Plan(
        world_size=size,
        budget_bytes=compiled.standing.budget_bytes,
        base_bytes=compiled.standing.base_bytes,
        optimizer_bytes=compiled.standing.step_bytes,
        graphs=compiled.session.plans,
    )


class Compilable(Protocol):
    """What compiling needs of an engine."""

    module: nn.Module
    config: Config
    world: World
    optimizer: Optimizer | None
    offloads: Offloads
    local: LocalParams
    global_steps: int


def start(
    engine: Compilable,
    agreement: Agreement,
    registry: PassRegistry,
    backend: str | Callable[..., Any] | None = None,
    compile_kwargs: Mapping[str, Any] | None = None,
    passes: Sequence[PassItem] | None = None,
    schedule: Schedule | None = None,
    compiled_autograd_enabled: bool = False,
) -> Compiled:
    """Compile an engine's model in place; see `Engine.compile`."""
    if compiled_autograd_enabled:
        logger.warning("compiled_autograd_enabled has no effect: backward graphs are compiled")
    model, config, world = engine.module, engine.config, engine.world
    total_bytes = agreement.least("the device's memory", device_bytes(world.device))
    budget = config.compile.memory_budget
    budget_bytes = None if budget is None else budget.resolve(total_bytes)
    timetable = _timetable(config, layout_of(model), registry, total_bytes, passes, schedule)
    entry = timetable.due(engine.global_steps)
    session, kwargs = build_session(
        config,
        model,
        passes=entry.passes,
        backend=backend,
        compile_kwargs=compile_kwargs,
        budget_bytes=budget_bytes,
    )
    copy_bytes = _acquaint(session, engine, timetable)
    engine.offloads.follow([each.name for each in entry.passes])
    always = timetable.names_throughout
    accumulates = config.batch.accumulation_steps > 1
    with engine.local.as_pieces():  # states are as large as what the optimizer steps
        standing = standing_of(
            model,
            engine.optimizer,
            agreement,
            budget_bytes=budget_bytes,
            accumulates=accumulates,
            may_wait=MayWait(
                states=STATES in always,
                piece_bytes=piece_bytes(layout_of(model)) if PIECES in always else None,
                num_slots=2 if config.offload.double_buffer else 1,
            ),
            copy_bytes=copy_bytes,
        )
        session.standing = found_standing(
            standing, model, engine.optimizer, accumulates=accumulates, waits=STATES in always
        )
    pinned = load_pinned(config.compile.plan, world.comm.world_size)
    session.planner = make_planner(
        standing,
        session.book.table,
        pinned,
        is_estimate=session.backend == "inductor",
        micro_steps=config.batch.accumulation_steps,
    )
    world.comm.residents.bucket_bytes = config.zero.gather_bucket_bytes
    agreement.check_facts("what engine.compile() weaves", session.facts)
    session.tell = tell_graph
    session.alike = Alike(agreement.rank, agreement.texts)
    start_compiled(model, session, **kwargs)
    return Compiled(
        model=model,
        session=session,
        timetable=timetable,
        entry=entry,
        kwargs=kwargs,
        agreement=agreement,
        device=world.device,
        standing=standing,
        offloads=engine.offloads,
        replan_step=0 if pinned is not None or budget is None else config.compile.replan_step,
    )


def _timetable(
    config: Config,
    layout: Layout,
    registry: PassRegistry,
    total_bytes: int,
    passes: Sequence[PassItem] | None,
    schedule: Schedule | None,
) -> Timetable:
    """Return which passes run from which step on: as the call says, else as the config does."""
    options = config.compile
    if passes is not None and schedule is not None:
        raise ConfigError("engine.compile() got both passes= and schedule=: give one of them")
    if passes is None and schedule is None:
        passes, schedule = options.passes, options.schedule
    resolver = Resolver(
        layout.stage, registry, options.disable_passes, total_bytes, extra_passes(config)
    )
    if schedule is not None:
        return resolver.timetable(schedule)
    return Timetable((Entry(0, resolver.passes(passes)),))


def _acquaint(session: CompileSession, engine: Compilable, timetable: Timetable) -> int:
    """Tell a session what its passes may know of the engine. All ranks must call.

    Returns:
        Bytes of this rank's weights that now exist a second time.
    """
    model, world, book = engine.module, engine.world, session.book
    book.layout, book.parameters = layout_of(model), owners_of(model)
    book.optimizer, book.residency = engine.optimizer, world.comm.residents
    book.table = costs_of(world.device, _network(world))
    shared = share_weights(model, world.comm, timetable.all_passes)
    if shared is None:
        return 0
    session.context = replace(session.context, shared_weights=shared.facts)
    session.keeps = shared.store
    return shared.copy_bytes


def refuse_second(asks: bool, is_configured: bool) -> None:
    """Let a second `compile()` pass that asks for nothing more than the config did.

    Raises:
        EngineError: it is compiled already.
    """
    if is_configured and not asks:
        return  # initialize() has done it, as the config asked
    raise EngineError(
        "this engine is compiled already: call engine.compile() once, with all options"
        + (", or drop compile.enabled" if is_configured else "")
    )


def _network(world: World) -> Network:
    if world.comm.shares_memory:
        return NETWORKS["shared-memory"]
    return NETWORKS["nvlink" if world.device.type == "cuda" else "gloo"]
