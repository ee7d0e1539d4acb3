"""Runs of Accelerate and of Hugging Face's Trainer inside of ranks that tests made."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

LOOM: dict[str, Any] = {
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 100},
    "compile": {"backend": "aot_eager", "strict": True},
}
"""A configuration for models of a few thousand weights."""


def skip_without(*names: str) -> None:
    """Skip a file of tests where a framework is not installed, without importing the framework.

    Imported, it would stay in the process of all tests: Lightning puts a function of its own in the place
    of `torch.compile`, and each forked rank inherits what frameworks have set up.
    """
    for name in names:
        if find_spec(name) is None:
            pytest.skip(f"{name} is not installed", allow_module_level=True)


def loom(stage: int = 3, **compiling: Any) -> dict[str, Any]:
    """Return `LOOM` at a stage, with other keys of `compile`."""
    zero = {**LOOM["zero_optimization"], "stage": stage}
    return {"zero_optimization": zero, "compile": {**LOOM["compile"], **compiling}}


def tiny_llama(*, tied: bool = False, seed: int = 0) -> Any:
    """Return a decoder of one layer with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


def rows(number: int = 48, length: int = 16) -> list[dict[str, torch.Tensor]]:
    """Return samples of tokens, each its own label."""
    generator = torch.Generator().manual_seed(1)
    return [
        {"input_ids": row, "labels": row}
        for row in torch.randint(0, 64, (number, length), generator=generator)
    ]


@contextlib.contextmanager
def accelerate_alone() -> Iterator[None]:
    """Let Accelerate, whose state is shared by all of a process, start from nothing and leave nothing."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    before = dict(os.environ)

    def forget() -> None:
        AcceleratorState._shared_state.clear()
        GradientState._shared_state.clear()
        PartialState._shared_state.clear()

    forget()
    try:
        yield
    finally:
        forget()
        os.environ.clear()
        os.environ.update(before)


def arguments(folder: Path | str, **changes: Any) -> dict[str, Any]:
    """Return training arguments for a short run on the CPU that says little."""
    common: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 12,
        "per_device_train_batch_size": 2,
        "max_grad_norm": 0.5,
        "learning_rate": 1e-2,
        "use_cpu": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": 3,
        "log_level": "error",
    }
    return {**common, **changes}


def curve(trainer: Any, key: str) -> list[float]:
    """Return what a Trainer logged under a name, in the order of the steps."""
    return [row[key] for row in trainer.state.log_history if key in row]


def assert_same_run(
    found: Mapping[str, list[float]], expected: Mapping[str, list[float]], rtol: float = 1e-6
) -> None:
    """Compare losses by `rtol` and norms by ten times that."""
    torch.testing.assert_close(found["loss"], expected["loss"], rtol=rtol, atol=0)
    torch.testing.assert_close(found["grad_norm"], expected["grad_norm"], rtol=10 * rtol, atol=0)
