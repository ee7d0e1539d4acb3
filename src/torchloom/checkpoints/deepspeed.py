"""A checkpoint of DeepSpeed's becomes one of torchloom's: weights, optimizer states, schedule, counters."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from torchloom.checkpoints.deepspeed_files import (
    DeepSpeedFiles,
    ImportedParam,
    Inert,
    Pieces,
    is_stage3,
    optimizer_of,
    other_params,
    read_files,
    trained_params,
)
from torchloom.checkpoints.folder import check_tag
from torchloom.checkpoints.lock import FolderLock
from torchloom.checkpoints.manifest import first_line
from torchloom.checkpoints.plain_values import Value, value_of
from torchloom.checkpoints.snapshot import EngineSnapshot
from torchloom.checkpoints.tensors import PayloadPart
from torchloom.checkpoints.together import SaveExchange
from torchloom.checkpoints.trained import Counters
from torchloom.checkpoints.write import Request, write
from torchloom.errors import CheckpointError

_SETTINGS = frozenset(
    [
        "lr",
        "initial_lr",
        "betas",
        "eps",
        "weight_decay",
        "momentum",
        "dampening",
        "nesterov",
        "amsgrad",
        "maximize",
        "alpha",
        "centered",
    ]
)
"""Of a parameter group: what is not of one implementation of an optimizer."""
_OWN = frozenset(
    [
        "module",
        "buffer_names",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "shared_params",
        "frozen_param_fragments",
        "lr_scheduler",
        "data_sampler",
        "random_ltd",
        "skipped_steps",
        "sparse_tensor_module_names",
        "global_steps",
        "global_samples",
        "dp_world_size",
        "ds_config",
        "mp_world_size",
        "ds_version",
        "checkpoint_parallel_dimensions",
        "universal_checkpoint_info",
    ]
)
"""Keys of DeepSpeed's; all others are of the caller's `client_state`."""


@dataclass(frozen=True)
class Imported:
    """What an import came to."""

    path: Path
    facts: dict[str, Any]
    notes: list[str]
    """What was left out."""


def import_deepspeed(source: Path, target: Path, tag: str | None = None) -> Imported:
    """Write a checkpoint of DeepSpeed's ZeRO stages 1 to 3, or a universal one, as one of torchloom's.

    Args:
        source: a folder of DeepSpeed's checkpoints, or one checkpoint.
        target: the folder of checkpoints to write into, under the same tag.
        tag: which one; default: the one that `latest` names.

    Raises:
        CheckpointError: it is damaged or of another kind; or it cannot be written.
    """
    files = read_files(source, tag)
    notes: list[str] = []
    try:
        snapshot = _snapshot(files, notes)
    except CheckpointError as error:
        raise CheckpointError(f"{files.path} cannot be imported: {error}") from error
    except Exception as error:  # a file may hold anything in the place of what is looked for
        raise CheckpointError(
            f"{files.path} is no checkpoint of DeepSpeed's ZeRO stages 1 to 3 that can be imported "
            f"({type(error).__name__}: {first_line(error)}): export its weights with DeepSpeed"
        ) from error
    request, lock = Request(target.absolute(), check_tag(files.path.name)), FolderLock()
    try:
        with SaveExchange(0, 1, "import") as alone:
            write(snapshot, request, lock, alone)
    finally:
        lock.release()
    return Imported(target / files.path.name, snapshot.facts, notes)


def _snapshot(files: DeepSpeedFiles, notes: list[str]) -> EngineSnapshot:
    model = files.models[0]
    trained = trained_params(files)
    params = trained | other_params(files, trained)
    groups = _groups(files, trained)
    values = {
        "client_state": _client_state(model, notes),
        "gradients": Value({}),
        "groups": value_of("groups", groups),
        **_module_values(model),
        **{
            f"optim/{name}": _states_value(name, each)
            for name, each in trained.items()
            if each.states
        },
    }
    steps, samples = int(model["global_steps"]), int(model["global_samples"])
    # Of one micro-step per step: a run with others counts them anew.
    values["counters"] = value_of("counters", vars(Counters(steps, samples, steps)))
    scaler = files.optims[0].get("loss_scaler")
    values["scaler"] = value_of("scaler", _scaler(scaler, int(model["skipped_steps"])))
    config = model["ds_config"] if isinstance(model["ds_config"], dict) else {}
    rates = [group["lr"] for group in groups]
    kind, scheduler = _scheduler(model["lr_scheduler"], config, rates, notes)
    if scheduler is not None:
        values["scheduler"] = value_of("scheduler", scheduler)
    facts = {
        "stage": 3 if is_stage3(files) else "1 or 2",
        "world_size": 0,  # no rank of torchloom's has states of its own in it
        "params": {name: list(each.shape) for name, each in params.items()},
        "global_steps": steps,
        "global_samples": samples,
        "accumulation_steps": 1,
        "scales_loss": isinstance(scaler, Inert) and vars(scaler).get("cur_scale", 1.0) != 1.0,
        "optimizer": _optimizer_kind(config),
        "scheduler": kind,
        "imported": f"DeepSpeed {model['ds_version']}",
    }
    tied = {name: of for name, of in (model["shared_params"] or {}).items() if of in params}
    return EngineSnapshot(list(_parts(params)), values, "", facts, b"", tied)


def _parts(params: dict[str, ImportedParam]) -> Iterator[PayloadPart]:
    for name, each in params.items():
        yield from _tensor(f"model/{name}", each.shape, each.weight)
        for state, value in each.states.items():
            if isinstance(value, list):
                yield from _tensor(f"optim/{name}/{state}", each.shape, value)


def _tensor(key: str, shape: tuple[int, ...], pieces: Pieces) -> Iterator[PayloadPart]:
    first = 0
    for piece in pieces:
        is_whole = piece.numel() == math.prod(shape)
        yield PayloadPart(key, piece.reshape(shape) if is_whole else piece, shape, first)
        first += piece.numel()


def _states_value(name: str, param: ImportedParam) -> Value:
    value = Value([])
    for state, held in param.states.items():
        if isinstance(held, list):
            value.tree.append([state, "piece", None])
            continue
        full = f"optim/{name}/{state}"
        if isinstance(held, Tensor):
            value.tensors[full] = held
            value.tree.append([state, "value", {"$tensor": full}])
        else:
            value.tree.append(
                [state, "value", value_of(f"the state {state!r} of {name!r}", held).tree]
            )
    return value


def _module_values(model: dict[str, Any]) -> dict[str, Value]:
    """Return buffers, and what modules keep as extra state."""
    found = {}
    for name, held in model["module"].items():
        if name in model["buffer_names"]:
            key = f"buffer/{name}"
            found[key] = Value({"$tensor": key}, {key: held})
        elif name.endswith("_extra_state"):
            key = f"extra/{name.removesuffix('_extra_state').rstrip('.')}"
            found[key] = value_of(key, held)
    return found


def _groups(files: DeepSpeedFiles, trained: dict[str, ImportedParam]) -> list[dict[str, Any]]:
    return [
        {
            **{key: value for key, value in group.items() if key in _SETTINGS},
            "params": [name for name, each in trained.items() if each.group == index],
        }
        for index, group in enumerate(optimizer_of(files)["param_groups"])
    ]


def _client_state(model: dict[str, Any], notes: list[str]) -> Value:
    kept = {key: value for key, value in model.items() if key not in _OWN}
    try:
        return value_of("client_state", kept)
    except CheckpointError as error:  # an object of DeepSpeed's
        notes.append(str(error))
        return value_of("client_state", {})


def _scaler(scaler: Any, num_skipped: int) -> dict[str, float]:
    found = {"scale": 1.0, "num_skipped": num_skipped, "good_steps": 0, "forgiveness": 1}
    if isinstance(scaler, Inert):
        saved = vars(scaler)
        found["scale"] = float(saved["cur_scale"])
        if "cur_iter" in saved:
            found["good_steps"] = saved["cur_iter"] - saved["last_overflow_iter"] - 1
            found["forgiveness"] = saved["cur_hysteresis"]
    return found


def _optimizer_kind(config: dict[str, Any]) -> str | None:
    """Return the class that torchloom makes of the configuration, None where that is not known."""
    asked = config.get("optimizer") or {}
    name = str(asked.get("type", "")).lower()
    if name == "adam" and (asked.get("params") or {}).get("adam_w_mode", True):
        name = "adamw"
    return {"adamw": "AdamW", "adam": "Adam", "sgd": "SGD"}.get(name)


def _scheduler(
    state: Any, config: dict[str, Any], rates: list[Any], notes: list[str]
) -> tuple[str | None, dict[str, Any] | None]:
    """Return the class of the schedule, if it is known, and its state."""
    if not isinstance(state, dict) or state.keys() != {"last_batch_iteration"}:
        return None, state
    kind = (config.get("scheduler") or {}).get("type")
    if kind is None:
        notes.append(
            "the position of a schedule of DeepSpeed's, whose class the configuration does not name"
        )
        return None, None
    return kind, {**state, "rates": rates}
