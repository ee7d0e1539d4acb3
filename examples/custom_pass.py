"""A user's graph pass: keep the last weight of the forward pass for the backward pass.

    python -m torch.distributed.run --nproc-per-node 2 examples/custom_pass.py

Stage 3 gathers each weight again in backward. The weight that forward gathers last is the one that
backward needs first, so it would be released and immediately gathered again. This pass marks it as
saved. It uses the memory of one weight and saves one gather in each step.

    before   w = gather(p)  # MUST_RECOMPUTE     forward and backward gather
    after    w = gather(p)  # MUST_SAVE          only forward gathers

The example trains twice, without and with the pass, and shows that the losses are equal and that there
is one gather less. It does not use bucketing, so that each gather is a separate node. Start two ranks:
with one rank nothing is gathered.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.utils.checkpoint import CheckpointPolicy

import torchloom
from torchloom import GraphPass, PassContext, ops
from torchloom.graph import find
from torchloom.pipeline import CompileReport


def keep_last(gm: fx.GraphModule, ctx: PassContext) -> int:
    """Tag the last gather of the joint graph as one whose result is saved; return 0 or 1."""
    gathers = find(gm.graph, ops.gather)
    for node in gathers[-1:]:
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return len(gathers[-1:])


# It changes the tags that `zero3` writes, so it must run after it: `zero3` provides "zero".
KEEP_LAST = GraphPass(name="keep_last", fn=keep_last, stage="joint", requires=frozenset({"zero"}))

WITHOUT = ("dedupe_gathers", "elide_copies", "zero3", "place", "prefetch")
WITH = ("dedupe_gathers", "elide_copies", "zero3", KEEP_LAST, "place", "prefetch")


def train(
    passes: tuple[str | GraphPass, ...], options: argparse.Namespace
) -> tuple[list[float], CompileReport]:
    """Train a fresh model with these passes; return its losses and what was compiled."""
    torch.manual_seed(0)
    dim = options.dim
    layers = [nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, dim)]
    model = torchloom.shard_model(nn.Sequential(*layers), stage=3, persistence_threshold=1000)
    session = torchloom.compile(model, backend=options.backend, passes=passes, strict=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(options.steps):
        x = torch.randn(16, dim, generator=generator)
        loss: Tensor = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, session.report


def show(title: str, losses: list[float], report: CompileReport) -> None:
    print(f"{title}: last loss {losses[-1]:.4f}")
    for graph in report.graphs:
        for each in graph.passes:
            print(f"  {each.graph:<18} {each.name:<15} {each.num_edits:2d} edits")
        for op, count in graph.collectives.items():
            print(f"  {op}: {count}")


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    losses, report = train(WITHOUT, options)
    same, kept = train(WITH, options)
    if dist.get_rank() == 0:
        show("without keep_last", losses, report)
        show("with keep_last", same, kept)
        print(f"losses are equal: {losses == same}")
    dist.destroy_process_group()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compile with a graph pass of your own.")
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps")
    parser.add_argument("--dim", type=int, default=64, help="width of the model")
    parser.add_argument("--backend", default="aot_eager", help="any torch.compile backend")
    return parser.parse_args()


if __name__ == "__main__":
    main()
