"""Checkpoints that fit any number of ranks and any stage.

    <dir>/<tag>/             written as <tag>.partial, renamed when complete
        .metadata *.distcp   weights and optimizer states, torch.distributed.checkpoint
        engine.json          counters, groups, schedule, shapes: plain JSON
        rng_rank0.pt ...     generator states, readable with weights_only=True
    <dir>/latest             the newest complete tag

Every tensor is stored flat and without padding, so its stored shape does not depend on how many
ranks held it.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from torchloom.engine.groups import World
from torchloom.engine.local import Leaf, LocalParams
from torchloom.engine.offloads import Offloads
from torchloom.engine.scaling import LossScaler
from torchloom.errors import CheckpointError
from torchloom.files import write_whole
from torchloom.log import get_logger
from torchloom.shard import Layout, ParamSpec, layout_of, owners_of
from torchloom.shard.pieces import valid_numel

logger = get_logger(__name__)

FORMAT = 1


class Trained(Protocol):
    """What a checkpoint holds of an engine."""

    module: nn.Module
    optimizer: Optimizer | None
    lr_scheduler: Any
    world: World
    local: LocalParams
    scaler: LossScaler
    offloads: Offloads
    global_steps: int
    global_samples: int
    micro_steps: int


def save(
    engine: Trained, root: Path, tag: str, client_state: dict[str, Any], *, exclude_frozen: bool
) -> str:
    """Write a checkpoint; see `Engine.save_checkpoint`."""
    facts = _facts(engine, client_state)
    _on_rank0(lambda: json.dumps(facts), "client_state must be JSON-able")
    final, partial = root / tag, root / f"{tag}.partial"
    _on_rank0(lambda: _fresh_folder(partial), "the checkpoint folder cannot be written")
    dcp.save(_tensors(engine, exclude_frozen=exclude_frozen), checkpoint_id=str(partial))
    torch.save(_rng_state(), partial / f"rng_rank{dist.get_rank()}.pt")
    dist.barrier()
    _on_rank0(lambda: _publish(facts, partial, final, root, tag), "the checkpoint cannot be placed")
    return str(final)


def load(
    engine: Trained,
    root: Path,
    tag: str | None,
    *,
    strict: bool,
    optimizer_states: bool,
    scheduler_states: bool,
) -> tuple[str, dict[str, Any]]:
    """Continue from a checkpoint; see `Engine.load_checkpoint`."""
    path = _find(root, tag)
    facts = _read_facts(path)
    _check_same_model(layout_of(engine.module), facts["params"], path, strict)
    has_optimizer = optimizer_states and engine.optimizer is not None and facts["has_optimizer"]
    if has_optimizer:
        _make_optimizer_states(engine)
    wanted = _tensors(engine, with_optimizer=has_optimizer)
    wanted = {key: value for key, value in wanted.items() if _param_of(key) in facts["stored"]}
    dcp.load(wanted, checkpoint_id=str(path))
    engine.local.publish()
    if has_optimizer:
        _restore_groups(engine, facts["groups"])
    engine.global_steps = facts["global_steps"]
    engine.global_samples = facts["global_samples"]
    engine.micro_steps = facts["micro_steps"]
    engine.scaler.load_state_dict(facts["scaler"])
    if scheduler_states and engine.lr_scheduler is not None and facts["scheduler"] is not None:
        engine.lr_scheduler.load_state_dict(facts["scheduler"])
    _restore_rng(path, facts["world_size"])
    return str(path), facts["client_state"]


def _tensors(
    engine: Trained, *, with_optimizer: bool = True, exclude_frozen: bool = False
) -> dict[str, Any]:
    """Name every tensor of the run: `model.<param>`, `buffer.<name>`, `optim.<param>.<state>`."""
    layout = layout_of(engine.module)
    # Made for each call: a mesh that is kept keeps its group alive past destroy_process_group.
    mesh = DeviceMesh.from_group(engine.world.comm.shard_group(), engine.world.device.type)
    params = owners_of(engine.module)
    found: dict[str, Any] = {}
    for spec in layout:
        if spec.requires_grad or not exclude_frozen:
            found[f"model/{spec.name}"] = _flat(params[spec.name].detach(), spec, layout, mesh)
    for name, buffer in _persistent_buffers(engine.module):
        found[f"buffer/{name}"] = buffer
    if not with_optimizer or engine.optimizer is None:
        return found
    for each in engine.local:
        for key, value in engine.optimizer.state.get(each.leaf, {}).items():
            if not isinstance(value, Tensor):
                continue
            is_piece = value.numel() == each.leaf.numel() and value.dim() == each.leaf.dim()
            flat = _flat_leaf(value, each, layout, mesh) if is_piece else value
            found[f"optim/{each.spec.name}/{key}"] = flat
    return found


def _flat(local: Tensor, spec: ParamSpec, layout: Layout, mesh: DeviceMesh) -> Any:
    if spec.mode != "sharded":
        return local.reshape(-1) if local.is_contiguous() else local.contiguous().reshape(-1)
    return _piece(local, spec.numel, spec.shard_numel, layout, mesh)


def _flat_leaf(local: Tensor, each: Leaf, layout: Layout, mesh: DeviceMesh) -> Any:
    if not each.is_divided:
        return local.reshape(-1)
    return _piece(local, each.spec.numel, each.leaf.numel(), layout, mesh)


def _piece(
    local: Tensor, numel: int, shard_numel: int, layout: Layout, mesh: DeviceMesh
) -> DTensor:
    """Show this rank's piece, without padding, as a part of a flat tensor of `numel` elements.

    Pieces are ceil(numel / ranks) long, which is how DTensor itself divides a dim.
    """
    valid = local[: valid_numel(numel, layout.rank, shard_numel)]
    return DTensor.from_local(
        valid, mesh, [Shard(0)], run_check=False, shape=torch.Size([numel]), stride=(1,)
    )


def _persistent_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    found = []
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                found.append((f"{path}.{name}" if path else name, buffer))
    return found


def _param_of(key: str) -> str:
    kind, _, rest = key.partition("/")
    return f"{kind}/{rest.rsplit('/', 1)[0]}" if kind == "optim" else key


def _facts(engine: Trained, client_state: dict[str, Any]) -> dict[str, Any]:
    layout, optimizer = layout_of(engine.module), engine.optimizer
    names = {id(each.leaf): each.spec.name for each in engine.local}
    groups = [] if optimizer is None else optimizer.param_groups
    return {
        "format": FORMAT,
        "stage": layout.stage,
        "world_size": dist.get_world_size(),
        "params": {spec.name: list(spec.shape) for spec in layout},
        "global_steps": engine.global_steps,
        "global_samples": engine.global_samples,
        "micro_steps": engine.micro_steps,
        "scaler": engine.scaler.state_dict(),
        "scheduler": _plain_state(engine.lr_scheduler),
        "has_optimizer": optimizer is not None and bool(optimizer.state),
        "groups": [
            {**_jsonable(group), "params": [names[id(p)] for p in group["params"]]}
            for group in groups
        ],
        "client_state": client_state,
    }


def _plain_state(scheduler: Any) -> dict[str, Any] | None:
    return None if scheduler is None else _jsonable(scheduler.state_dict())


def _jsonable(state: Mapping[str, Any]) -> dict[str, Any]:
    """Keep the entries that JSON can hold; functions and tensors are rebuilt, not stored."""
    kept = {}
    for key, value in state.items():
        try:
            json.dumps(value)
        except TypeError:
            continue
        kept[key] = value
    return kept


def _make_optimizer_states(engine: Trained) -> None:
    """Let the optimizer create its states: a step with zero gradients and zero rates."""
    optimizer = engine.optimizer
    assert optimizer is not None
    if optimizer.state:
        return
    rates = [(group["lr"], group.get("weight_decay")) for group in optimizer.param_groups]
    for each in engine.local:
        each.leaf.grad = torch.zeros_like(each.leaf)
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
    engine.offloads.step(optimizer)
    for group, (rate, _) in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    engine.local.zero_grad()


def _restore_groups(engine: Trained, saved: list[dict[str, Any]]) -> None:
    assert engine.optimizer is not None
    groups = engine.optimizer.param_groups
    if len(groups) != len(saved):
        raise CheckpointError(
            f"the checkpoint has {len(saved)} optimizer groups, this run has {len(groups)}: build "
            "the optimizer with the same groups, or load with load_optimizer_states=False"
        )
    for group, old in zip(groups, saved, strict=True):
        for key, value in old.items():
            if key != "params" and key in group:
                group[key] = tuple(value) if isinstance(group[key], tuple) else value


def _fresh_folder(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)
    path.mkdir(parents=True)


def _publish(facts: dict[str, Any], partial: Path, final: Path, root: Path, tag: str) -> None:
    metadata = dcp.FileSystemReader(str(partial)).read_metadata()
    facts["stored"] = sorted({_param_of(key) for key in metadata.state_dict_metadata})
    (partial / "engine.json").write_text(json.dumps(facts, indent=1))
    if final.exists():
        shutil.rmtree(final)
    partial.rename(final)
    write_whole(root / "latest", f"{tag}\n")


def _find(root: Path, tag: str | None) -> Path:
    if tag is None:
        latest = root / "latest"
        if not latest.is_file():
            raise CheckpointError(
                f"no checkpoint in {str(root)!r}: there is no file 'latest'. Check the folder, or "
                "name a tag"
            )
        tag = latest.read_text().strip()
    path = root / tag
    if not (path / "engine.json").is_file():
        have = sorted(p.parent.name for p in root.glob("*/engine.json"))
        raise CheckpointError(
            f"checkpoint {tag!r} in {str(root)!r} is missing or incomplete; complete ones: "
            f"{', '.join(have) or 'none'}"
        )
    return path


def _read_facts(path: Path) -> dict[str, Any]:
    try:
        facts = json.loads((path / "engine.json").read_text())
        version = facts["format"]
    except (ValueError, KeyError) as error:
        raise CheckpointError(f"{path / 'engine.json'} cannot be read: {error}") from error
    if version != FORMAT:
        raise CheckpointError(
            f"checkpoint {str(path)!r} has format {version}, this version reads {FORMAT}: load it "
            "with the version of torchloom that wrote it"
        )
    return facts


def _check_same_model(
    layout: Layout, saved: dict[str, list[int]], path: Path, strict: bool
) -> None:
    have = {spec.name: list(spec.shape) for spec in layout}
    differ = [
        f"{name}: {saved[name]} in the checkpoint, {shape} in the model"
        for name, shape in have.items()
        if name in saved and saved[name] != shape
    ]
    if strict:
        differ += [f"{name}: not in the checkpoint" for name in sorted(have.keys() - saved.keys())]
        differ += [f"{name}: not in the model" for name in sorted(saved.keys() - have.keys())]
    if differ:
        shown = "\n  ".join(differ[:5])
        more = f"\n  and {len(differ) - 5} more" if len(differ) > 5 else ""
        raise CheckpointError(
            f"checkpoint {str(path)!r} is of another model:\n  {shown}{more}\n"
            "Load it into the model that wrote it, or pass load_module_strict=False to take the "
            "parameters that fit by name and shape"
        )


def _rng_state() -> dict[str, Any]:
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, list(internal), gauss],
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _restore_rng(path: Path, saved_world_size: int) -> None:
    if saved_world_size != dist.get_world_size():
        if dist.get_rank() == 0:
            logger.warning(
                "the checkpoint was written by %d ranks, %d load it: random number generators "
                "start anew",
                saved_world_size,
                dist.get_world_size(),
            )
        return
    state = torch.load(path / f"rng_rank{dist.get_rank()}.pt", weights_only=True)
    torch.set_rng_state(state["torch"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _on_rank0(action: Callable[[], object], what: str) -> None:
    """Run on rank 0 and let every rank know how it went."""
    outcome: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            action()
        except (OSError, TypeError, ValueError) as error:
            outcome[0] = f"{type(error).__name__}: {error}"
    dist.broadcast_object_list(outcome, src=0)
    if outcome[0] is not None:
        raise CheckpointError(f"{what}: {outcome[0]}")
