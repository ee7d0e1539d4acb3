"""Hugging Face's Trainer and TRL's trainers on models that torchloom shards and compiles.

    trainer = TorchloomTrainer(model=model, args=TorchloomArguments(..., torchloom="ds_config.json"), ...)

Arguments, callbacks, trackers and checkpoints stay those of the Trainer. Written for transformers 5.23.
"""

from __future__ import annotations

from torchloom.integrations.transformers.arguments import TorchloomArguments, TorchloomOptions
from torchloom.integrations.transformers.trainer import (
    TorchloomMixin,
    TorchloomSeq2SeqTrainer,
    TorchloomTrainer,
    from_pretrained,
)

__all__ = [
    "TorchloomArguments",
    "TorchloomMixin",
    "TorchloomOptions",
    "TorchloomSeq2SeqTrainer",
    "TorchloomTrainer",
    "from_pretrained",
]
