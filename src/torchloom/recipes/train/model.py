"""The built-in model: one Llama-style decoder in plain PyTorch.

    tokens -> embedding -> [RMSNorm, attention (RoPE, grouped queries), +] -> RMSNorm -> head
                           [RMSNorm, SwiGLU,                            +]  x layers

Shape suffixes: B batch, T time, D model, H heads, K head size, V vocabulary.
It traces as one graph: no data-dependent branch, no attribute written in forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaConfig:
    """The sizes of a decoder."""

    vocab_size: int
    dim: int
    num_layers: int
    num_heads: int
    hidden_dim: int
    """Inner width of the SwiGLU block."""
    max_seq_len: int
    num_kv_heads: int | None = None
    """Heads of keys and values; fewer than `num_heads` is grouped-query attention."""
    tie_embeddings: bool = False
    """Use the embedding as the output head too."""
    rope_base: float = 10_000.0
    norm_eps: float = 1e-5

    @property
    def kv_heads(self) -> int:
        """Return the number of key and value heads."""
        return self.num_kv_heads or self.num_heads

    @property
    def head_dim(self) -> int:
        """Return the size of one head."""
        return self.dim // self.num_heads


PRESETS: dict[str, Callable[[int], LlamaConfig]] = {
    # 1.9 M parameters over bytes, for two processor cores
    "llama-tiny": lambda max_seq_len: LlamaConfig(
        vocab_size=256, dim=192, num_layers=4, num_heads=6, hidden_dim=512, max_seq_len=max_seq_len
    ),
    # The model of benchmarks: 34.09 M parameters, a vocabulary of 8192
    "llama-34m": lambda max_seq_len: LlamaConfig(
        vocab_size=8192,
        dim=512,
        num_layers=8,
        num_heads=8,
        hidden_dim=1408,
        max_seq_len=max_seq_len,
    ),
}
"""The built-in models, by the longest sequence."""


_linear = partial(nn.Linear, bias=False)


class Attention(nn.Module):
    """Causal self-attention with rotary positions and grouped queries."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        kv_dim = config.kv_heads * config.head_dim
        self.head_dim = config.head_dim
        self.is_grouped = config.kv_heads != config.num_heads
        self.wq = _linear(config.dim, config.dim)
        self.wk = _linear(config.dim, kv_dim)
        self.wv = _linear(config.dim, kv_dim)
        self.wo = _linear(config.dim, config.dim)

    def forward(self, x_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
        """Mix each position with those before it.

        Args:
            x_BTD: the normed residual stream.
            cos_TK: cosines of each position's angles.
            sin_TK: sines of each position's angles.
        """
        q_BHTK, k_BHTK, v_BHTK = (
            w(x_BTD).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for w in (self.wq, self.wk, self.wv)
        )
        mixed_BHTK = F.scaled_dot_product_attention(
            rotate(q_BHTK, cos_TK, sin_TK),
            rotate(k_BHTK, cos_TK, sin_TK),
            v_BHTK,
            is_causal=True,
            enable_gqa=self.is_grouped,
        )
        return self.wo(mixed_BHTK.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU: `w2(silu(w1 x) * w3 x)`."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.w1 = _linear(config.dim, config.hidden_dim)
        self.w2 = _linear(config.hidden_dim, config.dim)
        self.w3 = _linear(config.dim, config.hidden_dim)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Transform each position by itself."""
        return self.w2(F.silu(self.w1(x_BTD)) * self.w3(x_BTD))


class Block(nn.Module):
    """One layer: attention and feed-forward, each on the normed residual stream."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(self, x_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
        """Add this layer's contribution to the residual stream.

        Args:
            x_BTD: the residual stream.
            cos_TK: cosines of each position's angles.
            sin_TK: sines of each position's angles.
        """
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), cos_TK, sin_TK)
        return x_BTD + self.feed_forward(self.feed_forward_norm(x_BTD))


class Llama(nn.Module):
    """A decoder over token ids.

    Example:
        >>> model = Llama(PRESETS["llama-tiny"](256))
        >>> model(torch.zeros(2, 16, dtype=torch.long)).shape
        torch.Size([2, 16, 256])
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.head = _linear(config.dim, config.vocab_size)
        cos_TK, sin_TK = rope_tables(config)
        self.register_buffer("cos_TK", cos_TK, persistent=False)
        self.register_buffer("sin_TK", sin_TK, persistent=False)
        self._init_weights()
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return the logits, or the mean loss in nats per token.

        Args:
            input_ids: token ids of shape (batch, time).
            labels: the token after each of `input_ids`; -100 marks positions that do not count.
        """
        num_steps = input_ids.shape[1]
        cos_TK, sin_TK = self.cos_TK[:num_steps], self.sin_TK[:num_steps]
        x_BTD = self.embedding(input_ids)
        for layer in self.layers:
            x_BTD = layer(x_BTD, cos_TK, sin_TK)
        logits_BTV = self.head(self.norm(x_BTD))
        if labels is None:
            return logits_BTV
        return F.cross_entropy(logits_BTV.flatten(0, 1).float(), labels.flatten())

    def _init_weights(self) -> None:
        """Draw normal weights; most are scaled so that a layer keeps the variance of its input.

        Weights that write to the residual stream are small, and smaller in deeper models. The head is
        small too, so the first loss is that of a uniform guess.
        """
        depth_scale = (2 * self.config.num_layers) ** -0.5
        for name, param in self.named_parameters():
            if name == "embedding.weight":
                nn.init.normal_(param, std=0.02 if self.config.tie_embeddings else 0.5)
            elif name == "head.weight":
                nn.init.normal_(param, std=0.02)
            elif name.endswith(("attention.wo.weight", "feed_forward.w2.weight")):
                nn.init.normal_(param, std=0.02 * depth_scale)
            elif param.dim() == 2:
                nn.init.normal_(param, std=param.shape[1] ** -0.5)


def rope_tables(config: LlamaConfig) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of each position's angles, both of shape (time, head size)."""
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    positions = torch.arange(config.max_seq_len, dtype=torch.float32)
    angles = torch.outer(positions, config.rope_base**-half)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x_BHTK: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
    """Rotate each pair (k, k + K/2) of a head by its position's angle.

    Args:
        x_BHTK: queries or keys.
        cos_TK: cosines of each position's angles.
        sin_TK: sines of each position's angles.
    """
    low, high = x_BHTK.chunk(2, dim=-1)
    turned = torch.cat((-high, low), dim=-1)
    return (x_BHTK * cos_TK + turned * sin_TK).to(x_BHTK.dtype)
