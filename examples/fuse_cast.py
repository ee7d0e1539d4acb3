"""A pass that moves a cast before the gather, so that the smaller type is sent.

    before   w = gather(p, f32)   c = cast(w, bf16)    4 bytes per element travel
    after    c = gather(p, bf16)                       each rank casts its shard: 2 bytes

It is a simple form of the built-in pass `cast_gathers`, which also handles views and several readers. The
example trains under autocast without and with the pass, and shows that fewer bytes are sent and that losses
stay equal, because each element is cast by itself, before or after it is sent. Start two ranks: with one rank
nothing is gathered.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import fx, nn

import torchloom
from torchloom import GraphPass, PassContext, ops
from torchloom.graph import args_of, call, find, replace, value_of

CASTS = (torch.ops.aten._to_copy.default, torch.ops.prims.convert_element_type.default)


def fuse_cast(gm: fx.GraphModule, ctx: PassContext) -> int:
    """Gather in the type that the weight's only reader casts to; return how many."""
    num_fused = 0
    for node in find(gm.graph, ops.gather):
        reader = next(iter(node.users), None)
        if len(node.users) != 1 or reader is None or reader.target not in CASTS:
            continue
        dtype = value_of(reader).dtype
        if dtype.itemsize >= value_of(node).dtype.itemsize:
            continue
        shard, shape, _, *rest = args_of(node)
        with gm.graph.inserting_before(node):
            fused = call(gm.graph, ops.gather, (shard, shape, dtype, *rest))
        replace(reader, fused)
        gm.graph.erase_node(node)
        num_fused += 1
    return num_fused


# Before `zero3`, which tags what is gathered; on the joint graph, so both gathers shrink.
FUSE_CAST = GraphPass(name="fuse_cast", fn=fuse_cast, stage="joint")
PASSES = ("dedupe_gathers", "elide_copies", "zero3", "place", "bucket", "prefetch")


def train(options: argparse.Namespace, *own: GraphPass) -> tuple[list[float], int]:
    """Train a fresh model under autocast; return its losses and the bytes that have travelled."""
    torch.manual_seed(0)
    dim = options.dim
    layers = [nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, dim)]
    config = {"train_micro_batch_size_per_gpu": 16, "optimizer": {"type": "AdamW"}}
    config["zero_optimization"] = {"stage": 3, "stage3_param_persistence_threshold": 1000}
    engine, *_ = torchloom.initialize(model=nn.Sequential(*layers), config=config)
    engine.compile(backend=options.backend, passes=[*PASSES[:2], *own, *PASSES[2:]])
    generator = torch.Generator().manual_seed(engine.rank)
    losses, before = [], engine.comm_stats().num_bytes
    for _ in range(4):
        x = torch.randn(16, dim, generator=generator)
        with torch.autocast("cpu", torch.bfloat16):
            loss = (engine(x) - x).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, engine.comm_stats().num_bytes - before


def main() -> None:
    parser = argparse.ArgumentParser(description="Fuse casts into gathers.")
    parser.add_argument("--dim", type=int, default=64, help="width of the model")
    parser.add_argument("--backend", default="aot_eager", help="any torch.compile backend")
    options = parser.parse_args()
    torch.set_num_threads(1)
    plain, usual = train(options)
    losses, fewer = train(options, FUSE_CAST)
    if dist.get_rank() == 0:
        print(f"bytes {usual} -> {fewer}, losses equal: {losses == plain}")


if __name__ == "__main__":
    main()
