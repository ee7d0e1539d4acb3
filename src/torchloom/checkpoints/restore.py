"""Loads a checkpoint on all ranks, or leaves all of them as they are: all is read and checked first, and then written.

Each rank reads what it needs into host memory. When all ranks have, states that belong to others'
code (schedule, data loader) are set, each with a way back. Then tensors are copied, which cannot fail.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchloom.checkpoints.choose import choose
from torchloom.checkpoints.contents import Contents, read_contents
from torchloom.checkpoints.engine_values import (
    BESIDE,
    Counters,
    Trained,
    beside_states,
    generator_states,
    has_position,
    is_same,
    kind_of,
    members_of,
    modules_with_extra_state,
    set_generators,
    take_beside_states,
)
from torchloom.checkpoints.manifest import reading
from torchloom.checkpoints.rank_task import RankTask, answers, attempt
from torchloom.checkpoints.restore_tensors import (
    Write,
    check_same_model,
    is_gradient,
    load_by_function,
    read_buffers,
    read_gradients,
    read_groups,
    read_states,
    read_weights,
    whole_weights,
)
from torchloom.checkpoints.values import bytes_in, value_of
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


@dataclass(frozen=True)
class Loaded:
    """What a load came to."""

    path: str
    client_state: dict[str, Any]
    counters: Counters | None
    """None where only the model was loaded."""


@dataclass
class _Prepared:
    """All that will be written, in this rank's host memory."""

    client_state: Any
    writes: list[Write] = field(default_factory=list)
    """Cannot fail."""
    setters: list[tuple[Callable[[Any], object], Any, Any]] = field(default_factory=list)
    """Functions of others' code, each with the state that it is to take and the one from before."""
    counters: Counters | None = None
    notes: list[str] = field(default_factory=list)


