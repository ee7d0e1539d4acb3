"""Train in your own loop: torchloom shards, compiles and clips; the rest is plain PyTorch.

    python examples/train_native.py
    python -m torch.distributed.run --nproc-per-node 2 examples/train_native.py
    python -m torch.distributed.run --nproc-per-node 2 examples/train_native.py --meta

With `--meta` the model is built on the meta device and initialised module by module, so that no rank
ever holds the whole model.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import torchloom
from torchloom.shard import Precision, full_state_dict, gathered, local_shard, on_meta


class Block(nn.Module):
    """A residual block: norm, up, gelu, down."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def build(dim: int, layers: int) -> nn.Sequential:
    """Return a stack of blocks that maps `dim` numbers to `dim` numbers."""
    return nn.Sequential(*(Block(dim) for _ in range(layers)))


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if options.meta:
        with on_meta():
            model: nn.Module = build(options.dim, options.layers)
    else:
        model = build(options.dim, options.layers)
    precision = Precision(compute=torch.bfloat16) if options.bf16 else None
    torchloom.shard_model(
        model, stage=options.stage, persistence_threshold=1000, precision=precision
    )
    rank = dist.get_rank()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    session = torchloom.compile(model, backend=options.backend)

    generator = torch.Generator().manual_seed(rank)  # each rank has data of its own
    dtype = torch.bfloat16 if options.bf16 else torch.float32
    for step in range(1, options.steps + 1):
        x = torch.randn(32, options.dim, generator=generator)
        loss = F.mse_loss(model(x.to(dtype)).float(), x.flip(1))
        loss.backward()
        norm = torchloom.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 10 == 0:
            print(f"step {step:3d}  loss {loss.item():.3f}  gradient norm {norm.item():.3f}")

    with gathered(model, ["0.up.weight"]):  # all ranks enter
        shape = tuple(model[0].up.weight.shape)
    weights = full_state_dict(model, rank0_only=True, cpu=True)  # all ranks call
    if rank == 0:
        kept = sum(local_shard(p).numel() for p in model.parameters())
        total = sum(weight.numel() for weight in weights.values())
        print(f"0.up.weight is {shape}; this rank kept {kept} of {total} elements")
        for graph in session.report.graphs:
            print(f"{graph.name}: {graph.collectives or 'one rank alone'}")
    dist.destroy_process_group()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small model in a loop of your own.")
    add = parser.add_argument
    add("--steps", type=int, default=30, help="optimizer steps")
    add("--dim", type=int, default=64, help="width of the model")
    add("--layers", type=int, default=3, help="residual blocks")
    add("--stage", type=int, default=3, choices=(0, 2, 3), help="ZeRO stage")
    add("--backend", default="aot_eager", help="inductor compiles longer and runs faster")
    add("--bf16", action="store_true", help="compute in bf16, keep weights in fp32")
    add("--meta", action="store_true", help="build the model on the meta device")
    return parser.parse_args()


if __name__ == "__main__":
    main()
