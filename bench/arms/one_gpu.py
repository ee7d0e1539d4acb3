"""Arms that train on GPUs in bf16, or on a CPU to try them: torchloom, FSDP2, and torch.compile of the plain model.

Ranks may share a GPU, which NCCL refuses: then they are a gloo group, whose messages go through host memory.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from arms.activations import checkpoint_blocks
from arms.base import (
    LEARNING_RATE,
    WEIGHT_DECAY,
    Job,
    Step,
    Trainee,
    make_optimizer,
    make_step,
)

Weights = Callable[[], Iterable[Tensor]]


def build(
    job: Job, *, kind: str, device: str, backend: str, compiling: dict[str, Any] | None = None
) -> Trainee:
    """Build one rank.

    Facts are the peaks of the last step, in bytes, a digest of the weights, and what a plan predicted and a step needed.

    Args:
        job: what to train.
        kind: "loom", "fsdp2", "fsdp2-checkpoint", "fsdp2-offload" or "plain".
        device: "cuda" or "cpu".
        backend: of torch.compile.
        compiling: torchloom's section `compile`.
    """
    place = torch.device(device, 0) if device == "cuda" else torch.device(device)
    if not dist.is_initialized():
        if device == "cuda":
            os.environ["LOCAL_RANK"] = "0"  # torch's meshes take their device from it
            torch.cuda.set_device(place)
        is_nccl = device == "cuda" and job.world_size == 1
        dist.init_process_group("nccl" if is_nccl else "gloo")
    facts: dict[str, Any] = {}
    if kind == "loom":
        step, weights, start = _loom(job, device, {"backend": backend, **(compiling or {})}, facts)
    elif kind == "plain":
        step, weights, start = _plain(job, place, backend)
    else:
        step, weights, start = _fsdp2(job, place, backend, kind)

    def measured(tokens: Tensor, targets: Tensor) -> Tensor:
        for batch in (tokens, targets) if job.world_size > 1 else ():
            dist.broadcast(batch, 0)  # ranks with equal batches train as one rank does
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        loss = step(tokens.to(place), targets.to(place))
        if device == "cuda":
            torch.cuda.synchronize()
            facts.update(_peaks())
        return loss

    return Trainee(
        step=measured, compile=start, facts=lambda: {**facts, "weights": _digest(weights())}
    )


def _peaks() -> dict[str, int]:
    stats = torch.cuda.memory_stats()
    kinds = ("requested", "allocated", "reserved")
    return {f"{kind}_peak_bytes": stats[f"{kind}_bytes.all.peak"] for kind in kinds}


def _loom(
    job: Job, device: str, compiling: dict[str, Any], facts: dict[str, Any]
) -> tuple[Step, Weights, Callable[[], None]]:
    import torchloom
    from torchloom.events import PlanCompared, Recorder

    engine, *_ = torchloom.initialize(
        model=job.model(),
        mesh=DeviceMesh.from_group(dist.group.WORLD, device),
        config={
            "train_micro_batch_size_per_gpu": job.batch,
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY},
            },
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 3},
            "compile": {"strict": True, **compiling},
        },
    )

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        with Recorder() as recorder:
            loss = engine(tokens, targets)
            engine.backward(loss)
            engine.step()
        for event in recorder.events:
            if isinstance(event, PlanCompared):
                facts.update(
                    predicted_peak_bytes=event.predicted_peak_bytes,
                    measured_peak_bytes=event.measured_peak_bytes,
                    predicted_s=event.predicted_seconds,
                    measured_s=event.measured_seconds,
                )
        return loss.detach()

    def weights() -> Iterable[Tensor]:
        return map(torchloom.shard.local_shard, engine.module.parameters())

    return step, weights, engine.compile


def _plain(job: Job, place: torch.device, backend: str) -> tuple[Step, Weights, Callable[[], None]]:
    model = job.model().to(place)
    compiled = torch.compile(model, backend=backend)

    def forward(*batch: Tensor) -> Tensor:
        with torch.autocast(place.type, torch.bfloat16):
            return compiled(*batch)

    return make_step(job, forward, make_optimizer(model)), model.parameters, lambda: None


def _fsdp2(
    job: Job, place: torch.device, backend: str, kind: str
) -> tuple[Step, Weights, Callable[[], None]]:
    model: Any = job.model()
    options: dict[str, Any] = {
        "mesh": DeviceMesh.from_group(dist.group.WORLD, place.type),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }
    if kind == "fsdp2-offload" and place.type == "cuda":
        options["offload_policy"] = CPUOffloadPolicy()
    else:
        model.to(place)
    if kind == "fsdp2-checkpoint":
        checkpoint_blocks(model, 1)
    for block in model.blocks:
        block.compile(backend=backend)
        fully_shard(block, **options)
    fully_shard(model, **options)
    model.cos, model.sin = model.cos.to(place), model.sin.to(place)

    def weights() -> Iterable[Tensor]:
        return (param.to_local() for param in model.parameters())

    return make_step(job, model, make_optimizer(model)), weights, lambda: None


def _digest(tensors: Iterable[Tensor | nn.Parameter]) -> str:
    """Hash the weights: equal for runs that are equal to the bit."""
    found = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        flat = tensor.detach().reshape(-1).cpu()
        found.update(flat.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
