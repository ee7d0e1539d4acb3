"""Turns a checkpoint of DeepSpeed's into one of torchloom's: weights, optimizer states, schedule, counters."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from torchloom.checkpoints.contents import PayloadPart
from torchloom.checkpoints.deepspeed_files import (
    DeepSpeedFiles,
    ImportedParam,
    Inert,
    Pieces,
    other_params,
    read_files,
    trained_params,
)
from torchloom.checkpoints.engine_values import Counters
from torchloom.checkpoints.folder import check_tag
from torchloom.checkpoints.lock import FOLDERS
from torchloom.checkpoints.rank_task import RankTask
from torchloom.checkpoints.snapshot import EngineSnapshot
from torchloom.checkpoints.values import Value, add_state, value_of
from torchloom.checkpoints.write import Request, write
from torchloom.errors import CheckpointError, first_line

_SETTINGS, _OWN = (
    frozenset(names.split())
    for names in (
        # Of a parameter group: what is not of one implementation of an optimizer.
        """
        lr initial_lr betas eps weight_decay momentum dampening nesterov amsgrad maximize alpha centered
        """,
        # Keys of DeepSpeed's; all others are of the caller's `client_state`.
        """
        module buffer_names optimizer param_shapes frozen_param_shapes shared_params frozen_param_fragments
        lr_scheduler data_sampler random_ltd skipped_steps sparse_tensor_module_names global_steps
        global_samples dp_world_size ds_config mp_world_size ds_version checkpoint_parallel_dimensions
        universal_checkpoint_info
        """,
    )
)


class Imported(NamedTuple):
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
    owner = object()
    try:
        request = Request(target.absolute(), check_tag(files.path.name))
        write(snapshot, request, owner, RankTask(0, 1, "import"))
    finally:
        FOLDERS.release(owner)
    return Imported(target / files.path.name, snapshot.facts, notes)


def _snapshot(files: DeepSpeedFiles, notes: list[str]) -> EngineSnapshot:
    model = files.models[0]
    trained = trained_params(files)
    params = trained | other_params(files, trained)
    groups = [
        {
            **{key: value for key, value in group.items() if key in _SETTINGS},
            "params": [name for name, each in trained.items() if each.group == index],
        }
        for index, group in enumerate(files.optimizer()["param_groups"])
    ]
    steps, samples = int(model["global_steps"]), int(model["global_samples"])
    scaler = files.optims[0].get("loss_scaler")
    scale, is_scaled = _scaler(scaler, int(model["skipped_steps"]))
    config = model["ds_config"] if isinstance(model["ds_config"], dict) else {}
    kind, scheduler = _scheduler(model["lr_scheduler"], config, notes)
    if kind is not None:
        scheduler = {**scheduler, "rates": [group["lr"] for group in groups]}
    plain = {
        "groups": groups,
        # Of one micro-step per step: a run with others counts them anew.
        "counters": vars(Counters(steps, samples, steps)),
        "scaler": scale,
        **({} if scheduler is None else {"scheduler": scheduler}),
    }
    values = {name: value_of(name, value) for name, value in plain.items()}
    values |= {"client_state": _client_state(model, notes), "gradients": Value({})}
    values |= _module_values(model)
    parts: list[PayloadPart] = []
    for name, each in params.items():
        parts += _tensor(f"model/{name}", each, each.weight)
        if each.states:
            values[f"optim/{name}"] = _states(name, each, parts)
    facts = {
        "stage": 3 if files.is_stage3 else "1 or 2",
        "world_size": 0,  # no rank of torchloom's has states of its own in it
        "params": {name: list(each.shape) for name, each in params.items()},
        "global_steps": steps,
        "global_samples": samples,
        "accumulation_steps": 1,
        "scales_loss": is_scaled,
        "optimizer": _optimizer_kind(config),
        "scheduler": kind,
        "imported": f"DeepSpeed {model['ds_version']}",
    }
    tied = {name: of for name, of in (model["shared_params"] or {}).items() if of in params}
    return EngineSnapshot(parts, values, facts, tied=tied)


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


def _states(name: str, param: ImportedParam, parts: list[PayloadPart]) -> Value:
    """Return the optimizer's states of a parameter by kind; `parts` receives those that are divided."""
    value = Value([])
    for state, held in param.states.items():
        full = f"optim/{name}/{state}"
        if isinstance(held, list):
            parts += _tensor(full, param, held)
            value.tree.append([state, "piece", None])
        else:
            add_state(value, state, held, full, f"the state {state!r} of {name!r}", {})
    return value


def _tensor(key: str, param: ImportedParam, pieces: Pieces) -> Iterator[PayloadPart]:
    first, shape = 0, param.shape
    for piece in pieces:
        is_whole = piece.numel() == math.prod(shape)
        yield PayloadPart(key, piece.reshape(shape) if is_whole else piece, shape, first)
        first += piece.numel()


def _client_state(model: dict[str, Any], notes: list[str]) -> Value:
    kept = {key: value for key, value in model.items() if key not in _OWN}
    try:
        return value_of("client_state", kept)
    except CheckpointError as error:  # an object of DeepSpeed's
        notes.append(str(error))
        return value_of("client_state", {})


def _scaler(scaler: Any, num_skipped: int) -> tuple[dict[str, float], bool]:
    """Return the state of a loss scaler, and whether it scales."""
    saved = vars(scaler) if isinstance(scaler, Inert) else {}
    found = {"scale": float(saved.get("cur_scale", 1.0)), "num_skipped": num_skipped}
    dynamic = {"good_steps": 0, "forgiveness": 1, "skips_in_a_row": 0}
    if "cur_iter" in saved:
        dynamic["good_steps"] = saved["cur_iter"] - saved["last_overflow_iter"] - 1
        dynamic["forgiveness"] = saved["cur_hysteresis"]
    return {**found, **dynamic}, found["scale"] != 1.0


def _optimizer_kind(config: dict[str, Any]) -> str | None:
    """Return the class that torchloom makes of the configuration, None where that is not known."""
    asked = config.get("optimizer") or {}
    name = str(asked.get("type", "")).lower()
    if name == "adam" and (asked.get("params") or {}).get("adam_w_mode", True):
        name = "adamw"
    return {"adamw": "AdamW", "adam": "Adam", "sgd": "SGD"}.get(name)


def _scheduler(state: Any, config: dict[str, Any], notes: list[str]) -> tuple[str | None, Any]:
    """Return the class of a schedule of DeepSpeed's, if it is known, and the state."""
    if not isinstance(state, dict) or state.keys() != {"last_batch_iteration"}:
        return None, state
    kind = (config.get("scheduler") or {}).get("type")
    if kind is None:
        notes.append(
            "the position of a schedule of DeepSpeed's, whose class the configuration does not name"
        )
    return kind, state if kind is not None else None
