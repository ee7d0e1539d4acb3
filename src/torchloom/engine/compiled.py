"""The compiled side of an engine: one session, its schedule, and the clock that moves it.

start     the entry that is due is compiled
advance   after an optimizer step: when another entry is due, or a pass asked for residents in a
          graph that was compiled before, the model is captured anew with its weights, optimizer
          and counters as they are
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from torchloom.config import Config
from torchloom.engine.agreement import Agreement
from torchloom.engine.groups import World
from torchloom.engine.offloads import PIECES, STATES, Offloads
from torchloom.engine.pieces import piece_bytes
from torchloom.engine.planning import (
    base_bytes,
    costs_of,
    host_states,
    load_pinned,
    make_planner,
    optimizer_bytes,
    plan_again,
    trained_bytes,
)
from torchloom.engine.symmetric import share_weights
from torchloom.engine.weave import build_session, extra_passes, start_compiled
from torchloom.errors import ConfigError, EngineError
from torchloom.log import get_logger
from torchloom.pipeline import CompileSession, PassItem, PassRegistry, Resolver, Schedule
from torchloom.pipeline.device import device_bytes
from torchloom.pipeline.schedule import Entry, Timetable
from torchloom.plan import Plan
from torchloom.plan.costs import NETWORKS, Network
from torchloom.shard import layout_of, owners_of

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
    budget_bytes: int | None = None
    base_bytes: int = 0
    replan_step: int = 0
    """When the plan is made again by measured times; 0: not any more, or never."""
    gradient_bytes: int = 0
    """Gradients that are live in the optimizer step and not part of the base."""
    step_bytes: int = 0
    """What the optimizer's step allocates for itself."""

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
        self.agreement.check(f"the passes from step {step} on", self.session.key)
        return True

    def _place(self) -> None:
        """Let live on the host what the running passes say, as far as the budget asks for it."""
        self.offloads.follow([each.name for each in self.entry.passes])
        plans = self.session.plans
        peaks = [p.batch_bytes + p.peak_bytes + p.beside_bytes for p in plans]
        if PIECES in self.offloads.names and plans:
            self.offloads.keep_pieces({name for plan in plans for name in plan.pieces})
        if self.budget_bytes is not None and plans:
            spare = self.budget_bytes - self.base_bytes
            self.offloads.fit(spare - max(peaks), spare - self.gradient_bytes)

    def _plans_again(self, step: int) -> bool:
        planner = self.session.planner
        if planner is None or not 0 < self.replan_step <= step:
            return False
        self.replan_step = 0
        changes = plan_again(planner, self.agreement, self.device)
        if changes:
            logger.info("step %d: measured times change the plan, which is compiled", step)
        return changes


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
        budget_bytes=compiled.budget_bytes,
        base_bytes=compiled.base_bytes,
        optimizer_bytes=compiled.gradient_bytes + compiled.step_bytes,
        graphs=compiled.session.plans,
    )


class Compilable(Protocol):
    """What compiling needs of an engine."""

    module: nn.Module
    config: Config
    world: World
    optimizer: Optimizer | None
    offloads: Offloads
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
    layout, options = layout_of(model), config.compile
    if passes is not None and schedule is not None:
        raise ConfigError("engine.compile() got both passes= and schedule=: give one of them")
    if passes is None and schedule is None:
        passes, schedule = options.passes, options.schedule
    total_bytes = agreement.least("the device's memory", device_bytes(world.device))
    budget = options.memory_budget
    resolver = Resolver(
        layout.stage, registry, options.disable_passes, total_bytes, extra_passes(config)
    )
    if schedule is None:
        timetable = Timetable((Entry(0, resolver.passes(passes)),))
    else:
        timetable = resolver.timetable(schedule)
    entry = timetable.due(engine.global_steps)
    budget_bytes = None if budget is None else budget.resolve(total_bytes)
    session, kwargs = build_session(
        config,
        layout,
        passes=entry.passes,
        backend=backend,
        compile_kwargs=compile_kwargs,
        budget_bytes=budget_bytes,
    )
    book = session.book
    book.layout, book.parameters, book.optimizer = layout, owners_of(model), engine.optimizer
    book.residency = world.comm.residents
    book.table = costs_of(world.device, _network(world))
    keeps = config.batch.accumulation_steps > 1
    shared = share_weights(model, world.comm, timetable.all_passes)
    if shared is not None:
        session.context = replace(session.context, shared_weights=shared.facts)
        session.keeps = shared.store
    engine.offloads.follow([each.name for each in entry.passes])
    always = frozenset.intersection(
        *(frozenset(each.name for each in e.passes) for e in timetable.entries)
    )
    streams = STATES in always
    base = agreement.most(
        "bytes that live on",
        base_bytes(model, engine.optimizer, keeps_gradients=keeps, keeps_states=not streams),
    )
    pinned = load_pinned(options.plan, world.comm.world_size)
    gradients = 0 if keeps else trained_bytes(model)
    own = 0
    if budget_bytes is not None and not streams:
        own = agreement.most("bytes of the optimizer's step", optimizer_bytes(engine.optimizer))
    states = None
    if budget_bytes is not None and engine.optimizer is not None and always & {STATES, PIECES}:
        states = host_states(
            engine.optimizer,
            agreement,
            step_bytes=budget_bytes - base - gradients,
            num_slots=2 if config.offload.double_buffer else 1,
            with_states=streams,
            piece_bytes=piece_bytes(layout) if PIECES in always else 0,
        )
    session.planner = make_planner(
        budget_bytes,
        base,
        book.table,
        pinned,
        is_estimate=session.backend == "inductor",
        step_bytes=gradients + own,
        micro_steps=config.batch.accumulation_steps,
        states=states,
    )
    world.comm.residents.bucket_bytes = config.zero.gather_bucket_bytes
    agreement.check("what engine.compile() weaves", session.key)
    session.agree = agreement.check
    start_compiled(model, session, **kwargs)
    return Compiled(
        model=model,
        session=session,
        timetable=timetable,
        entry=entry,
        kwargs=kwargs,
        agreement=agreement,
        device=world.device,
        budget_bytes=budget_bytes,
        base_bytes=base,
        gradient_bytes=gradients,
        step_bytes=own,
        offloads=engine.offloads,
        replan_step=0 if pinned is not None or budget_bytes is None else options.replan_step,
    )


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
    return NETWORKS["nvlink" if world.device.type == "cuda" else "gloo"]
