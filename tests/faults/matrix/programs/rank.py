"""What all programs share: the model, an engine over it, batches, and what a rank tells the runner."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchloom import initialize

NUM_LAYERS = 4


class Branches(nn.Module):
    """Equal layers, of which the caller says which run, in which order."""

    def __init__(self, width: int, num_layers: int = NUM_LAYERS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))

    def forward(self, x: Tensor, order: tuple[int, ...] = (0, 1, 2, 3)) -> Tensor:
        for index in order:
            x = torch.tanh(self.layers[index](x))
        return x.square().mean()


class Rank:
    """This process, as a program sees it.

    Args:
        setup: a `case.Setup` as plain data.
        arguments: of the program.
    """

    def __init__(self, setup: dict[str, Any], arguments: dict[str, Any]) -> None:
        self.setup, self.arguments = setup, arguments
        number = os.environ.get("RANK", "0")
        self.rank = int(number) if number.isdigit() else -1
        self.folder = Path("checkpoints")
        self.engine: Any = None
        self.model: nn.Module = nn.Module()

    def mark(self, what: str = "fault") -> None:
        """Tell the runner that this rank has come to something."""
        with (Path(os.environ["FAULTS_FOLDER"]) / "marks").open("a") as stream:
            stream.write(f"{what} {time.monotonic()}\n")

    def make_model(self) -> nn.Module:
        """Return the model, equal on all ranks."""
        torch.manual_seed(0)
        return Branches(self.setup["width"])

    def config(self) -> dict[str, Any]:
        """Return the configuration of this rank."""
        setup = self.setup
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": setup["accumulation"],
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "zero_optimization": {
                "stage": setup["stage"],
                "stage3_param_persistence_threshold": 0,
            },
            "compile": {"symmetric_memory": setup["shared"]},
            "steps_per_print": float("inf"),
        }
        _merge(config, setup["config"])
        if self.rank == 1:
            _merge(config, setup["config_of_rank_1"])
        return config

    def start(self, backend: str | Callable[..., Any] | None = None, **compile_kwargs: Any) -> Any:
        """Make the engine, compiled if the setup asks for it, and return it."""
        self.model = self.make_model()
        self.engine, *_ = initialize(model=self.model, config=self.config())
        backend = backend or self.setup["backend"]
        if backend:
            self.engine.compile(backend=backend, **compile_kwargs)
        return self.engine

    def batch(self, step: int = 0, rows: int = 2) -> Tensor:
        """Return inputs that depend on rank and step."""
        generator = torch.Generator().manual_seed(1000 * step + self.rank)
        return torch.randn(rows, self.setup["width"], generator=generator)

    def step(self, step: int = 0, order: tuple[int, ...] = (0, 1, 2, 3), rows: int = 2) -> None:
        """Take one micro-step."""
        self.engine.backward(self.engine(self.batch(step, rows), order))
        self.engine.step()

    def finish(self, note: str = "") -> None:
        """Tell the weights that this rank has come to; all ranks must call.

        Args:
            note: more that the ranks must have in common.
        """
        state = self.model.state_dict()
        digest = hashlib.sha256()
        for name in sorted(state):
            digest.update(state[name].contiguous().numpy().tobytes())
        finite = all(bool(value.isfinite().all()) for value in state.values())
        print(f"weights {digest.hexdigest()[:16] if finite else 'nan'}{note}", flush=True)


def _merge(config: dict[str, Any], more: dict[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(config.get(key), dict):
            _merge(config[key], value)
        else:
            config[key] = value
