"""Load a checkpoint on all ranks, or leave all of them as they are: all is read and checked first, and then written.

Each rank reads what it needs into host memory. When all ranks have, states that belong to others'
code (schedule, data loader) are set, each with a way back. Then tensors are copied, which cannot fail.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchloom.checkpoints import rng
from torchloom.checkpoints.choose import choose
from torchloom.checkpoints.contents import Contents, read_contents
from torchloom.checkpoints.plain_values import kind_of
from torchloom.checkpoints.restore_model import (
    check_same_model,
    load_by_function,
    read_buffers,
    read_weights,
    whole_weights,
)
from torchloom.checkpoints.restore_training import (
    Groups,
    is_gradient,
    read_gradients,
    read_groups,
    read_states,
)
from torchloom.checkpoints.together import SaveExchange, answers, attempt
from torchloom.checkpoints.trained import (
    Counters,
    Trained,
    has_position,
    modules_with_extra_state,
)
from torchloom.errors import CheckpointError
from torchloom.log import get_logger
from torchloom.shard import layout_of

logger = get_logger(__name__)


@dataclass(frozen=True)
class LoadOptions:
    """What to take from a checkpoint."""

    strict: bool = True
    optimizer_states: bool = True
    scheduler_states: bool = True
    module_only: bool = False
    custom_load_fn: Callable[..., object] | None = None


@dataclass
class Prepared:
    """All that will be written, in this rank's host memory."""

    writes: list[Callable[[], object]] = field(default_factory=list)
    """Cannot fail."""
    setters: list[tuple[Callable[[], object], Callable[[], object]]] = field(default_factory=list)
    """What others' code does, and what undoes it."""
    counters: Counters | None = None
    client_state: Any = None
    notes: list[str] = field(default_factory=list)


def prepare(engine: Trained, contents: Contents, options: LoadOptions) -> Prepared:
    """Read and check all that will be written.

    Args:
        engine: is not changed here.
        contents: the checkpoint.
        options: what to take from it.

    Raises:
        CheckpointError: the checkpoint does not fit, or cannot be read.
    """
    check_same_model(layout_of(engine.module), contents, options.strict)
    ready = Prepared(client_state=contents.value("client_state"))
    if options.custom_load_fn is None:
        ready.writes += read_weights(engine, contents)
    ready.writes += read_buffers(engine.module, contents, options.strict)
    for path, module in modules_with_extra_state(engine.module).items():
        if f"extra/{path}" in contents:
            state = contents.value(f"extra/{path}")
            before = copy.deepcopy(module.get_extra_state())
            ready.setters.append(_there_and_back(module.set_extra_state, state, before))
    lost = contents.own if contents.world_size != engine.world.world_size else frozenset()
    if options.module_only:
        lost = frozenset(name for name in lost if name.startswith(("buffer/", "extra/")))
    else:
        _prepare_run(engine, contents, options, ready)
    if lost:
        ready.notes.append(
            f"the checkpoint was written by {contents.world_size} ranks, {engine.world.world_size} "
            f"load it: of what differed between ranks ({', '.join(sorted(lost)[:5])}), all take what "
            "rank 0 had"
        )
    return ready


def _prepare_run(
    engine: Trained, contents: Contents, options: LoadOptions, ready: Prepared
) -> None:
    """Prepare what is not of the model."""
    ready.counters = _counters(engine, contents)
    scaler_state = contents.value("scaler")
    _check_scaler(engine, scaler_state, contents)
    saved_scale, scaler = float(scaler_state["scale"]), engine.scaler
    is_static = scaler.config is None or bool(scaler.config.static_scale)
    if is_static or not contents.facts["scales_loss"]:
        # The scale is a setting, or the run that saved had none.
        scaler_state = {**scaler_state, "scale": scaler.scale}
    factor = float(scaler_state["scale"]) / saved_scale  # of gradients that wait
    ready.writes.append(lambda: engine.scaler.load_state_dict(scaler_state))
    ready.writes += read_gradients(engine, contents, factor)
    if options.optimizer_states and engine.optimizer is not None and "groups" in contents:
        _check_kind(contents, "optimizer", engine.optimizer)
        groups = read_groups(engine, contents, strict=options.strict)
        states = read_states(engine, contents)
        ready.writes += [lambda: _put_groups(groups), states]
    scheduler = engine.lr_scheduler
    if options.scheduler_states and scheduler is not None and "scheduler" in contents:
        _check_kind(contents, "scheduler", scheduler)
        state = contents.value("scheduler")
        before = copy.deepcopy(scheduler.state_dict())
        ready.setters.append(_there_and_back(scheduler.load_state_dict, state, before))
    _prepare_loader(engine, contents, ready)
    if contents.world_size != engine.world.world_size:
        ranks = f"written by {contents.world_size} ranks, {engine.world.world_size} load it"
        origin = ranks if contents.world_size else "imported"
        ready.notes.append(f"the checkpoint was {origin}: random number generators start anew")
    else:
        ready.writes.append(rng.read(contents.path / rng.file_name(engine.world.rank)))


def _check_kind(contents: Contents, what: str, present: object) -> None:
    """Refuse states of another algorithm, which would be taken for this one's."""
    saved = contents.facts[what]  # None: an import could not tell
    if saved is not None and saved != kind_of(present):
        flag = "load_optimizer_states" if what == "optimizer" else "load_lr_scheduler_states"
        raise CheckpointError(
            f"the checkpoint holds the states of {saved}, this run's {what} is {kind_of(present)}: "
            f"use {saved}, or load with {flag}=False"
        )


