"""The model that every configuration trains: a Llama-style decoder of 34.09 M parameters.

    tokens -> embedding -> 8 x (RMSNorm, attention with RoPE, RMSNorm, SwiGLU) -> RMSNorm -> head -> loss

The loss is inside the model, so each configuration compiles, wraps and shards the same thing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Sizes of the decoder."""

    num_layers: int = 8
    dim: int = 512
    num_heads: int = 8
    hidden_dim: int = 1408
    vocab_size: int = 8192
    seq_len: int = 256


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.num_heads = shape.num_heads
        self.q, self.k, self.v, self.o = (
            nn.Linear(shape.dim, shape.dim, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = (*x.shape[:2], self.num_heads, -1)  # batch, seq, heads, head dim
        q, k, v = (proj(x).view(heads).transpose(1, 2) for proj in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(
            _rotate(q, cos, sin), _rotate(k, cos, sin), v, is_causal=True
        )
        return self.o(y.transpose(1, 2).reshape(x.shape))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.dim, shape.hidden_dim, bias=False)
        self.up = nn.Linear(shape.dim, shape.hidden_dim, bias=False)
        self.down = nn.Linear(shape.hidden_dim, shape.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One decoder layer; the unit that FSDP2 wraps and compiles."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.dim)
        self.attention = Attention(shape)
        self.feed_forward_norm = nn.RMSNorm(shape.dim)
        self.feed_forward = FeedForward(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Decoder(nn.Module):
    """The whole model: token ids and targets in, mean cross-entropy out."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab_size, shape.dim)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.dim)
        self.head = nn.Linear(shape.dim, shape.vocab_size, bias=False)
        angles = angles_of(shape.seq_len, shape.dim // shape.num_heads)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build_model(shape: Shape, seed: int = 0) -> Decoder:
    """Return the model with the same weights on every rank."""
    torch.manual_seed(seed)
    model = Decoder(shape)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
    return model


def angles_of(seq_len: int, head_dim: int) -> Tensor:
    """Return the angles of rotary positions."""
    inverse = 10000.0 ** -(torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.outer(torch.arange(seq_len), inverse)
    return torch.cat((angles, angles), dim=-1)  # seq, head dim


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)  # whatever precision the model computes in
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin
