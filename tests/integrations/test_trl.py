"""TRL's trainers with the mixin: the losses and norms of their own DDP runs."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.frameworks import (
    LOOM,
    accelerate_alone,
    arguments,
    assert_same_run,
    curve,
    skip_without,
    tiny_llama,
)
from support.pool import run_ranks

skip_without("trl")


NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven"]


def tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", *NAMES]
    made = Tokenizer(WordLevel({word: at for at, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = WhitespaceSplit()
    tokens = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **tokens)


def sentences(number: int = 48) -> list[str]:
    """Return lines of different lengths."""
    return [" ".join(NAMES[(at * step) % 8] for step in range(3 + at % 5)) for at in range(number)]


def tune(kind: str, folder: Path, *, sharded: bool, **changes: Any) -> dict[str, list[float]]:
    """Train with one of TRL's trainers, with torchloom or with DDP."""
    import trl
    from datasets import Dataset, disable_progress_bars

    from torchloom.integrations.transformers import TorchloomMixin, TorchloomOptions

    disable_progress_bars()
    trainer_class, config_class = getattr(trl, f"{kind}Trainer"), getattr(trl, f"{kind}Config")
    extra: dict[str, Any] = {}
    if sharded:

        class Tuner(TorchloomMixin, trainer_class):
            pass

        @dataclass
        class Options(TorchloomOptions, config_class):
            pass

        trainer_class, config_class, extra = Tuner, Options, {"torchloom": LOOM}
    lines = sentences()
    data = {"text": lines}
    models = {"model": tiny_llama()}
    if kind == "DPO":
        models["ref_model"] = tiny_llama(seed=1)
        data = {"prompt": lines, "chosen": [f" {NAMES[1]}"] * 48, "rejected": [f" {NAMES[2]}"] * 48}
    with accelerate_alone(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = trainer_class(
            **models,
            args=config_class(**{**arguments(folder, bf16=False), **extra, **changes}),
            train_dataset=Dataset.from_dict(data),
            processing_class=tokenizer(),
        )
        trainer.train()
        fallbacks = []
        if sharded:
            fallbacks = [graph.fallback for graph in trainer.compile_session.report.graphs]
        assert not any(fallbacks), fallbacks
        return {name: curve(trainer, name) for name in ("loss", "grad_norm")}


@pytest.mark.parametrize("kind", ["SFT", "DPO"])
def test_a_run_equals_ddp(tmp_path, kind) -> None:
    def run(rank: int) -> Any:
        return [
            tune(kind, tmp_path / str(sharded), sharded=sharded, max_steps=6)
            for sharded in (False, True)
        ]

    expected, found = run_ranks(2, run, timeout_s=420)[0]  # compiles for three sizes, cold
    assert len(found["loss"]) == 6
    assert_same_run(found, expected, rtol=2e-6)