def apply(ready: Prepared) -> None:
    """Write all that was prepared."""
    with torch.no_grad():
        for write in ready.writes:
            write()


def call_setters(ready: Prepared) -> None:
    """Hand states to others' code; what it raises undoes all of it.

    Raises:
        CheckpointError: a state was not taken.
    """
    number = 0
    try:
        for there, _ in ready.setters:
            number += 1
            there()
    except Exception as error:  # others' code may raise anything
        undo_setters(ready, number)
        raise CheckpointError(
            f"a state that was saved is not taken back: {type(error).__name__}: {error}"
        ) from error


def undo_setters(ready: Prepared, number: int | None = None) -> None:
    """Take the states back that others' code had before."""
    for _, back in ready.setters[:number]:
        _undo(back)


def _undo(back: Callable[[], object]) -> None:
    try:
        back()
    except Exception as error:  # noqa: BLE001  others' code; the first failure is what is told
        logger.warning("a state from before the load cannot be set again: %s", error)


def _there_and_back(
    take: Callable[[Any], object], state: Any, before: Any
) -> tuple[Callable[[], object], Callable[[], object]]:
    return (lambda: take(state)), (lambda: take(before))


def _counters(engine: Trained, contents: Contents) -> Counters:
    try:
        counters = Counters(**contents.value("counters"))
    except TypeError as error:
        raise CheckpointError(f"{contents.path}: counters cannot be read: {error}") from error
    steps = engine.gradient_accumulation_steps()
    saved = int(contents.facts["accumulation_steps"])
    if saved == steps:
        return counters
    if counters.num_backwards or any(is_gradient(key) for key in contents.payload.index):
        raise CheckpointError(
            f"checkpoint {str(contents.path)!r} was saved in the middle of an accumulation of {saved} "
            f"micro-steps, this run accumulates {steps}: set gradient_accumulation_steps={saved} until "
            "the next optimizer step"
        )
    counters.micro_steps = counters.global_steps * steps
    return counters


def _check_scaler(engine: Trained, state: Any, contents: Contents) -> None:
    try:
        copy.copy(engine.scaler).load_state_dict(state)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{contents.path}: the loss scale cannot be read: {error}") from error
    if not float(state["scale"]) > 0:
        raise CheckpointError(f"{contents.path}: the loss scale is {state['scale']}")


def _put_groups(groups: Groups) -> None:
    for group, values in groups:
        for key, value in values.items():
            if isinstance(group.get(key), Tensor):
                group[key].copy_(value)
            else:
                group[key] = value


def _prepare_loader(engine: Trained, contents: Contents, ready: Prepared) -> None:
    loader = engine.training_dataloader
    if "loader" not in contents or not has_position(loader):
        return
    saved = contents.value("loader")
    if saved["of"] != type(loader).__name__:
        ready.notes.append(
            f"the checkpoint holds the position of a {saved['of']}, this run reads from a "
            f"{type(loader).__name__}: its data begins anew"
        )
        return
    # torchloom's own loader says for how many ranks a position is, and divides it anew.
    if contents.world_size != engine.world.world_size and "ranks" not in saved["state"]:
        ready.notes.append(
            f"the position of a {saved['of']} on {contents.world_size} ranks means nothing to "
            f"{engine.world.world_size}: its data begins anew"
        )
        return
    before = copy.deepcopy(loader.state_dict())
    ready.setters.append(_there_and_back(loader.load_state_dict, saved["state"], before))


@dataclass(frozen=True)
class Loaded:
    """What a load came to."""

    path: str
    client_state: dict[str, Any]
    counters: Counters | None
    """None where only the model was loaded."""


def load(
    engine: Trained, root: Path, tag: str | None, options: LoadOptions, ranks: SaveExchange
) -> Loaded:
    """Verify, read on all ranks, then write into the engine; see `Engine.load_checkpoint`.

    Args:
        engine: receives the weights and states.
        root: folder of all checkpoints.
        tag: which one; None takes the newest that verifies.
        options: what to take from it.
        ranks: the exchange of this load between all ranks.

    Raises:
        CheckpointError: there is none, or one rank cannot load it; the engine is as it was.
        PeerLostError: a rank has ended.
    """
    path = choose(root, tag, ranks)
    failure = f"checkpoint {path.name!r} in {str(root)!r} cannot be loaded"
    ready: list[Prepared] = []
    source: dict[str, Tensor] = {}
    function = options.custom_load_fn

    def read() -> None:
        contents = read_contents(path, ranks.rank, ranks.world_size)
        ready.append(prepare(engine, contents, options))
        if function is not None:
            source.update(whole_weights(engine, contents))

    def run_function() -> None:
        assert function is not None
        ready[0].writes += load_by_function(engine, source, function)

    ranks.together(failure, read)
    if function is not None:
        # Weights are gathered for it: no rank may be missing, so nothing is read here.
        ranks.together(failure, run_function)
    prepared = ready[0]
    mine = attempt(lambda: call_setters(prepared))
    texts = ranks.texts("what others' code took", mine)
    try:
        answers(failure, texts)
    except CheckpointError:
        if "ok" in json.loads(mine):
            undo_setters(prepared)
        raise
    apply(prepared)
    if ranks.rank == 0:
        for note in prepared.notes:
            logger.warning("%s", note)
    return Loaded(str(path), prepared.client_state, prepared.counters)
