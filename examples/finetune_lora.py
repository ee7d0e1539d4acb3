"""Fine-tune a Llama with LoRA: the frozen model is sharded and compiled, PEFT's adapters are trained and saved.

    python examples/tiny_llama.py runs/tiny
    torchrun --nproc-per-node 2 examples/finetune_lora.py --model runs/tiny --data runs/tiny/sums \
        --steps 20 --lr 1e-2 --backend aot_eager
    torchrun --nproc-per-node 8 examples/finetune_lora.py --model meta-llama/Llama-3.1-8B \
        --data roneneldan/TinyStories --steps 1000

Prints how many weights are trained, and the first and the last loss. `--out` then holds the adapters alone, for
`PeftModel.from_pretrained(model, out)`. Needs the extra `trl`.
"""

from __future__ import annotations

import argparse

import torch
from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling

from torchloom.integrations.transformers import (
    TorchloomArguments,
    TorchloomTrainer,
    from_pretrained,
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tune a decoder with LoRA.")
    parser.add_argument("--model", required=True, help="a folder, or a name on the Hub")
    parser.add_argument("--data", required=True, help="likewise, with a column `text`")
    parser.add_argument("--batch", type=int, default=8, help="samples per rank and step")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps")
    parser.add_argument("--lr", type=float, default=2e-4, help="learning rate")
    parser.add_argument("--backend", default="inductor", help="aot_eager compiles faster")
    parser.add_argument("--out", default="runs/lora", help="folder for the adapters")
    options = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    data = load_dataset(options.data, split="train")
    data = data.map(lambda row: tokenizer(row["text"], truncation=True, max_length=1024))
    # Whole on rank 0 alone, empty on the others.
    model = from_pretrained(AutoModelForCausalLM, options.model, dtype=torch.float32)
    lora = LoraConfig(r=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    zero = {"stage": 3, "stage3_param_persistence_threshold": "auto"}
    args = TorchloomArguments(
        output_dir=options.out,
        torchloom={"zero_optimization": zero, "compile": {"backend": options.backend}},
        max_steps=options.steps,
        per_device_train_batch_size=options.batch,
        learning_rate=options.lr,
        bf16=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
        logging_steps=10,
        save_strategy="no",
        report_to=[],
    )
    trainer = TorchloomTrainer(
        model=get_peft_model(model, lora),
        args=args,
        train_dataset=data,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    if trainer.is_world_process_zero():
        trainer.model.print_trainable_parameters()
    trainer.train()
    trainer.save_model()  # all ranks call
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    if trainer.is_world_process_zero():
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, adapters in {options.out}")


if __name__ == "__main__":
    main()
