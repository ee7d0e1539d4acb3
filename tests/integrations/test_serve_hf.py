"""Hugging Face decoders from config: prefill of any length, decode of any batch with a static cache."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from support.transformers_sizes import DECODER, GPT2
from torchloom.serve import Contract, Dim, build, counter, tensor

transformers = pytest.importorskip("transformers")

CONFIGS = {
    "llama": ("LlamaConfig", DECODER),
    "qwen3": ("Qwen3Config", {**DECODER, "head_dim": 8}),
    "gpt2": ("GPT2Config", GPT2),
}
LENGTH = 32
"""Positions of the cache."""


class Cached(nn.Module):
    """A decoder whose static cache is made of tensors that each call passes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, start: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        cache = transformers.StaticCache(config=self.model.config, max_cache_len=LENGTH)
        for number, layer in enumerate(cache.layers):
            layer.keys, layer.values = keys[number], values[number]
            layer.dtype, layer.device = keys.dtype, keys.device
            layer.cumulative_length = start.clone()
            layer.is_initialized = True
        positions = start + torch.arange(ids.shape[1])[None]
        found = self.model(
            input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True
        )
        return found.logits[:, -1]


def make(name: str) -> nn.Module:
    kind, sizes = CONFIGS[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**sizes)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def caches(name: str, batch: int) -> tuple[Tensor, Tensor]:
    heads = CONFIGS[name][1].get("num_key_value_heads", 4)
    return tuple(torch.zeros(2, batch, heads, LENGTH, 8) for _ in "kv")


def contract(name: str, batch: Dim, length: Dim | int) -> Contract:
    heads = CONFIGS[name][1].get("num_key_value_heads", 4)
    cache = tensor(2, batch, heads, LENGTH, 8, fill=torch.zeros)
    return Contract(
        {
            "ids": tensor(batch, length, dtype=torch.int64, below=64),
            "start": tensor(dtype=torch.int64, below=1),
            "keys": cache,
            "values": cache,
        }
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_prefill_of_any_length_for_any_batch(name):
    model = make(name)
    least = 1 if name == "llama" else 2  # one row, and one token, are programs of their own
    batch, length = Dim("batch", least, 4), Dim("length", least, LENGTH)
    spec = tensor(batch, length, dtype=torch.int64, below=64)
    program = build(
        model,
        Contract({"input_ids": spec}, fixed={"use_cache": False}),
        shapes="split",
        backend="eager",
    )
    with torch.no_grad(), counter.expect(num_compiles=0):
        for sizes in ((1, 1), (1, 7), (3, 2), (4, LENGTH), (2, 17)):
            if min(sizes) < least:
                continue
            ids = torch.randint(0, 64, sizes)
            found = program(input_ids=ids).logits
            wanted = model(input_ids=ids, use_cache=False).logits
            torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["gemma3", "vit"])
def test_stock_models_are_served_from_one_row_and_one_token_on(name):
    torch.manual_seed(0)
    batch, length = Dim("batch", 1, 4), Dim("length", 1, 16)
    if name == "vit":
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = transformers.ViTConfig(**sizes, intermediate_size=64, image_size=16, patch_size=4)
        model = transformers.ViTForImageClassification(config).eval()
        spec, key = tensor(batch, 3, 16, 16), "pixel_values"
    else:
        config = transformers.Gemma3TextConfig(**DECODER, head_dim=8, sliding_window=8)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        spec, key = tensor(batch, length, dtype=torch.int64, below=64), "input_ids"
    with torch.no_grad():
        program = build(model, Contract({key: spec}), backend="eager")
        for rows, tokens in ((1, 1), (1, 7), (3, 1), (4, 16)):
            sizes = {"batch": rows, "length": tokens}
            x = spec.example(sizes)
            torch.testing.assert_close(program(x).logits, model(x).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "backend"), [("llama", "inductor"), ("gpt2", "eager"), ("qwen3", "eager")]
)
def test_a_static_cache_decodes_any_batch(name, backend):
    model = make(name)
    cached = Cached(model).eval()
    batch = Dim("batch", 1, 4)
    length = Dim("length", 2, 16)
    prefill = build(cached, contract(name, batch, length), shapes="split", backend=backend)
    decode = build(cached, contract(name, batch, 1), shapes="split", backend=backend)
    with torch.no_grad(), counter.expect(num_compiles=0):
        for num, first in ((1, 5), (3, 2), (4, 16)):
            ids = torch.randint(0, 64, (num, first))
            keys, values = caches(name, num)
            logits = prefill(ids, torch.tensor(0), keys, values)
            for position in range(first, first + 4):
                wanted = model(input_ids=ids, use_cache=False).logits[:, -1]
                torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)
                last = logits.argmax(-1, keepdim=True)
                ids = torch.cat([ids, last], 1)
                logits = decode(last, torch.tensor(position), keys, values)
