"""From a checkpoint into an engine: all is read and checked first, and then written.

Each rank reads what it needs into host memory. When all ranks have, states that belong to others'
code (schedule, data loader) are set, each with a way back. Then tensors are copied, which cannot fail.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from torchloom.engine.checkpoints import rng
from torchloom.engine.checkpoints.contents import Contents
from torchloom.engine.checkpoints.snapshot import (
    Counters,
    Trained,
    buffers_of,
    has_position,
    modules_with_extra_state,
)
from torchloom.engine.checkpoints.states import Groups, read_groups, read_states
from torchloom.engine.loader import Loader
from torchloom.errors import CheckpointError
from torchloom.log import get_logger
from torchloom.shard import Layout, gathered, layout_of, owners_of
from torchloom.shard.layout import ParamSpec
from torchloom.shard.pieces import cut, valid_numel

logger = get_logger(__name__)


@dataclass(frozen=True)
class Options:
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
    foreign: list[tuple[Callable[[], object], Callable[[], object]]] = field(default_factory=list)
    """What others' code does, and what undoes it."""
    counters: Counters | None = None
    client_state: Any = None
    notes: list[str] = field(default_factory=list)


def prepare(engine: Trained, contents: Contents, options: Options) -> Prepared:
    """Read and check all that will be written.

    Raises:
        CheckpointError: the checkpoint does not fit, or cannot be read.
    """
    check_same_model(layout_of(engine.module), contents, options.strict)
    ready = Prepared(client_state=contents.value("client_state"))
    if options.custom_load_fn is None:
        ready.writes += _read_weights(engine, contents)
    ready.writes += _read_buffers(engine.module, contents, options.strict)
    for path, module in modules_with_extra_state(engine.module).items():
        if f"extra/{path}" in contents:
            state, before = contents.value(f"extra/{path}"), module.get_extra_state()
            ready.foreign.append(_there_and_back(module.set_extra_state, state, before))
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


def _prepare_run(engine: Trained, contents: Contents, options: Options, ready: Prepared) -> None:
    """Prepare what is not of the model."""
    ready.counters = _counters(engine, contents)
    scaler_state = contents.value("scaler")
    _check_scaler(engine, scaler_state, contents)
    factor = 1.0
    if engine.scaler.config is None:
        factor = 1.0 / float(scaler_state["scale"])  # of gradients that wait
        scaler_state = {**scaler_state, "scale": 1.0}
    ready.writes.append(lambda: engine.scaler.load_state_dict(scaler_state))
    ready.writes += _read_gradients(engine, contents, ready, factor)
    if options.optimizer_states and engine.optimizer is not None and "groups" in contents:
        groups = read_groups(engine, contents, strict=options.strict)
        states = read_states(engine, contents)
        ready.writes += [lambda: _put_groups(groups), states]
    scheduler = engine.lr_scheduler
    if options.scheduler_states and scheduler is not None and "scheduler" in contents:
        state = contents.value("scheduler")
        before = copy.deepcopy(scheduler.state_dict())
        ready.foreign.append(_there_and_back(scheduler.load_state_dict, state, before))
    _prepare_loader(engine, contents, ready)
    if contents.world_size != engine.world.world_size:
        ready.notes.append(
            f"the checkpoint was written by {contents.world_size} ranks, {engine.world.world_size} "
            "load it: random number generators start anew"
        )
    else:
        ready.writes.append(rng.read(contents.path / rng.file_name(engine.world.rank)))


def apply(ready: Prepared) -> None:
    """Write all that was prepared."""
    with torch.no_grad():
        for write in ready.writes:
            write()


def call_foreign(ready: Prepared) -> None:
    """Hand states to others' code; what it raises undoes all of it.

    Raises:
        CheckpointError: a state was not taken.
    """
    number = 0
    try:
        for there, _ in ready.foreign:
            number += 1
            there()
    except Exception as error:  # others' code may raise anything
        undo_foreign(ready, number)
        raise CheckpointError(
            f"a state that was saved is not taken back: {type(error).__name__}: {error}"
        ) from error


def undo_foreign(ready: Prepared, number: int | None = None) -> None:
    """Take the states back that others' code had before."""
    for _, back in ready.foreign[:number]:
        _undo(back)


def _undo(back: Callable[[], object]) -> None:
    try:
        back()
    except Exception as error:  # noqa: BLE001  others' code; the first failure is what is told
        logger.warning("a state from before the load cannot be set again: %s", error)


