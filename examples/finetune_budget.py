"""Fine-tune all weights of a Llama within a memory budget: torchloom plans what backward computes again.

    python examples/tiny_llama.py runs/tiny
    torchrun --nproc-per-node 2 examples/finetune_budget.py --model runs/tiny --data runs/tiny/sums \
        --length 8 --batch 64 --steps 12 --lr 1e-2 --budget 4.5MB --backend aot_eager
    torchrun --nproc-per-node 8 examples/finetune_budget.py --model meta-llama/Llama-3.1-8B \
        --data roneneldan/TinyStories --length 2048 --batch 4 --steps 1000 --budget 70GB

Prints the losses, then the budget beside the planned and the measured peak, and how many values backward computes
again. `--out` then holds the model for `from_pretrained`. Needs the extra `trl`.
"""

from __future__ import annotations

import argparse
from itertools import chain, repeat

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

import torchloom
from torchloom.integrations.transformers import from_pretrained


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tune a decoder within a memory budget.")
    parser.add_argument("--model", required=True, help="a folder, or a name on the Hub")
    parser.add_argument("--data", required=True, help="likewise, with a column `text`")
    parser.add_argument("--budget", default="auto", help="of a rank: 70GB, 90%%, auto")
    parser.add_argument("--length", type=int, default=512, help="tokens of a sample")
    parser.add_argument("--batch", type=int, default=8, help="samples per rank and step")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps")
    parser.add_argument("--lr", type=float, default=1e-5, help="learning rate")
    parser.add_argument("--backend", default="inductor", help="aot_eager compiles faster")
    parser.add_argument("--out", default="runs/finetuned", help="folder for the model")
    options = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    sizes = {"max_length": options.length, "padding": "max_length", "truncation": True}

    def collate(rows):
        batch = tokenizer([row["text"] for row in rows], return_tensors="pt", **sizes)
        return {**batch, "labels": batch.input_ids.where(batch.attention_mask > 0, -100)}

    # Whole on rank 0 alone, empty on the others.
    model = from_pretrained(AutoModelForCausalLM, options.model, dtype=torch.float32)
    small = 10 * model.config.hidden_size  # norms stay whole
    config = {
        "train_micro_batch_size_per_gpu": options.batch,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": torch.cuda.is_available()},
        "optimizer": {"type": "AdamW", "params": {"lr": options.lr}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": small},
        "compile": {"backend": options.backend, "memory_budget": options.budget},
    }
    engine, _, loader, _ = torchloom.initialize(
        model=model.train(),
        init=model._init_weights,  # fills the modules of ranks that loaded nothing
        config=config,
        training_data=load_dataset(options.data, split="train"),
        collate_fn=collate,
    )
    engine.compile()
    steps = []
    engine.log_to(lambda metrics, step: steps.append(metrics))  # called on rank 0
    batches = chain.from_iterable(repeat(loader))
    while engine.global_steps < options.steps:
        batch = {name: each.to(engine.device) for name, each in next(batches).items()}
        engine.backward(engine(**batch).loss)
        engine.step()
        if steps:
            print(f"step {engine.global_steps} loss {steps[-1]['loss']:.3f}")
    torchloom.save_model(engine.module, options.out)  # all ranks call
    if steps:
        plan = engine.plan()
        sizes = plan.budget_bytes, plan.peak_bytes, steps[-1]["measured_peak_bytes"]
        budget, planned, measured = (f"{each / 1e6:.2f} MB" for each in sizes)
        print(f"budget {budget}, planned {planned}, measured {measured}")
        print(f"backward computes {sum(len(each.recompute) for each in plan.graphs)} values again")
    engine.destroy()


if __name__ == "__main__":
    main()
