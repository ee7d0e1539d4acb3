"""DeepCompile's selective gather, written as a user's pass.

The weights whose gathers cost the most time per byte stay gathered between steps, as many as fit into the
memory budget beside the peak of a step. With accumulation, such a weight saves two gathers in every
micro-step.

    before   forward: gather, backward: gather       in each of 4 micro-steps
    after    one gather per optimizer step

The example trains without and with the pass, and shows that there are fewer gathers and that losses stay
equal. Start two ranks: with one rank nothing is gathered.
"""

from __future__ import annotations

import argparse
from collections import defaultdict

import torch
import torch.distributed as dist
from torch import nn

import torchloom
from torchloom import PassContract
from torchloom.graph import nbytes
from torchloom.ops.match import gathers


def keep_gathered(graph_id, graph_order, profiling_results, mem_budget, param_manager, bwd, nz3):
    """Keep the weights gathered that save the most time per byte, within the budget."""
    # Decide once, when all graphs are known: in the backward graph that runs last.
    last = next((each for each, needs_backward in graph_order if needs_backward), None)
    profiles = profiling_results.values()
    known = all(p.fwd_mem_complete and p.bwd_mem_complete >= p.needs_backward for p in profiles)
    if not bwd or graph_id != last or not known:
        return
    peak = max(most for p in profiles for _, _, _, most in p.fwd_mem + p.bwd_mem)
    left = mem_budget - peak
    num_bytes: dict[int, int] = {}
    saved_ms: dict[int, float] = defaultdict(float)
    for each, manager in param_manager.items():
        profile = profiling_results[each]
        for graph in filter(None, (profile.fwd_graph, profile.bwd_graph)):
            for transfer in gathers(graph):
                for shard, weight in zip(transfer.inputs, transfer.results, strict=True):
                    ds_id, size = manager.ds_ids[shard.name], nbytes(weight)
                    share = size / transfer.result_bytes
                    num_bytes[ds_id] = size
                    saved_ms[ds_id] += share * transfer.start.meta["device_time"]
    for ds_id in sorted(num_bytes, key=lambda each: -saved_ms[each] / num_bytes[each]):
        left -= num_bytes[ds_id]
        if left < 0:
            break
        nz3.set_persistent(ds_id)


def train(options: argparse.Namespace, budget: int | None = None):
    """Train a fresh model, with the pass if there is a budget; return losses and gathers a step."""
    torch.manual_seed(0)
    dim = options.dim
    layers = [nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, dim)]
    config = {"train_micro_batch_size_per_gpu": 16, "gradient_accumulation_steps": 4}
    config["optimizer"] = {"type": "AdamW"}
    config["zero_optimization"] = {"stage": 3, "stage3_param_persistence_threshold": 1000}
    config["compile"] = {"disable_passes": ["bucket"]}  # weights are kept one by one
    engine, *_ = torchloom.initialize(model=nn.Sequential(*layers), config=config)
    contract = PassContract(requires={"transfers"})
    engine.register_compile_pass("keep_gathered", keep_gathered, contract)
    own = [("keep_gathered", budget)] if budget else []
    engine.compile(backend=options.backend, passes=["zero3_compile", *own])
    generator = torch.Generator().manual_seed(engine.rank)
    losses, gathers_of_step = [], 0
    for _ in range(4 * 4):
        before = engine.comm_stats().num_collectives
        x = torch.randn(16, dim, generator=generator)
        loss = (engine(x) - x).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        gathers_of_step += engine.comm_stats().num_collectives - before
        gathers_of_step *= engine.micro_steps != 12  # count the last optimizer step alone
    held = engine.world.comm.residents.num_bytes
    engine.destroy()
    return losses, gathers_of_step, held


def main() -> None:
    parser = argparse.ArgumentParser(description="Keep weights gathered by a pass of your own.")
    parser.add_argument("--dim", type=int, default=64, help="width of the model")
    parser.add_argument("--backend", default="aot_eager", help="any torch.compile backend")
    options = parser.parse_args()
    torch.set_num_threads(1)
    plain, usual, _ = train(options)
    for title, budget in (("ample", 1 << 30), ("scarce", 210_000), ("none", 1)):
        losses, fewer, held = train(options, budget)
        if dist.get_rank() == 0:
            text = f"collectives per step {usual} -> {fewer}, {held} bytes held"
            print(f"{title} memory: {text}, losses equal: {losses == plain}")


if __name__ == "__main__":
    main()
