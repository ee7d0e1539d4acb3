"""Fine-tune with TRL's SFTTrainer: the same lines as with DistributedDataParallel, and two that name torchloom.

    python examples/train_trl.py
    python -m torch.distributed.run --nproc-per-node 2 examples/train_trl.py
    python -m torch.distributed.run --nproc-per-node 2 examples/train_trl.py --lora

The model, the tokenizer and the data are made here, so that nothing is downloaded. With `--lora` the model is
frozen and adapters of PEFT are trained; what is saved is the adapters alone.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from torchloom.integrations.transformers import TorchloomMixin, TorchloomOptions

DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


class Tuner(TorchloomMixin, SFTTrainer):
    """An SFTTrainer that shards and compiles: one line."""


@dataclass
class Arguments(TorchloomOptions, SFTConfig):
    """The arguments of SFT with the field `torchloom`: the other line."""


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of a few words."""
    words = ["<pad>", "<eos>", "<unk>", "plus", "is", *DIGITS]
    made = Tokenizer(WordLevel({word: at for at, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def sums(number: int) -> Dataset:
    """Return sentences such as "two plus three is five"."""
    chance = random.Random(0)
    pairs = [(chance.randrange(5), chance.randrange(5)) for _ in range(number)]
    lines = [f"{DIGITS[a]} plus {DIGITS[b]} is {DIGITS[a + b]}" for a, b in pairs]
    return Dataset.from_dict({"text": lines})


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=15,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    args = Arguments(
        output_dir=str(options.out),
        torchloom={
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 1000},
            "compile": {"backend": options.backend},
        },
        max_steps=options.steps,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        use_cpu=not torch.cuda.is_available(),
        bf16=options.bf16,
        logging_steps=10,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
    )
    trainer = Tuner(
        model=LlamaForCausalLM(config),
        args=args,
        train_dataset=sums(400),
        eval_dataset=sums(20),
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=8, target_modules=["q_proj", "v_proj"]) if options.lora else None,
    )
    trainer.train()
    found = trainer.evaluate()
    trainer.save_model()  # all ranks call
    session = trainer.compile_session
    if trainer.is_world_process_zero() and session is not None:
        print(f"loss {found['eval_loss']:.3f}, accuracy {found['eval_mean_token_accuracy']:.2f}")
        for graph in session.report.graphs:
            print(f"{graph.name}: {graph.fallback or graph.collectives or 'one rank alone'}")
    if dist.is_initialized():
        dist.destroy_process_group()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, default=Path("runs/trl"))
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--bf16", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
