"""Default sizes of transfers: a layer, as FSDP2 holds them, at sizes of toys and of real models."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn

from support.graphs import apply, captured, copy_of
from torchloom.config import load_config
from torchloom.costs import NETWORKS, Network
from torchloom.memory import micro_step
from torchloom.passes import PASSES
from torchloom.pipeline.registry import derived_options, joined_options
from torchloom.recipes.train.model import Llama, LlamaConfig
from torchloom.shard import Layout, Precision, plan_layout

GLOO, NVLINK = NETWORKS["gloo"], NETWORKS["nvlink"]
MIB = 1 << 20


def layout_of(
    model: nn.Module, world_size: int = 2, threshold: int = 4000, **precision: Any
) -> Layout:
    return plan_layout(
        model,
        stage=3,
        world_size=world_size,
        rank=0,
        handle=f"{world_size}x1#0",
        persistence_threshold=threshold,
        precision=Precision(**precision),
    )


def sizes(layout: Layout, network: Network, **settings: int) -> list[Any]:
    config = load_config({"zero_optimization": {"stage": 3, **settings}})
    derived = derived_options(layout, "inductor", network)
    found = joined_options(derived, config.compile.pass_options)
    bucket = PASSES["bucket"].with_options(**found.get("bucket", {}))
    prefetch = PASSES["prefetch"].with_options(**found.get("prefetch", {}))
    return [*map(bucket.option, ("gather_bytes", "reduce_bytes")), prefetch.option("max_bytes")]


def linears(*dims: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(dims)))


class Stages(nn.Module):
    """Stages of unequal width, each of equal blocks of which every one has numbered parts."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4000, 256)
        self.stages = nn.ModuleList(
            nn.ModuleList(linears(dim, 4 * dim, dim) for _ in range(3)) for dim in (128, 256)
        )


def test_a_bucket_is_a_layer_and_what_is_written_stands() -> None:
    with torch.device("meta"):
        real = Llama(
            LlamaConfig(
                vocab_size=128_256,
                dim=4096,
                num_layers=4,
                num_heads=32,
                num_kv_heads=8,
                hidden_dim=14_336,
                max_seq_len=16,
            )
        )
        stages, plain = Stages(), linears(512, 2048, 128)
        tiny = nn.ModuleList(linears(64, 64, 64) for _ in range(20))
    layer = 2 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14_336)
    at_scale = layout_of(real, 64, 100_000, compute=torch.bfloat16)
    assert sizes(at_scale, NVLINK) == [layer, layer, 2 * layer]
    assert sizes(at_scale, GLOO) == [16 * MIB] * 3
    # The largest block of a stage; the table and whole stages are larger.
    assert sizes(layout_of(stages), GLOO) == [2 * MIB] * 3
    assert sizes(layout_of(plain), GLOO) == [4 * MIB] * 3  # no layer repeats: the largest module
    # Of layers of 32 KiB, as many as gloo sends within the 120 us of a message.
    assert sizes(layout_of(tiny), GLOO) == [4 * 32 * 1024] * 3
    plain.requires_grad_(False)
    assert sizes(layout_of(plain), GLOO) == [4 * MIB, 0, 4 * MIB]
    assert sizes(
        layout_of(stages),
        NVLINK,
        allgather_bucket_size=5,
        reduce_bucket_size=0,
        stage3_prefetch_bucket_size=7,
    ) == [20, 0, 28]
    assert sizes(layout_of(stages), NVLINK, allgather_bucket_size=5) == [20, 2 * MIB, 4 * MIB]
    nothing = plan_layout(linears(8, 8), stage=1, world_size=2, rank=0, handle="2x1#0")
    assert sizes(nothing, GLOO) == [16 * MIB] * 3


def test_the_peak_without_a_budget_is_not_above_that_of_fsdp2() -> None:
    config = LlamaConfig(
        vocab_size=128, dim=256, num_layers=6, num_heads=2, hidden_dim=768, max_seq_len=8
    )
    model, ids = Llama(config), torch.zeros(1, 8, dtype=torch.long)
    layer_bytes = sum(p.nbytes for p in model.layers[0].parameters() if p.dim() > 1)
    around_bytes = sum(p.nbytes for p in (model.embedding.weight, model.head.weight))
    layout = layout_of(model)
    found = captured(model, (ids, ids), ["zero3"], threshold=4000)

    def peak_of(network: Network, *names: str) -> int:
        graphs = [copy_of(found[kind]) for kind in ("forward", "backward")]
        for gm in graphs:
            options = derived_options(layout, "inductor", network)
            apply(gm, ["place", *names], options=options)
        return micro_step(graphs[0].graph, graphs[1].graph).peak_bytes

    # A block in use and one on its way, gradients of one and the copy that is sent. What is not in a block stays.
    least_bytes = peak_of(GLOO)
    fsdp2_bytes = least_bytes + 4 * layer_bytes + around_bytes
    for network in (GLOO, NVLINK):
        assert least_bytes < peak_of(network, "bucket", "prefetch") <= fsdp2_bytes
