"""DeepCompile's adaptive prefetch, written as a user's pass.

The pass goes through the graph backwards. It adds gathers to a group while one message for the group is
cheaper than two messages. A group starts at the head of the graph, or later if memory requires it. The
waits stay where the weights are read.

    before   start a, wait a, use a, start b, wait b, use b
    after    start a and b, wait a and b, use a, use b         where the budget allows it

From step 2 on the example runs with the pass, first with a large and then with a small memory budget. It
shows that gathers are merged and moved, and that losses stay equal. Start two ranks: with one rank nothing
is gathered.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn

import torchloom
from torchloom import PassContract, ops
from torchloom.costs import CostTable, collective_us
from torchloom.graph import move_before
from torchloom.ops.match import gathers, merge

MAX_FUSED_BYTES, MAX_WAITING_BYTES, GAIN = 1e9, 4e9, 1.2


def adaptive_prefetch(graph, graph_id, profiling_results, mem_budget, bwd):
    """Start gathers as early as memory permits, in groups that pay."""
    profile, transfers = profiling_results[graph_id], gathers(graph)
    peak = {name: most for name, _, _, most in (profile.bwd_mem if bwd else profile.fwd_mem)}
    parts = {node for each in transfers for node in (each.start, each.wait, *each.results)}
    by_start = {each.start: each for each in transfers}
    nodes = [node for node in graph.nodes if node.op != "placeholder"]
    waiting, placed = [], []  # groups from the last to the first in the graph; the newest is open
    anchor = nodes[-1]  # the node before which a group can start
    for node, earlier in zip(nodes[::-1], [*nodes[-2::-1], nodes[0]], strict=True):
        anchor = anchor if node in parts else node
        if node in by_start:
            if not (waiting and joins(waiting[-1], by_start[node])):
                waiting.append([])
            waiting[-1].append(by_start[node])
        while waiting and not fits(sum(map(size, waiting)), peak[earlier.name], mem_budget):
            placed.append((waiting.pop(0), anchor))
    head = next(node for node in nodes if node not in parts)
    for members, before in placed + [(members, head) for members in waiting]:
        issued = merge(graph, members[::-1], before)
        readers = {user for pick in issued.results for user in pick.users} - {issued.wait}
        move_before([issued.wait], next(node for node in graph.nodes if node in readers))
    return graph


def joins(group, new):
    """Say whether a gather travels better with a group than alone."""
    alone, together = max(time_us(size(group)), time_us(size([new]))), size([*group, new])
    is_alike = group[0].family == new.family
    return is_alike and alone * GAIN > time_us(together) and together < MAX_FUSED_BYTES


def fits(waiting_bytes, peak_bytes, mem_budget):
    return waiting_bytes <= MAX_WAITING_BYTES and peak_bytes + waiting_bytes <= mem_budget


def size(group):
    return sum(each.result_bytes for each in group)


def time_us(num_bytes):
    return collective_us("all_gather", num_bytes, dist.get_world_size(), CostTable())


def train(options: argparse.Namespace, budget: int | None = None):
    """Train a fresh model, with the pass from step 2 on if there is a budget."""
    torch.manual_seed(0)
    dim = options.dim
    layers = [nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, dim)]
    config = {"train_micro_batch_size_per_gpu": 16, "optimizer": {"type": "AdamW"}}
    config["zero_optimization"] = {"stage": 3, "stage3_param_persistence_threshold": 1000}
    config["compile"] = {"disable_passes": ["bucket"]}  # the pass merges by itself
    engine, *_ = torchloom.initialize(model=nn.Sequential(*layers), config=config)
    contract = PassContract(requires={"transfers"})
    engine.register_compile_pass("adaptive_prefetch", adaptive_prefetch, contract)
    later = ["zero3_compile", *([("adaptive_prefetch", budget)] if budget else [])]
    schedule = [(0, ["zero3_compile"]), (2, later)]
    engine.compile(backend=options.backend, schedule=schedule)
    generator = torch.Generator().manual_seed(engine.rank)
    losses = []
    for _ in range(4):
        x = torch.randn(16, dim, generator=generator)
        loss = (engine(x) - x).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    calls = engine.compile_report().graphs[-1].collectives
    starts = [calls[f"{kind} {str(ops.gather_start)[:-8]}"] for kind in ("forward", "backward")]
    return losses, starts


def main() -> None:
    parser = argparse.ArgumentParser(description="Prefetch by a pass of your own.")
    parser.add_argument("--dim", type=int, default=64, help="width of the model")
    parser.add_argument("--backend", default="aot_eager", help="any torch.compile backend")
    options = parser.parse_args()
    torch.set_num_threads(1)
    plain, starts = train(options)
    for title, budget in (("ample", 1 << 30), ("scarce", 1)):
        losses, fewer = train(options, budget)
        if dist.get_rank() == 0:
            print(f"{title} memory: gathers {starts} -> {fewer}, losses equal: {losses == plain}")


if __name__ == "__main__":
    main()
