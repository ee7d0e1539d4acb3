"""Fine-tune with TRL, by SFT or DPO, all weights or adapters: TRL's own lines, and four that name torchloom.

    python examples/tiny_llama.py runs/tiny
    torchrun --nproc-per-node 2 examples/train_trl.py sft --model runs/tiny --data runs/tiny/sums --lr 1e-2 \
        --backend aot_eager
    torchrun --nproc-per-node 2 examples/train_trl.py dpo --model runs/tiny --data runs/tiny/pairs --lr 1e-3 \
        --backend aot_eager
    torchrun --nproc-per-node 8 examples/train_trl.py sft --model Qwen/Qwen3-8B --data trl-lib/Capybara --lora
    torchrun --nproc-per-node 8 examples/train_trl.py dpo --model Qwen/Qwen3-8B \
        --data trl-lib/ultrafeedback_binarized

Prints the loss of the first and the last step, and what was compiled. `--out` then holds the model as `from_pretrained` reads
it, with `--lora` the adapters alone. Needs the extra `trl`.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from torchloom.integrations.transformers import TorchloomMixin, TorchloomOptions, from_pretrained


@dataclass
class SftArguments(TorchloomOptions, SFTConfig):
    """The arguments of SFT with the field `torchloom`."""


@dataclass
class DpoArguments(TorchloomOptions, DPOConfig):
    """The arguments of DPO with the field `torchloom`."""


class Sft(TorchloomMixin, SFTTrainer):
    """An SFTTrainer that shards and compiles."""


class Dpo(TorchloomMixin, DPOTrainer):
    """A DPOTrainer that shards and compiles."""


METHODS = {"sft": (Sft, SftArguments), "dpo": (Dpo, DpoArguments)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tune with TRL.")
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("--model", required=True, help="a folder, or a name on the Hub")
    parser.add_argument("--data", required=True, help="likewise, in TRL's format for the method")
    parser.add_argument("--batch", type=int, default=8, help="samples per rank and step")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
    parser.add_argument("--lr", type=float, default=1e-5, help="learning rate")
    parser.add_argument("--lora", action="store_true", help="train adapters of PEFT")
    parser.add_argument("--backend", default="inductor", help="aot_eager compiles faster")
    parser.add_argument("--out", default="runs/trl", help="folder for the result")
    options = parser.parse_args()

    trainer_class, arguments_class = METHODS[options.method]
    zero = {"stage": 3, "stage3_param_persistence_threshold": "auto"}
    args = arguments_class(
        output_dir=options.out,
        torchloom={"zero_optimization": zero, "compile": {"backend": options.backend}},
        max_steps=options.steps,
        per_device_train_batch_size=options.batch,
        learning_rate=options.lr,
        bf16=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
        gradient_checkpointing=False,  # a `compile.memory_budget` plans what is computed again
        logging_steps=5,
        report_to=[],
        save_strategy="no",
    )
    trainer = trainer_class(
        # Whole on rank 0 alone, empty on the others.
        model=from_pretrained(AutoModelForCausalLM, options.model, dtype=torch.float32),
        args=args,
        train_dataset=load_dataset(options.data, split="train"),
        processing_class=AutoTokenizer.from_pretrained(options.model),
        peft_config=LoraConfig(r=16, target_modules="all-linear") if options.lora else None,
    )
    trainer.train()
    trainer.save_model()  # all ranks call
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    if trainer.is_world_process_zero():
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
        for graph in trainer.compile_session.report.graphs:
            print(f"{graph.name}: {graph.fallback or graph.collectives or 'one rank alone'}")


if __name__ == "__main__":
    main()
