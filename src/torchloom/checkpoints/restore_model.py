"""Reads weights and buffers from a checkpoint into host memory; what is returned writes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from torchloom.checkpoints.contents import Contents
from torchloom.checkpoints.engine_values import Trained, buffers_of
from torchloom.errors import CheckpointError
from torchloom.shard import Layout, ParamSpec, gathered, layout_of, owners_of
from torchloom.shard.shards import cut, valid_numel

Write = Callable[[], object]


def check_same_model(layout: Layout, contents: Contents, strict: bool) -> None:
    """Raise unless the checkpoint's parameters are the model's.

    Args:
        layout: of the model.
        contents: the checkpoint.
        strict: names must be equal too, not only the shapes of common names.

    Raises:
        CheckpointError: names or shapes differ.
    """
    saved = contents.params
    have = {spec.name: list(spec.shape) for spec in layout}
    differ = [
        f"{name}: {saved[name]} in the checkpoint, {shape} in the model"
        for name, shape in have.items()
        if saved.get(name, shape) != shape
    ]
    if strict:
        differ += [f"{name}: not in the checkpoint" for name in sorted(have.keys() - saved.keys())]
        differ += [f"{name}: not in the model" for name in sorted(saved.keys() - have.keys())]
        differ += [
            f"{name}: was frozen and left out of the checkpoint, the model trains it"
            for name in sorted(have.keys() & saved.keys())
            if f"model/{name}" not in contents.index and layout[name].requires_grad
        ]
    if differ:
        more = f"\n  and {len(differ) - 5} more" if len(differ) > 5 else ""
        raise _other_model(
            contents,
            "\n  " + "\n  ".join(differ[:5]) + more + "\nLoad it into the model that wrote it",
            "the parameters that fit by name and shape",
        )


def _other_model(contents: Contents, why: str, what_fits: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {str(contents.path)!r} is of another model:{why}, or pass load_module_strict=False "
        f"to take {what_fits}"
    )


def read_shard(contents: Contents, key: str, spec: ParamSpec, rank: int, numel: int) -> Tensor:
    """Read a rank's part of a tensor, flat and with padding.

    Args:
        contents: the checkpoint.
        key: name of the tensor there.
        spec: the parameter that the tensor belongs to.
        rank: whose part, 0 of a tensor that all hold.
        numel: elements of a part.
    """
    valid = valid_numel(spec.numel, rank, numel)
    value = contents.part(key, min(rank * numel, spec.numel), valid)
    return value if valid == numel else torch.cat([value, value.new_zeros(numel - valid)])


def share_of(spec: ParamSpec, layout: Layout) -> tuple[int, int]:
    """Return which part of a parameter is this rank's, and how many elements parts have."""
    return (layout.rank, spec.shard_numel) if spec.mode == "sharded" else (0, spec.numel)


def read_weights(engine: Trained, contents: Contents) -> Iterator[Write]:
    """Read this rank's parts of all parameters; yield what writes each."""
    layout, params = layout_of(engine.module), owners_of(engine.module)
    for spec in layout:
        key = f"model/{spec.name}"
        if key in contents.index:
            value = read_shard(contents, key, spec, *share_of(spec, layout))
            yield _copy(params[spec.name], value)


def read_buffers(module: nn.Module, contents: Contents, strict: bool) -> Iterator[Write]:
    """Read the persistent buffers; yield what writes each.

    Args:
        module: the model.
        contents: the checkpoint.
        strict: the checkpoint must hold exactly the model's buffers.

    Raises:
        CheckpointError: the model has others.
    """
    have = buffers_of(module)
    saved = {name.removeprefix("buffer/") for name in contents.trees if name.startswith("buffer/")}
    if strict and saved != have.keys():
        odd = ", ".join(sorted(saved ^ have.keys())[:5])
        raise _other_model(
            contents, f" the buffers {odd} are in one of them alone", "those that fit"
        )
    for name in saved & have.keys():
        buffer, value = have[name], contents.value(f"buffer/{name}")
        if not isinstance(value, Tensor) or value.shape != buffer.shape:
            shown = list(value.shape) if isinstance(value, Tensor) else value
            shapes = f"{shown} in the checkpoint, {list(buffer.shape)} in the model"
            raise _other_model(contents, f" buffer {name} has shape {shapes}", "nothing of it")
        yield _into_buffer(module, name, buffer, value)


def whole_weights(engine: Trained, contents: Contents) -> dict[str, Tensor]:
    """Read all weights and buffers whole, for a function of the caller's.

    Raises:
        CheckpointError: they cannot be read.
    """
    names = {f"model/{spec.name}": spec.name for spec in layout_of(engine.module)}
    source = {name: contents.whole(key) for key, name in names.items() if key in contents.index}
    for name in buffers_of(engine.module):
        if f"buffer/{name}" in contents.trees:
            source[name] = contents.value(f"buffer/{name}")
    return source


def load_by_function(
    engine: Trained, source: dict[str, Tensor], function: Callable[..., object]
) -> list[Write]:
    """Let the caller's function load whole weights; return what writes the shards that came of it.

    All ranks must call, as weights are gathered. The model is as it was afterwards.

    Args:
        engine: its model is gathered meanwhile.
        source: whole weights of the checkpoint, by name.
        function: called with `src` (the source) and `dst` (the model, with whole weights).

    Raises:
        Exception: whatever the function raises.
    """
    module, layout = engine.module, layout_of(engine.module)
    params, writes = owners_of(module), []
    before = {name: buffer.clone() for name, buffer in buffers_of(module).items()}
    with gathered(module):
        try:
            with torch.no_grad():
                function(src=source, dst=module)
            shards = []
            for spec in layout:
                whole = params[spec.name].detach()
                if spec.mode == "sharded":
                    whole = cut(whole, layout.rank, spec.shard_numel)
                shards.append((params[spec.name], whole.cpu().clone()))
            writes += [
                _into_buffer(module, name, buffer, buffer.detach().clone())
                for name, buffer in buffers_of(module).items()
            ]
        finally:
            for name, buffer in buffers_of(module).items():
                _into_buffer(module, name, buffer, before[name])()
    return writes + [_copy(param, shard) for param, shard in shards]


def _into_buffer(module: nn.Module, name: str, buffer: Tensor, value: Tensor) -> Write:
    """Return what writes a buffer: in place, or anew where its memory cannot be written."""
    dims = zip(buffer.stride(), buffer.shape, strict=True)
    is_expanded = any(stride == 0 and size > 1 for stride, size in dims)
    if not (is_expanded or buffer.is_inference()):
        return _copy(buffer, value)
    path, _, own = name.rpartition(".")
    fresh = value.to(device=buffer.device, dtype=buffer.dtype).clone()
    return lambda: setattr(module.get_submodule(path), own, fresh)


def _copy(target: Tensor, value: Tensor) -> Write:
    fitted = value.reshape(target.shape)
    return lambda: target.detach().copy_(fitted)
