"""Models to simulate: published decoders by name, a Hugging Face folder, or a function in a file.

Names are those of published shapes, so that published runs can be simulated: Llama 2 (arXiv 2307.09288, table
1), Llama 3 (arXiv 2407.21783, table 3), MPT (mosaicml/llm-foundry, scripts/train/yamls/pretrain).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchloom.errors import ConfigError
from torchloom.recipes.train.model import PRESETS, Llama, LlamaConfig


@dataclass(frozen=True, slots=True)
class SimulatedModel:
    """A model without data, and the arguments of one forward pass that returns a loss."""

    name: str
    module: nn.Module
    inputs: tuple[Any, ...] | dict[str, Any]


class _NoInit(Llama):
    """The built-in decoder; drawing weights that have no data costs seconds at 70 B."""

    def _init_weights(self) -> None:
        pass


class Gpt(nn.Module):
    """A decoder as of GPT-2 and MPT: learned positions, LayerNorm, fused projections, GELU, a tied head.

    Args:
        dim: width.
        num_layers: of equal blocks.
        num_heads: of attention.
        max_seq_len: positions.
        vocab_size: of the embedding, which is the head as well.
    """

    def __init__(
        self, dim: int, num_layers: int, num_heads: int, max_seq_len: int, vocab_size: int = 50368
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, dim)
        self.positions = nn.Embedding(max_seq_len, dim)
        self.blocks = nn.ModuleList(_GptBlock(dim, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(dim)

    def forward(self, ids_BT: Tensor, labels_BT: Tensor) -> Tensor:
        """Return the mean cross entropy of the labels."""
        x_BTD = self.tokens(ids_BT) + self.positions.weight[: ids_BT.shape[1]]
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits_BTV = F.linear(self.norm(x_BTD), self.tokens.weight)
        return F.cross_entropy(logits_BTV.flatten(0, 1).float(), labels_BT.flatten())


class _GptBlock(nn.Module):
    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_1, self.norm_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x_BTD: Tensor) -> Tensor:
        qkv = self.qkv(self.norm_1(x_BTD)).unflatten(-1, (3, self.num_heads, -1))
        q_BHTK, k_BHTK, v_BHTK = (each.transpose(1, 2) for each in qkv.unbind(2))
        mixed_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True)
        x_BTD = x_BTD + self.out(mixed_BHTK.transpose(1, 2).flatten(2))
        return x_BTD + self.down(F.gelu(self.up(self.norm_2(x_BTD))))


def _llama(
    dim: int, num_layers: int, num_heads: int, kv_heads: int, hidden_dim: int, vocab_size: int
) -> Callable[[int], nn.Module]:
    def make(seq_len: int) -> nn.Module:
        config = LlamaConfig(
            vocab_size=vocab_size,
            dim=dim,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=kv_heads,
            hidden_dim=hidden_dim,
            max_seq_len=seq_len,
        )
        return _NoInit(config)

    return make


def _gpt(dim: int, num_layers: int, num_heads: int) -> Callable[[int], nn.Module]:
    return lambda seq_len: Gpt(dim, num_layers, num_heads, seq_len)


SHAPES: dict[str, Callable[[int], nn.Module]] = {
    "llama-1b": _llama(2048, 16, 32, 8, 8192, 128_256),
    "llama-3b": _llama(3072, 28, 24, 8, 8192, 128_256),
    "llama-8b": _llama(4096, 32, 32, 8, 14_336, 128_256),
    "llama-70b": _llama(8192, 80, 64, 8, 28_672, 128_256),
    "llama-405b": _llama(16_384, 126, 128, 8, 53_248, 128_256),
    "llama-2-7b": _llama(4096, 32, 32, 32, 11_008, 32_000),
    "llama-2-13b": _llama(5120, 40, 40, 40, 13_824, 32_000),
    "llama-2-34b": _llama(8192, 48, 64, 8, 22_016, 32_000),
    "llama-2-70b": _llama(8192, 80, 64, 8, 28_672, 32_000),
    "mpt-7b": _gpt(4096, 32, 32),
    "mpt-13b": _gpt(5120, 40, 40),
    "mpt-30b": _gpt(7168, 48, 56),
    "mpt-70b": _gpt(8192, 80, 64),
}
"""Makers of models by name, given the longest sequence."""


def simulated_model(model: str | Callable[..., Any], batch: int, seq_len: int) -> SimulatedModel:
    """Make the model that `--model` names, without data.

    Args:
        model: a name of `SHAPES` or of the built-in models, a folder with a `config.json` of Hugging Face, or a
            function. It gets `batch` and `seq_len` and returns a module, which then takes token ids and labels, or
            a module and the arguments of its forward pass.
        batch: samples of a micro batch.
        seq_len: tokens of a sample.

    Raises:
        ConfigError: there is no such model, or the folder or the function cannot be used.
    """
    if callable(model):
        return _of_function(model, batch, seq_len)
    text = model
    with torch.device("meta"):
        ids = torch.zeros(batch, seq_len, dtype=torch.long)
        if text in SHAPES:
            return SimulatedModel(text, SHAPES[text](seq_len), (ids, ids))
        if text in PRESETS:
            return SimulatedModel(text, _NoInit(PRESETS[text](seq_len)), (ids, ids))
        if Path(text).expanduser().is_dir():
            return _of_folder(text, ids)
    raise ConfigError(
        f"no model {text!r}: use one of {', '.join((*SHAPES, *PRESETS))}, a folder with a config.json of Hugging "
        "Face, or file.py:function"
    )


def _of_function(make: Callable[..., Any], batch: int, seq_len: int) -> SimulatedModel:
    name = getattr(make, "__name__", "model")
    try:
        inspect.signature(make).bind(batch=batch, seq_len=seq_len)
    except TypeError as error:
        raise ConfigError(
            f"{name} does not take the arguments batch and seq_len ({error}): write def {name}(batch, seq_len)"
        ) from error
    with torch.device("meta"):
        made = make(batch=batch, seq_len=seq_len)
        ids = torch.zeros(batch, seq_len, dtype=torch.long)
    model, inputs = made if isinstance(made, tuple) else (made, (ids, ids))
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{name} returned a {type(model).__name__}, not a torch.nn.Module")
    return SimulatedModel(name, model, inputs)


def _of_folder(text: str, ids: Tensor) -> SimulatedModel:
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            f"model folder {text!r} needs transformers: pip install 'torchloom[hf]'"
        ) from error
    folder = Path(text).expanduser()
    data_alone = {"local_files_only": True, "trust_remote_code": False}
    try:
        config = transformers.AutoConfig.from_pretrained(folder, **data_alone)
        config.use_cache = False
        kind = next(iter(config.architectures or ()), "CausalLM")
        if not kind.endswith(("LM", "LMHeadModel")):
            raise ValueError(
                f"{kind} is no language model that returns its loss for token ids and labels: give file.py:function"
            )
        auto = (
            transformers.AutoModelForMaskedLM
            if kind.endswith("MaskedLM")
            else transformers.AutoModelForCausalLM
        )
        module = auto.from_config(config, dtype=torch.float32, trust_remote_code=False)
        module.to("meta")  # XLNet makes a parameter by a constructor that asks for no device
    except (
        Exception
    ) as error:  # transformers checks values with errors of every kind, its own among them
        lines = str(error).splitlines() or [type(error).__name__]
        reason = " ".join(line.strip() for line in lines[: 2 if lines[0].endswith(":") else 1])
        raise ConfigError(f"model folder {text!r} cannot be used: {reason}") from error
    limit = getattr(config, "max_position_embeddings", None) or ids.shape[1]
    has_table = any(("position" in name or "wpe" in name) for name, _ in module.named_parameters())
    if has_table and ids.shape[1] > limit:
        raise ConfigError(
            f"model folder {text!r} has {limit} learned positions: use --seq-len {limit} or less"
        )
    return SimulatedModel(folder.resolve().name, module.train(), {"input_ids": ids, "labels": ids})
