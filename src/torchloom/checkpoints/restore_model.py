"""Weights and buffers from a checkpoint: read into host memory first, written by what is returned."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from torchloom.checkpoints.contents import Contents
from torchloom.checkpoints.trained import Trained, buffers_of
from torchloom.errors import CheckpointError
from torchloom.shard import Layout, ParamSpec, gathered, layout_of, owners_of
from torchloom.shard.shards import cut, valid_numel


def check_same_model(layout: Layout, contents: Contents, strict: bool) -> None:
    """Raise unless the checkpoint's parameters are the model's.

    Args:
        layout: of the model.
        contents: the checkpoint.
        strict: names must be equal too, not only the shapes of common names.

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


def read_weights(engine: Trained, contents: Contents) -> Iterator[Callable[[], object]]:
    """Read this rank's parts of all parameters; yield what writes each."""
    layout, params = layout_of(engine.module), owners_of(engine.module)
    for spec in layout:
        key, param = f"model/{spec.name}", params[spec.name]
        if key in contents.payload:
            yield reader(contents, key, spec, layout, param)


def read_buffers(
    module: nn.Module, contents: Contents, strict: bool
) -> Iterator[Callable[[], object]]:
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
        yield _into_buffer(module, name, buffer, value)


def whole_weights(engine: Trained, contents: Contents) -> dict[str, Tensor]:
    """Read all weights and buffers whole, for a function of the caller's.

    Raises:
        CheckpointError: they cannot be read.
    """
    module, layout = engine.module, layout_of(engine.module)
    source = {
        spec.name: contents.payload.whole(f"model/{spec.name}")
        for spec in layout
        if f"model/{spec.name}" in contents.payload
    }
    source |= {
        name: contents.value(f"buffer/{name}")
        for name in buffers_of(module)
        if f"buffer/{name}" in contents
    }
    return source


def load_by_function(
    engine: Trained, source: dict[str, Tensor], function: Callable[..., object]
) -> list[Callable[[], object]]:
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
    writes: list[Callable[[], object]] = []
    before = {name: buffer.clone() for name, buffer in buffers_of(module).items()}
    params, shards = owners_of(module), {}
    with gathered(module):
        try:
            with torch.no_grad():
                function(src=source, dst=module)
            for spec in layout:
                whole = params[spec.name].detach()
                shard = (
                    cut(whole, layout.rank, spec.shard_numel) if spec.mode == "sharded" else whole
                )
                shards[spec.name] = shard.cpu().clone()
            writes += [
                _into_buffer(module, name, buffer, buffer.detach().clone())
                for name, buffer in buffers_of(module).items()
            ]
        finally:
            for name, buffer in buffers_of(module).items():
                _into_buffer(module, name, buffer, before[name])()
    writes += [_copy(params[name], shard) for name, shard in shards.items()]
    return writes


def _into_buffer(
    module: nn.Module, name: str, buffer: Tensor, value: Tensor
) -> Callable[[], object]:
    """Return what writes a buffer: in place, or anew where its memory cannot be written."""
    is_expanded = any(
        stride == 0 and size > 1 for stride, size in zip(buffer.stride(), buffer.shape, strict=True)
    )
    if not (is_expanded or buffer.is_inference()):
        return _copy(buffer, value)
    path, _, own = name.rpartition(".")
    fresh = value.to(device=buffer.device, dtype=buffer.dtype).reshape(buffer.shape).clone()
    return lambda: setattr(module.get_submodule(path), own, fresh)


def reader(
    contents: Contents, key: str, spec: ParamSpec, layout: Layout, target: Tensor
) -> Callable[[], object]:
    """Read this rank's part of a tensor; return what writes it into the front of `target`.

    Args:
        contents: the checkpoint.
        key: name of the tensor there.
        spec: the parameter that the tensor belongs to.
        layout: says which shard is this rank's.
        target: written from its first element on; the rest stays.
    """
    if spec.mode != "sharded":
        return _copy(target, contents.payload.part(key, 0, spec.numel))
    start = min(layout.rank * spec.shard_numel, spec.numel)
    valid = valid_numel(spec.numel, layout.rank, spec.shard_numel)
    return _copy_front(target, contents.payload.part(key, start, valid))


def _copy(target: Tensor, value: Tensor) -> Callable[[], object]:
    fitted = value.reshape(target.shape)
    return lambda: target.detach().copy_(fitted)


def _copy_front(target: Tensor, value: Tensor) -> Callable[[], object]:
    """Write the part of a shard that is not padding."""
    return lambda: target.detach()[: value.numel()].copy_(value)
