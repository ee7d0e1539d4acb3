"""Draw the woven forward graph of two layers, with gathers beside compute, for the docs.

    python -m torch.distributed.run --nproc-per-node 2 tools/woven_picture.py

Rank 0 writes `docs/_static/woven.svg` from the graph that `compile.dump_graphs` shows after the last pass.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

import torchloom

PICTURE = Path(__file__).parents[1] / "docs" / "_static" / "woven.svg"
STEP, LEFT, BAR = 62, 92, 26
NETWORK_Y, COMPUTE_Y = 58, 176
HIDDEN = {"getitem", "view", "t"}
"""Operators that compute nothing."""
STYLE = (
    "text{fill:#222;font:12px system-ui,'DejaVu Sans',sans-serif}.g{fill:#56B4E9}.c{fill:#E69F00}.w{stroke:#D55E00}"
    ".b{fill:#111}@media(prefers-color-scheme:dark){text{fill:#E3E6E9}.b{fill:#111}}"
)


class Block(nn.Module):
    """A residual layer of two products."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        """Return the input plus what the layer adds."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def weave(folder: Path) -> int:
    """Train one step with graphs written to a folder; return the rank.

    Args:
        folder: for the graphs.
    """
    zero = {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_prefetch_bucket_size": 40_000,
        "allgather_bucket_size": 17_000,
    }
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": zero,
        "compile": {"enabled": True, "backend": "aot_eager", "dump_graphs": str(folder)},
    }
    engine, *_ = torchloom.initialize(model=nn.Sequential(Block(), Block()), config=config)
    engine.backward(engine(torch.randn(4, 64, device=engine.device)).square().mean())
    engine.step()
    rank = engine.rank
    engine.destroy()
    return rank


def draw(graph: str) -> str:
    """Return the picture: gathers from start to wait above, operators below, in the order of nodes.

    Args:
        graph: the text of a woven forward graph.
    """
    column = 0
    begun: dict[str, tuple[int, list[str]]] = {}
    gathers: list[tuple[int, int, list[str]]] = []
    boxes: list[tuple[int, str]] = []
    for name, operator, operands in re.findall(r"^%(\w+).*? = ([\w.]+)\((.*)\)", graph, re.M):
        short = operator.removeprefix("aten.").removeprefix("torchloom.").split(".")[0]
        if short == "gather_start":
            weights = re.findall(r"'([\w.]+)'", operands)
            begun[name] = (column, [each[:-7] for each in weights if each.endswith(".weight")])
        elif short == "wait_":
            start, weights = begun.pop(next(iter(begun)))
            column += 2 * (start == column)  # nothing runs beside it
            gathers.append((start, column, weights))
        elif short not in HIDDEN and not operator.endswith("placeholder"):
            boxes.append((column, short.removeprefix("native_")))
            column += 1
    width = LEFT + column * STEP + 12
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} 222" width="{width}" height="222" role="img">',
        f"<title>A woven forward graph: gathers run beside compute</title><style>{STYLE}</style>",
        f'<text x="4" y="{NETWORK_Y + 18}">network</text><text x="4" y="{COMPUTE_Y + 18}">compute</text>',
        '<text x="4" y="22">Forward of two layers, woven: each gather starts ahead of the code that waits for it</text>',
    ]
    for at, (start, end, weights) in enumerate(gathers):
        x, y = LEFT + start * STEP + 3, NETWORK_Y + (at % 3) * (BAR + 8) - 18
        wide = (end - start) * STEP - 6
        parts.append(f'<rect class="g" x="{x}" y="{y}" width="{wide}" height="{BAR}" rx="3"/>')
        parts.append(
            f'<path class="w" d="M{x + wide} {y}V{COMPUTE_Y}" stroke-width="2" stroke-dasharray="3 3"/>'
        )
        parts.append(f'<text class="b" x="{x + 4}" y="{y + 17}">{", ".join(weights)}</text>')
    for at, short in boxes:
        x = LEFT + at * STEP
        parts.append(
            f'<rect class="c" x="{x + 3}" y="{COMPUTE_Y}" width="{STEP - 6}" height="{BAR}" rx="3"/>'
        )
        label = {"layer_norm": "norm"}.get(short, short)
        parts.append(f'<text class="b" x="{x + 7}" y="{COMPUTE_Y + 17}">{label}</text>')
    return "\n".join([*parts, "</svg>"])


def main() -> None:
    """Write the picture."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if weave(folder) == 0:
            last = max(folder.glob("*.forward.*.prefetch.txt"))
            PICTURE.write_text(draw(last.read_text()), encoding="utf-8")


if __name__ == "__main__":
    main()
