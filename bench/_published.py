"""Published training runs: ZeRO-3 or FSDP without tensor or pipeline parallelism, tokens per second of each GPU.

Sources
    T1  pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md
    T2  pytorch/torchtitan, docs/performance.md, states of 2024, Llama 3; T3 the same, Llama 2
    M1  mosaicml/llm-foundry, scripts/train/benchmarking/README.md, tables in BF16
    F1  foundation-model-stack/fms-fsdp, README.md
    K1  KempnerInstitute/KempnerForge, benchmarks/mfu_scaling/mfu_scaling.md
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Published:
    """One run as it was published."""

    source: str
    model: str
    ranks: int
    device: str
    seq_len: int
    micro_batch: int
    accumulation: int
    checkpointing: str
    tokens_per_s: float
    eager: bool
    """Whether elementwise operators ran one by one."""
    peak_gib: float | None = None
    """Reserved by the allocator; see `fsdp2_keeps_gib`."""
    fitted: bool = False
    """Whether a rate of a device or network was chosen by it; the others only check."""
    shard_size: int | None = None
    """Ranks that share one copy of the weights (hybrid sharding)."""

    @property
    def network(self) -> str:
        """Return the network by the name that `torchloom plan simulate` takes."""
        if self.ranks <= 8:
            return "nvlink"
        return "nvlink+eth200" if self.device.startswith("a100") else "nvlink+ib400"


_A, _H, _HT, _K = "a100-80gb", "h100-80gb", "h100-96gb", "h200-141gb"
RUNS = (
    Published("T1", "llama-8b", 8, _HT, 8192, 2, 1, "selective", 5762, True, 82.4, fitted=True),
    Published("T1", "llama-8b", 8, _HT, 8192, 2, 1, "selective", 6667, False, 77.0),
    Published("T1", "llama-8b", 128, _HT, 8192, 2, 1, "selective", 5605, True, 67.0),
    Published("T1", "llama-8b", 128, _HT, 8192, 2, 1, "selective", 6514, False, 62.0),
    Published("T2", "llama-8b", 64, _A, 8192, 1, 1, "layers", 2904, False),
    Published("T2", "llama-70b", 64, _A, 8192, 1, 1, "full", 331, False),
    Published("M1", "mpt-7b", 8, _H, 2048, 6, 1, "none", 10643, True, fitted=True),
    Published("M1", "mpt-13b", 8, _H, 2048, 2, 1, "none", 4792, True, fitted=True),
    Published("M1", "mpt-13b", 16, _H, 2048, 2, 1, "none", 4767, True),
    Published("M1", "mpt-13b", 64, _H, 2048, 2, 1, "none", 4800, True),
    Published("M1", "mpt-70b", 32, _H, 2048, 2, 16, "full", 882, True),
    Published("M1", "mpt-70b", 64, _H, 2048, 8, 4, "full", 1039, True, fitted=True),
    Published("M1", "mpt-7b", 8, _A, 2048, 6, 2, "none", 4641, True, fitted=True),
    Published("M1", "mpt-70b", 64, _A, 2048, 8, 4, "full", 410, True, fitted=True),
    Published("F1", "llama-2-7b", 128, _A, 4096, 2, 1, "none", 3760, False, shard_size=8),
    Published("F1", "llama-2-70b", 128, _A, 4096, 6, 1, "full", 380, False),
    Published("K1", "llama-8b", 1, _K, 4096, 4, 2, "full", 10471, False, fitted=True),
    Published("K1", "llama-8b", 2, _K, 4096, 4, 2, "full", 9364, False),
    Published("T3", "llama-2-13b", 64, _A, 4096, 2, 1, "none", 2162, False),
    Published("T3", "llama-2-13b", 64, _A, 4096, 2, 1, "layers", 1914, False),
)


def fsdp2_keeps_gib(run: Published, num_params: int) -> dict[str, float]:
    """Return what torchtitan's FSDP2 reserves beside the tensors of a Llama-3 8B step that torchloom counts, in GiB.

    Reserved memory holds one pool for each stream, and FSDP2 has streams of its own (torch/distributed/fsdp/
    _fully_shard/_fsdp_collectives.py). That gradients are in it although they are not there at the peak shows between the
    rows of 8 and of 128 ranks: 15.0 and 15.4 GiB less, where weights and states alone are 10.5 and gradients 3.5.
    """
    tokens, dim, layers, vocab = run.seq_len * run.micro_batch, 4096, 32, 128_256
    found = {
        "gradients, in the pool of the stream that reduces": 4 * num_params / run.ranks,
        "the root's embedding, gathered throughout": 2 * vocab * dim,
        "the last layer, gathered throughout": 2 * 218_112_000,
        "logits in bf16, a hole that logits in fp32 do not fit": 2 * tokens * vocab,
    }
    if (
        run.eager
    ):  # what checkpointing is told to save it saves, needed or not: the last product of each layer
        found["results of w2"] = 2 * tokens * dim * layers
    return {what: size / 2**30 for what, size in found.items()}
