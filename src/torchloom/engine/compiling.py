"""`Engine.compile`: describe and build an engine's compiled step, and advance it after optimizer steps."""

from __future__ import annotations

from typing import Protocol

from torch import nn
from torch.optim import Optimizer

from torchloom.config import Config
from torchloom.errors import EngineError
from torchloom.exchange import Agreement
from torchloom.launch.groups import World
from torchloom.loop.offloads import Offloads
from torchloom.loop.owned_params import LocalParams
from torchloom.pipeline.device import device_bytes
from torchloom.plan import Plan
from torchloom.step import CompileCall, CompiledStep, Driver, build_step, describe_step


class Compilable(Protocol):
    """What compiling needs of an engine."""

    module: nn.Module
    config: Config
    world: World
    optimizer: Optimizer | None
    offloads: Offloads
    local: LocalParams
    global_steps: int


def compile_engine(engine: Compilable, agreement: Agreement, call: CompileCall) -> CompiledStep:
    """Compile an engine's model in place; see `Engine.compile`.

    Args:
        engine: all ranks call with theirs.
        agreement: between them.
        call: the arguments of the user's call.
    """
    model, world = engine.module, engine.world
    description = describe_step(
        engine.config,
        call,
        model,
        world.comm,
        world.device,
        total_bytes=agreement.least("the device's memory", device_bytes(world.device)),
    )
    driver = Driver(
        ranks=agreement,
        host=engine.offloads,
        optimizer=engine.optimizer,
        step=engine.global_steps,
        as_shards=engine.local.as_shards,
        name=call.name,
    )
    return build_step(description, model, world.comm, driver)


def advance(compiled: CompiledStep | None, step: int) -> None:
    """Tell a compiled step, if there is one, which optimizer step comes next."""
    if compiled is not None:
        compiled.advance(step)


def plan_of(compiled: CompiledStep | None, world: World) -> Plan:
    """Return the plan of what has been compiled so far, an empty one before."""
    if compiled is None:
        return Plan(world_size=world.comm.world_size, budget_bytes=None, base_bytes=0)
    return compiled.session.plan()


def refuse_second(asks: bool, is_configured: bool) -> None:
    """Refuse a second `compile()`, unless the config compiled first and the call has no arguments.

    Args:
        asks: whether the call has arguments.
        is_configured: whether the config made `initialize` compile.

    Raises:
        EngineError: it is compiled already.
    """
    if is_configured and not asks:
        return  # initialize() has done it, as the config asked
    raise EngineError(
        "this engine is compiled already: call engine.compile() once, with all options"
        + (", or drop compile.enabled" if is_configured else "")
    )
