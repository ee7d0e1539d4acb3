"""A graph pass of one's own: keep the last weight of the forward pass for the backward pass.

    torchrun --nproc-per-node 2 examples/custom_pass.py
    torchrun --nproc-per-node 8 examples/custom_pass.py --dim 4096 --steps 100 --backend inductor

Stage 3 gathers each weight again in backward. The weight that forward gathers last is the first that backward needs:
it would be released and at once gathered again. The pass marks it as saved, which costs its memory and spares a gather.

    before   w = gather(p)  # MUST_RECOMPUTE     forward and backward gather
    after    w = gather(p)  # MUST_SAVE          only forward gathers

Prints the gathers without and with the pass, and that losses are equal. It leaves out buckets, so that each gather is
a node. With one rank nothing is gathered.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.utils.checkpoint import CheckpointPolicy

import torchloom
from torchloom import GraphPass, PassContext, ops
from torchloom.graph import find


def keep_last(gm: fx.GraphModule, ctx: PassContext) -> int:
    """Tag the last gather of the joint graph as one whose result is saved; return the number of edits."""
    gathers = find(gm.graph, ops.gather)
    for node in gathers[-1:]:
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return len(gathers[-1:])


# It changes the tags that `zero3` writes, so it must run after it: `zero3` provides "zero".
KEEP_LAST = GraphPass(name="keep_last", fn=keep_last, stage="joint", requires=frozenset({"zero"}))


def train(own: list[GraphPass], options: argparse.Namespace) -> tuple[list[float], dict[str, int]]:
    """Train a fresh model with these passes; return its losses and the collectives of its graph."""
    torch.manual_seed(0)
    dim = options.dim
    layers = [nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, dim)]
    model = torchloom.shard_model(nn.Sequential(*layers), stage=3, persistence_threshold=1000)
    passes = ["dedupe_gathers", "elide_copies", "zero3", *own, "place", "prefetch"]
    session = torchloom.compile(model, backend=options.backend, passes=passes, strict=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(options.steps):
        x = torch.randn(16, dim, generator=data).to(next(model.parameters()).device)
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, dict(session.report.graphs[0].collectives)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile with a graph pass of your own.")
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps")
    parser.add_argument("--dim", type=int, default=64, help="width of the model")
    parser.add_argument("--backend", default="aot_eager", help="any torch.compile backend")
    options = parser.parse_args()
    losses, without = train([], options)
    same, kept = train([KEEP_LAST], options)
    if dist.get_rank() == 0:
        for name in without:
            print(f"{name}: {without[name]} -> {kept[name]}")
        print(f"losses are equal: {losses == same}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
