"""Write a tiny Llama with random weights, its tokenizer and its data: what the recipes run on without a download.

python examples/tiny_llama.py runs/tiny

runs/tiny               a `--model`, as `save_pretrained` writes it
runs/tiny/sums          a `--data` with the column `text`: "two plus three is five"
runs/tiny/pairs         a `--data` with `prompt`, `chosen` and `rejected`
runs/tiny/tokens.npy    the tokens of `sums` one after the other, for `pretrain.py`
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a tiny Llama, its tokenizer and its data.")
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    words = ["<pad>", "<eos>", "<unk>", "plus", "is", *DIGITS]
    made = Tokenizer(WordLevel({word: at for at, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, **special)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    ends = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
    config = LlamaConfig(vocab_size=len(words), **SIZES, **HEADS, **ends)
    LlamaForCausalLM(config).save_pretrained(folder)

    chance = random.Random(0)
    sums, pairs = [], []
    for _ in range(400):
        a, b = chance.randrange(5), chance.randrange(5)
        prompt, answer = f"{DIGITS[a]} plus {DIGITS[b]} is", f" {DIGITS[a + b]}"
        sums.append({"text": prompt + answer})
        pairs.append({"prompt": prompt, "chosen": answer, "rejected": f" {DIGITS[9 - a - b]}"})
    for name, rows in (("sums", sums), ("pairs", pairs)):
        (folder / name).mkdir(exist_ok=True)
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / name / "train.jsonl").write_text(lines)
    text = " <eos> ".join(row["text"] for row in sums)
    np.save(folder / "tokens.npy", np.array(tokenizer(text)["input_ids"], dtype=np.uint16))
    print(f"wrote {folder}")


if __name__ == "__main__":
    main()