def check_same_model(layout: Layout, contents: Contents, strict: bool) -> None:
    """Raise unless the checkpoint's parameters are the model's.

    Raises:
        CheckpointError: names or shapes differ.
    """
    saved, stored = contents.params, contents.payload
    have = {spec.name: list(spec.shape) for spec in layout}
    differ = [
        f"{name}: {saved[name]} in the checkpoint, {shape} in the model"
        for name, shape in have.items()
        if name in saved and saved[name] != shape
    ]
    if strict:
        differ += [f"{name}: not in the checkpoint" for name in sorted(have.keys() - saved.keys())]
        differ += [f"{name}: not in the model" for name in sorted(saved.keys() - have.keys())]
        differ += [
            f"{name}: was frozen and left out of the checkpoint, the model trains it"
            for name in sorted(have.keys() & saved.keys())
            if f"model/{name}" not in stored and layout[name].requires_grad
        ]
    if differ:
        shown = "\n  ".join(differ[:5])
        more = f"\n  and {len(differ) - 5} more" if len(differ) > 5 else ""
        raise CheckpointError(
            f"checkpoint {str(contents.path)!r} is of another model:\n  {shown}{more}\n"
            "Load it into the model that wrote it, or pass load_module_strict=False to take the "
            "parameters that fit by name and shape"
        )


def read_by_function(engine: Trained, contents: Contents, options: Options) -> Prepared:
    """Let the caller's function load whole weights; return the pieces that came of it.

    All ranks must call, as weights are gathered. The model is as it was afterwards.

    Raises:
        Exception: whatever the function raises.
    """
    assert options.custom_load_fn is not None
    module, layout, ready = engine.module, layout_of(engine.module), Prepared()
    source = {
        spec.name: contents.payload.whole(f"model/{spec.name}").reshape(spec.shape)
        for spec in layout
        if f"model/{spec.name}" in contents.payload
    }
    source |= {
        name: contents.value(f"buffer/{name}")
        for name in buffers_of(module)
        if f"buffer/{name}" in contents
    }
    before = {name: buffer.clone() for name, buffer in buffers_of(module).items()}
    params, pieces = owners_of(module), {}
    with gathered(module):
        try:
            with torch.no_grad():
                options.custom_load_fn(src=source, dst=module)
            for spec in layout:
                whole = params[spec.name].detach()
                piece = (
                    cut(whole, layout.rank, spec.shard_numel) if spec.mode == "sharded" else whole
                )
                pieces[spec.name] = piece.cpu().clone()
            ready.writes += [
                _copy(buffer, buffer.detach().clone()) for buffer in buffers_of(module).values()
            ]
        finally:
            for name, buffer in buffers_of(module).items():
                buffer.copy_(before[name])
    ready.writes += [_copy(params[name], piece) for name, piece in pieces.items()]
    return ready


def _copy(target: Tensor, value: Tensor) -> Callable[[], object]:
    fitted = value.reshape(target.shape)
    return lambda: target.detach().copy_(fitted)


def _copy_front(target: Tensor, value: Tensor) -> Callable[[], object]:
    """Write the part of a piece that is not padding."""
    return lambda: target.detach()[: value.numel()].copy_(value)


def _there_and_back(
    take: Callable[[Any], object], state: Any, before: Any
) -> tuple[Callable[[], object], Callable[[], object]]:
    return (lambda: take(state)), (lambda: take(before))


def _read_weights(engine: Trained, contents: Contents) -> Iterator[Callable[[], object]]:
    layout, params = layout_of(engine.module), owners_of(engine.module)
    for spec in layout:
        key, param = f"model/{spec.name}", params[spec.name]
        if key in contents.payload:
            yield _reader(contents, key, spec, layout, param)


def _reader(
    contents: Contents, key: str, spec: ParamSpec, layout: Layout, target: Tensor
) -> Callable[[], object]:
    if spec.mode != "sharded":
        return _copy(target, contents.payload.part(key, 0, spec.numel))
    start = min(layout.rank * spec.shard_numel, spec.numel)
    valid = valid_numel(spec.numel, layout.rank, spec.shard_numel)
    return _copy_front(target, contents.payload.part(key, start, valid))