def load(
    engine: Trained, root: Path, tag: str | None, options: LoadOptions, ranks: RankTask
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
    found: list[_Prepared] = []
    source: dict[str, Tensor] = {}
    function = options.custom_load_fn

    def read() -> None:
        contents = read_contents(path, ranks.rank, ranks.world_size)
        found.append(_prepared(engine, contents, options))
        if function is not None:
            source.update(whole_weights(engine, contents))

    def run_function() -> None:
        assert function is not None
        found[0].writes += load_by_function(engine, source, function)

    ranks.together(failure, read)
    if function is not None:
        # Weights are gathered for it: no rank may be missing, so nothing is read here.
        ranks.together(failure, run_function)
    ready = found[0]
    mine = attempt(lambda: _set_states(ready))
    texts = ranks.texts(mine)
    try:
        answers(failure, texts)
    except CheckpointError:
        if "ok" in json.loads(mine):
            _undo(ready)
        raise
    with torch.no_grad():
        for write in ready.writes:
            write()
    if ranks.rank == 0:
        for note in ready.notes:
            logger.warning("%s", note)
    return Loaded(str(path), ready.client_state, ready.counters)


def _set_states(ready: _Prepared) -> None:
    """Hand states to others' code; what it raises undoes all of it.

    Raises:
        CheckpointError: a state was not taken.
    """
    done = 0
    try:
        for take, state, _ in ready.setters:
            done += 1
            take(state)
    except Exception as error:  # others' code may raise anything
        _undo(ready, done)
        raise CheckpointError(
            f"a state that was saved is not taken back: {type(error).__name__}: {error}"
        ) from error


def _undo(ready: _Prepared, number: int | None = None) -> None:
    for take, _, before in ready.setters[:number]:
        try:
            take(before)
        except Exception as error:  # noqa: BLE001, PERF203  others' code; the first failure is what is told
            logger.warning("a state from before the load cannot be set again: %s", error)


def _prepared(engine: Trained, contents: Contents, options: LoadOptions) -> _Prepared:
    """Read and check all that will be written.

    Args:
        engine: is not changed here.
        contents: the checkpoint.
        options: what to take from it.

    Raises:
        CheckpointError: the checkpoint does not fit, or cannot be read.
    """
    check_same_model(layout_of(engine.module), contents, options.strict)
    ready = _Prepared(contents.value("client_state"))
    if options.custom_load_fn is None:
        ready.writes += read_weights(engine, contents)
    ready.writes += read_buffers(engine.module, contents, options.strict)
    for path, module in modules_with_extra_state(engine.module).items():
        if f"extra/{path}" in contents.trees:
            before = copy.deepcopy(module.get_extra_state())
            state = contents.value(f"extra/{path}")
            ready.setters.append((module.set_extra_state, state, before))
    kept = {name for name in contents.own if name.startswith(("buffer/", "extra/"))}
    if not options.module_only:
        kept = contents.own - {"generators"}
        _prepare_run(engine, contents, options, ready)
    if kept and contents.world_size != engine.world.world_size:
        ready.notes.append(
            f"the checkpoint was written by {contents.world_size} ranks, {engine.world.world_size} "
            f"load it: of what differed between ranks ({', '.join(sorted(kept)[:5])}), all take what "
            "rank 0 had"
        )
    return ready


def _prepare_run(
    engine: Trained, contents: Contents, options: LoadOptions, ready: _Prepared
) -> None:
    """Prepare what is not of the model."""
    ready.counters = _counters(engine, contents)
    _prepare_scaler(engine, contents, ready)
    if options.optimizer_states and engine.optimizer is not None and "groups" in contents.trees:
        _check_kind(contents, "optimizer", engine.optimizer)
        ready.writes.append(read_groups(engine, contents, strict=options.strict))
        ready.writes.append(read_states(engine, contents))
        _prepare_beside(engine.optimizer, contents, ready)
    scheduler = engine.lr_scheduler
    if options.scheduler_states and scheduler is not None and "scheduler" in contents.trees:
        _check_kind(contents, "scheduler", scheduler)
        before = copy.deepcopy(scheduler.state_dict())
        ready.setters.append((scheduler.load_state_dict, contents.value("scheduler"), before))
    _prepare_loader(engine, contents, ready)
    is_same = contents.world_size == engine.world.world_size
    if is_same and "generators" in contents.trees:
        ready.setters.append((set_generators, contents.value("generators"), generator_states()))
    else:
        ranks = f"written by {contents.world_size} ranks, {engine.world.world_size} load it"
        origin = ranks if contents.world_size else "imported"
        ready.notes.append(f"the checkpoint was {origin}: random number generators start anew")


def _prepare_beside(optimizer: Any, contents: Contents, ready: _Prepared) -> None:
    """Prepare what the optimizer's `state_dict()` holds beside states; bytes may be a pickle, which nobody is to open."""
    members = members_of(optimizer)
    saved = contents.value(BESIDE) if BESIDE in contents.trees else [{} for _ in members]
    for each, held in zip(members, saved, strict=True):
        before = beside_states(each)
        if is_same(before, held):
            continue
        if list(bytes_in(value_of(BESIDE, held).tree)) != list(
            bytes_in(value_of(BESIDE, before).tree)
        ):
            raise CheckpointError(
                f"{kind_of(each)} keeps bytes beside its states ({', '.join(map(str, held))}) that are others than this run's, "
                "and to load them could run code: build it with the same arguments, or load with load_optimizer_states=False"
            )
        ready.setters.append((partial(take_beside_states, each), held, before))


def _check_kind(contents: Contents, what: str, present: object) -> None:
    """Refuse states of another algorithm, which would be taken for this one's."""
    saved = contents.facts[what]  # None: an import could not tell
    if saved is not None and saved != kind_of(present):
        flag = "load_optimizer_states" if what == "optimizer" else "load_lr_scheduler_states"
        raise CheckpointError(
            f"the checkpoint holds the states of {saved}, this run's {what} is {kind_of(present)}: "
            f"use {saved}, or load with {flag}=False"
        )


def _counters(engine: Trained, contents: Contents) -> Counters:
    with reading(contents.path, " at the counters"):
        counters = Counters(**contents.value("counters"))
    steps, saved = engine.gradient_accumulation_steps(), int(contents.facts["accumulation_steps"])
    if saved == steps:
        return counters
    if counters.num_backwards or any(is_gradient(key) for key in contents.index):
        raise CheckpointError(
            f"checkpoint {str(contents.path)!r} was saved in the middle of an accumulation of {saved} "
            f"micro-steps, this run accumulates {steps}: set gradient_accumulation_steps={saved} until "
            "the next optimizer step"
        )
    counters.micro_steps = counters.global_steps * steps
    return counters


def _prepare_scaler(engine: Trained, contents: Contents, ready: _Prepared) -> None:
    """Prepare the loss scale, and gradients that wait, which are multiples of it."""
    state, scaler = contents.value("scaler"), engine.scaler
    with reading(contents.path, " at the loss scale"):
        copy.copy(scaler).load_state_dict(state)  # a trial
        saved_scale = float(state["scale"])
        if not saved_scale > 0:
            raise ValueError(f"the loss scale is {saved_scale}")
    is_static = scaler.config is None or bool(scaler.config.static_scale)
    if is_static or not contents.facts["scales_loss"]:
        # The scale is a setting, or the run that saved had none.
        state = {**state, "scale": scaler.scale}
    ready.writes.append(lambda: scaler.load_state_dict(state))
    ready.writes += read_gradients(engine, contents, float(state["scale"]) / saved_scale)


def _prepare_loader(engine: Trained, contents: Contents, ready: _Prepared) -> None:
    loader = engine.training_dataloader
    if "loader" not in contents.trees or not has_position(loader):
        return
    saved, kind = contents.value("loader"), type(loader).__name__
    why = ""
    if saved["of"] != kind:
        why = f"the checkpoint holds the position of a {saved['of']}, this run reads from a {kind}"
    elif contents.world_size != engine.world.world_size and "ranks" not in saved["state"]:
        # torchloom's own loader says for how many ranks a position is, and divides it anew.
        why = (
            f"the position of a {kind} on {contents.world_size} ranks means nothing to "
            f"{engine.world.world_size}"
        )
    if why:
        ready.notes.append(f"{why}: its data begins anew")
    else:
        before = copy.deepcopy(loader.state_dict())
        ready.setters.append((loader.load_state_dict, saved["state"], before))
