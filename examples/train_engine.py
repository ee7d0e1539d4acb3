"""Train a small byte model with the engine: compile, checkpoint, resume, export.

    python examples/train_engine.py
    python -m torch.distributed.run --nproc-per-node 2 examples/train_engine.py
    python examples/train_engine.py --backend inductor --dim 256 --steps 200

Prints the loss, then what was compiled. A second run with the same `--out` and `--resume`
continues where the first one stopped, also on another number of ranks.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import torchloom

TEXT = Path(__file__).read_bytes()


class ByteModel(nn.Module):
    """Predicts the next byte from the four bytes before it."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, dim)
        self.up = nn.Linear(4 * dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)
        self.head = nn.Linear(dim, 256)

    def forward(self, contexts: Tensor, targets: Tensor) -> Tensor:
        hidden = self.embed(contexts).flatten(1)
        logits = self.head(self.down(F.gelu(self.up(hidden))))
        return F.cross_entropy(logits.float(), targets)


def batch(step: int, rank: int, size: int) -> tuple[Tensor, Tensor]:
    """Cut contexts and the bytes after them out of this file, by step and rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    text = torch.frombuffer(bytearray(TEXT), dtype=torch.uint8).long()
    starts = torch.randint(len(text) - 4, (size,), generator=generator)
    return text[starts[:, None] + torch.arange(4)], text[starts + 4]


def settings(options: argparse.Namespace) -> dict[str, object]:
    """Return the config: the same shape as a DeepSpeed JSON file."""
    return {
        "train_micro_batch_size_per_gpu": 64,
        "gradient_accumulation_steps": options.accumulate,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": options.bf16},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
        # The default threshold, 100 000 elements, would leave so small a model whole.
        "zero_optimization": {"stage": options.stage, "stage3_param_persistence_threshold": 1000},
        "steps_per_print": float("inf"),
    }


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    engine, *_ = torchloom.initialize(model=ByteModel(options.dim), config=settings(options))
    engine.compile(backend=options.backend)
    if options.resume:
        path, _state = engine.load_checkpoint(options.out)
        print(f"rank {engine.rank}: continues from {path}")
    while engine.global_steps < options.steps:
        for _ in range(engine.gradient_accumulation_steps()):
            contexts, targets = batch(engine.micro_steps, engine.rank, 64)
            loss = engine(contexts.to(engine.device), targets.to(engine.device))
            engine.backward(loss)
            engine.step()
        if engine.rank == 0 and engine.global_steps % 10 == 0:
            norm = engine.get_global_grad_norm()
            print(
                f"step {engine.global_steps:3d}  loss {loss.item():.3f}  gradient norm {norm:.3f}"
            )
    engine.save_checkpoint(options.out)
    weights = engine.save_16bit_model(options.out)
    if engine.rank == 0:
        for graph in engine.compile_report().graphs:
            print(f"{graph.name}: {graph.num_nodes} nodes, {graph.collectives or 'one rank alone'}")
        print(f"wrote {options.out} and {weights}")
    dist.destroy_process_group()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small byte model with the engine.")
    add = parser.add_argument
    add("--steps", type=int, default=30, help="optimizer steps of the whole run")
    add("--dim", type=int, default=32, help="width of the model")
    add("--stage", type=int, default=3, choices=(0, 1, 2, 3), help="ZeRO stage")
    add("--accumulate", type=int, default=1, help="micro-steps per optimizer step")
    add("--backend", default="aot_eager", help="inductor compiles longer and runs faster")
    add("--bf16", action="store_true", help="compute in bf16, keep weights in fp32")
    add("--out", default=str(Path(tempfile.gettempdir()) / "torchloom-engine"), help="folder")
    add("--resume", action="store_true", help="continue from the newest checkpoint in --out")
    return parser.parse_args()


if __name__ == "__main__":
    main()