def _read_buffers(
    module: nn.Module, contents: Contents, strict: bool
) -> Iterator[Callable[[], object]]:
    have = buffers_of(module)
    saved = {name.removeprefix("buffer/") for name in contents.trees if name.startswith("buffer/")}
    if strict and saved != have.keys():
        odd = sorted(saved ^ have.keys())
        raise CheckpointError(
            f"checkpoint {str(contents.path)!r} is of another model: the buffers {', '.join(odd[:5])} "
            "are in one of them alone. Pass load_module_strict=False to take those that fit"
        )
    for name, buffer in have.items():
        if name not in saved:
            continue
        value = contents.value(f"buffer/{name}")
        if not isinstance(value, Tensor) or value.shape != buffer.shape:
            shape = list(value.shape) if isinstance(value, Tensor) else value
            raise CheckpointError(
                f"checkpoint {str(contents.path)!r} is of another model: buffer {name} has shape "
                f"{shape}, in the model {list(buffer.shape)}"
            )
        yield _copy(buffer, value)


def _counters(engine: Trained, contents: Contents) -> Counters:
    try:
        counters = Counters(**contents.value("counters"))
    except TypeError as error:
        raise CheckpointError(f"{contents.path}: counters cannot be read: {error}") from error
    steps = engine.gradient_accumulation_steps()
    saved = int(contents.facts.get("accumulation_steps", steps))
    if saved == steps:
        return counters
    if counters.num_backwards or any(_is_gradient(key) for key in contents.payload.index):
        raise CheckpointError(
            f"checkpoint {str(contents.path)!r} was saved in the middle of an accumulation of {saved} "
            f"micro-steps, this run accumulates {steps}: set gradient_accumulation_steps={saved} until "
            "the next optimizer step"
        )
    counters.micro_steps = counters.global_steps * steps
    return counters


def _is_gradient(key: str) -> bool:
    return re.match(r"(rank\d+/)?grad/", key) is not None


def _check_scaler(engine: Trained, state: Any, contents: Contents) -> None:
    try:
        copy.copy(engine.scaler).load_state_dict(state)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{contents.path}: the loss scale cannot be read: {error}") from error
    if not float(state["scale"]) > 0:
        raise CheckpointError(f"{contents.path}: the loss scale is {state['scale']}")


def _read_gradients(
    engine: Trained, contents: Contents, ready: Prepared, factor: float
) -> Iterator[Callable[[], object]]:
    """Read the gradients that were waiting for more micro-steps; drop those that wait here.

    Local gradients are a mean over ranks to be: on another number of ranks each takes that mean.
    """
    yield engine.local.zero_grad
    micro_steps = 0 if ready.counters is None else ready.counters.micro_steps
    if contents.version == 1 and micro_steps % engine.gradient_accumulation_steps():
        ready.notes.append(
            "the checkpoint was saved in the middle of an accumulation, by a version that kept no "
            "gradients: the next optimizer step lacks those micro-steps"
        )
    layout, same = layout_of(engine.module), contents.world_size == engine.world.world_size
    mine = contents.value("gradients") if "gradients" in contents else {}
    for each in engine.local:
        spec, key = each.spec, f"grad/{each.spec.name}"
        local = [f"rank{rank}/{key}" for rank in range(contents.world_size)]
        found = [name for name in local if name in contents.payload]
        is_local = spec.mode == "whole"
        if is_local and same and found:
            if mine.get(spec.name) == "local":
                value = contents.payload.whole(local[engine.world.rank])
                yield _set_grad(each.param, value, factor)
        elif found:
            mean = sum(contents.payload.whole(name).double() for name in found) / len(local)
            assert isinstance(mean, Tensor)
            whole = mean.to(torch.float32)
            value = cut(whole, layout.rank, spec.shard_numel) if spec.mode == "sharded" else whole
            yield _set_grad(each.param, value, factor)
        elif key in contents.payload:
            value = torch.zeros(each.param.numel(), dtype=contents.payload.index[key].dtype)
            _reader(contents, key, spec, layout, value)()
            yield _set_grad(each.param, value, factor)


def _set_grad(param: nn.Parameter, value: Tensor, factor: float) -> Callable[[], None]:
    fitted = value.reshape(param.shape)

    def write() -> None:
        grad = torch.empty_like(param).copy_(fitted)
        param.grad = grad if factor == 1.0 else grad.mul_(factor)

    return write


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
    if contents.world_size != engine.world.world_size and not isinstance(loader, Loader):
        ready.notes.append(
            f"the position of a {saved['of']} on {contents.world_size} ranks means nothing to "
            f"{engine.world.world_size}: its data begins anew"
        )
        return
    before = copy.deepcopy(loader.state_dict())
    ready.foreign.append(_there_and_back(loader.load_state_dict, saved["state"], before))
