"""One configuration on one device, in a process of its own: seconds, peak, losses, as a JSON line.

Started by run.py with a JSON object as its only argument.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from _data import batches, read_corpus
from _model import Shape, build_model
from arms.activations import checkpoint_blocks
from arms.base import LEARNING_RATE, WEIGHT_DECAY, Job, Step, make_optimizer, make_step

LOOM: dict[str, dict[str, Any]] = {
    "loom": {},
    "loom-states": {"offload_opt_states": True},
    "loom-states-activations": {"offload_opt_states": True, "offload_activation": True},
    "loom-states-params": {"offload_opt_states": True, "offload_parameters": True},
    "loom-budget": {"memory_budget": 0.5},
    "loom-budget-offload": {"memory_budget": 0.35, "offload_activation": True},
}
FSDP = ("fsdp2", "fsdp2-checkpoint", "fsdp2-cpu-offload")


def main() -> None:
    """Run one configuration."""
    spec = json.loads(sys.argv[1])
    device = torch.device(spec["device"])
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29533")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", rank=0, world_size=1)
    shape = Shape(**spec["shape"])
    model = build_model(shape)
    step, weights = _loom(spec, model) if spec["arm"] in LOOM else _fsdp2(spec, model, device)
    data = batches(read_corpus(), batch=spec["batch"], seq_len=shape.seq_len, rank=0)
    losses, seconds = [], []
    started = time.perf_counter()
    first_s = 0.0
    for index in range(spec["warmup"] + spec["steps"]):
        tokens, targets = (each.to(device) for each in next(data))
        if index == spec["warmup"] and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        begun = time.perf_counter()
        losses.append(step(tokens, targets).item())
        seconds.append(time.perf_counter() - begun)
        first_s = first_s or time.perf_counter() - started
    print(
        json.dumps(
            {
                "arm": spec["arm"],
                "step_s": statistics.median(seconds[spec["warmup"] :]),
                "first_step_s": first_s,
                "peak_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
                "losses": losses,
                "weights": _digest(weights()),
                "num_params": sum(p.numel() for p in model.parameters()),
            }
        )
    )


def _loom(spec: dict[str, Any], model: nn.Module) -> tuple[Step, Callable[[], list[Tensor]]]:
    import torchloom

    engine, *_ = torchloom.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": spec["batch"],
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY},
            },
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 3},
            "compile": {"backend": spec["backend"], "strict": True, **LOOM[spec["arm"]]},
        },
    )
    engine.compile()

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step, lambda: [param.detach() for param in engine.module.parameters()]


def _fsdp2(
    spec: dict[str, Any], model: nn.Module, device: torch.device
) -> tuple[Step, Callable[[], list[Tensor]]]:
    mesh = init_device_mesh(device.type, (1,))
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }
    if spec["arm"] == "fsdp2-cpu-offload" and device.type == "cuda":
        options["offload_policy"] = CPUOffloadPolicy()
    else:
        model.to(device)
    if spec["arm"] == "fsdp2-checkpoint":
        checkpoint_blocks(model, 1)
    for block in model.blocks:
        if spec["backend"] == "inductor":
            block.compile()
        fully_shard(block, **options)
    fully_shard(model, **options)
    model.cos, model.sin = model.cos.to(device), model.sin.to(device)
    job = Job(model=lambda: model, rank=0, world_size=1, batch=spec["batch"])
    return make_step(job, model, make_optimizer(model)), lambda: [
        param.to_local().detach() for param in model.parameters()
    ]


def _digest(tensors: list[Tensor]) -> str:
    """Hash the weights: equal for runs that are equal to the bit."""
    found = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        flat = tensor.reshape(-1).cpu()
        found.update(flat.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    main()
