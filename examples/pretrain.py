"""Pretrain a decoder of transformers from scratch: no rank holds it whole, and a stopped run continues where it was.

    python examples/tiny_llama.py runs/tiny
    torchrun --nproc-per-node 2 examples/pretrain.py --config runs/tiny --data runs/tiny/tokens.npy \
        --length 12 --steps 40 --lr 1e-2 --backend aot_eager
    torchrun --nproc-per-node 8 examples/pretrain.py --config meta-llama/Llama-3.1-8B --data tokens.npy \
        --length 4096 --batch 4 --steps 100000 --out /shared/runs/a

`--data` is one NumPy array of token ids, read from disk where it is needed. Prints the loss of each tenth step; `--out` then
holds checkpoints, and `model` for `from_pretrained`. SIGTERM saves and ends, which `slurm/pretrain.sbatch` relies on.
"""

from __future__ import annotations

import argparse
import signal
import threading
from itertools import chain, repeat
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import AutoConfig, AutoModelForCausalLM

import torchloom
from torchloom.shard import on_meta


class Blocks(Dataset):
    """Cuts a file of tokens into samples of one length."""

    def __init__(self, path: str, length: int) -> None:
        self.tokens, self.length = np.load(path, mmap_mode="r"), length

    def __len__(self) -> int:
        return len(self.tokens) // self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        block = self.tokens[index * self.length : (index + 1) * self.length]
        ids = torch.from_numpy(block.astype(np.int64))
        return {"input_ids": ids, "labels": ids}


def main() -> None:
    parser = argparse.ArgumentParser(description="Pretrain a decoder from scratch.")
    parser.add_argument("--config", required=True, help="a folder, or a name on the Hub")
    parser.add_argument("--data", required=True, help="token ids, as numpy.save writes them")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a sample")
    parser.add_argument("--batch", type=int, default=8, help="samples per rank and step")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps of the whole run")
    parser.add_argument("--save-every", type=int, default=500, help="steps between checkpoints")
    parser.add_argument("--lr", type=float, default=3e-4, help="highest learning rate")
    parser.add_argument("--backend", default="inductor", help="aot_eager compiles faster")
    parser.add_argument("--out", default="runs/pretrain", help="folder that all ranks see")
    options = parser.parse_args()
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    torch.manual_seed(0)
    with on_meta():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(options.config))
    small = 10 * model.config.hidden_size  # norms stay whole
    config = {
        "train_micro_batch_size_per_gpu": options.batch,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": torch.cuda.is_available()},
        "optimizer": {"type": "AdamW", "params": {"lr": options.lr, "weight_decay": 0.1}},
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {"total_num_steps": options.steps, "warmup_num_steps": 10},
        },
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": small},
        "compile": {"backend": options.backend},
        "checkpoint": {"keep_last": 2},
    }
    engine, _, loader, _ = torchloom.initialize(
        model=model,
        init=model._init_weights,  # fills one module at a time
        config=config,
        training_data=Blocks(options.data, options.length),
    )
    engine.compile()
    if (Path(options.out) / "latest").exists():
        engine.load_checkpoint(options.out)
    engine.log_to(lambda metrics, step: print(f"step {step} loss {metrics['loss']:.3f}"), every=10)
    batches = chain.from_iterable(repeat(loader))
    while engine.global_steps < options.steps:
        batch = {name: each.to(engine.device) for name, each in next(batches).items()}
        engine.backward(engine(**batch).loss)
        engine.step()
        asked = torch.tensor(float(stop.is_set()), device=engine.device)
        is_over = bool(torchloom.all_reduce(asked, "max", name="asked to stop"))
        if is_over or engine.global_steps % options.save_every == 0:
            engine.save_checkpoint(options.out)
        if is_over:
            break
    else:
        torchloom.save_model(engine.module, f"{options.out}/model")  # all ranks call
    if engine.rank == 0:
        print(f"step {engine.global_steps} of {options.steps}, files in {options.out}")
    engine.destroy()


if __name__ == "__main__":
    main()
