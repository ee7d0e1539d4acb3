"""Serve a decoder of transformers: one program reads a prompt of any length, one generates; nothing compiles in between.

    python examples/tiny_llama.py runs/tiny
    python examples/serve_transformers.py --model runs/tiny --prompt "two plus three is" --length 32 --tokens 16 \
        --backend eager
    python examples/serve_transformers.py --model meta-llama/Llama-3.2-1B --prompt "Once upon a time" --store programs

Prints the text, tokens/s of the programs and of `model.generate`, and whether both chose the same tokens. The second
start with one `--store` loads the programs: nothing is traced or compiled. `serve_http.py` batches requests of many clients.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, StaticCache

from torchloom.serve import Contract, Dim, build, counter, tensor


class Cached(nn.Module):
    """A decoder that keeps keys and values in tensors that each call passes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, start: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        cache = StaticCache(config=self.model.config, max_cache_len=keys.shape[3])
        for number, layer in enumerate(cache.layers):
            layer.keys, layer.values = keys[number], values[number]
            layer.dtype, layer.device = keys.dtype, keys.device
            layer.cumulative_length, layer.is_initialized = start.clone(), True
        positions = start + torch.arange(ids.shape[1], device=ids.device)[None]
        found = self.model(ids, position_ids=positions, past_key_values=cache, use_cache=True)
        return found.logits[:, -1]


def main() -> None:
    options = parse()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model).to(device).eval()
    text, vocab = model.config.get_text_config(), model.config.vocab_size
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    shape = (text.num_hidden_layers, 1, text.num_key_value_heads, options.length, head_dim)
    cache = [torch.zeros(shape, dtype=model.dtype, device=device) for _ in "kv"]

    def program(length: Dim | int):
        ids = tensor(1, length, dtype=torch.int64, device=device, below=vocab)
        start = tensor(dtype=torch.int64, device=device, below=1)
        kept = tensor(*shape, dtype=model.dtype, device=device, fill=torch.zeros)
        contract = Contract({"ids": ids, "start": start, "keys": kept, "values": kept})
        how = {"backend": options.backend, "store": options.store}
        return build(Cached(model).eval(), contract, **how)

    prefill, decode = program(Dim("length", 2, options.length - options.tokens)), program(1)
    prompt = tokenizer(options.prompt, return_tensors="pt").input_ids.to(device)
    with torch.no_grad(), counter.expect(num_compiles=0, num_eager_calls=0):
        began, at, ids = time.perf_counter(), torch.tensor(prompt.shape[1], device=device), prompt
        logits = prefill(prompt, torch.zeros_like(at), *cache)
        while ids.shape[1] < prompt.shape[1] + options.tokens:
            ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
            logits = decode(ids[:, -1:].contiguous(), at, *cache)
            at = at + 1
        seconds = time.perf_counter() - began
    began = time.perf_counter()
    lengths = {"max_new_tokens": options.tokens, "min_new_tokens": options.tokens}
    wanted = model.generate(prompt, do_sample=False, **lengths)
    print(tokenizer.decode(ids[0]))
    rates = [options.tokens / each for each in (seconds, time.perf_counter() - began)]
    print(f"{rates[0]:.0f} tokens/s, generate {rates[1]:.0f}, equal: {torch.equal(ids, wanted)}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Serve a decoder of transformers.")
    add = parser.add_argument
    add("--model", required=True, help="a folder, or a name on the Hub")
    add("--prompt", default="Once upon a time")
    add("--tokens", type=int, default=64, help="tokens to generate")
    add("--length", type=int, default=512, help="positions of the cache")
    add("--store", help="folder for the programs")
    add("--backend", default="inductor", help="eager compiles nothing")
    return parser.parse_args()


if __name__ == "__main__":
    main()
