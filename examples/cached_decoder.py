"""A small decoder over bytes with a key-value cache; the serving examples use it.

    python examples/cached_decoder.py

Each sequence has a slot in the cache. A call takes tokens of some sequences, writes their keys and values into
the cache, and returns the logits of the next tokens. The same code handles a whole prompt of one sequence and one
token of many sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model and of its cache."""

    num_layers: int = 4
    width: int = 128
    num_heads: int = 4
    num_positions: int = 256
    num_slots: int = 8
    """Sequences that are in the cache at a time."""

    @property
    def cache_shape(self) -> tuple[int, ...]:
        """Shape of the keys, and of the values."""
        head = self.width // self.num_heads
        return (self.num_layers, self.num_slots, self.num_positions, self.num_heads, head)


class Layer(nn.Module):
    """Attention to all that is in the cache, then an MLP."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.num_heads = sizes.num_heads
        self.norm = nn.LayerNorm(sizes.width)
        self.qkv = nn.Linear(sizes.width, 3 * sizes.width)
        self.out = nn.Linear(sizes.width, sizes.width)
        self.mlp_norm = nn.LayerNorm(sizes.width)
        self.up, self.down = (
            nn.Linear(sizes.width, 4 * sizes.width),
            nn.Linear(4 * sizes.width, sizes.width),
        )

    def forward(
        self, x: Tensor, where: tuple[Tensor, Tensor], mask: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """Write this call's keys and values to the cache at `where`, (slots, positions), and attend."""
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.num_heads, -1)
            for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        slots, positions = where
        keys[slots[:, None], positions] = k
        values[slots[:, None], positions] = v
        heads = (q, keys[slots], values[slots])
        y = F.scaled_dot_product_attention(
            *(each.transpose(1, 2) for each in heads), attn_mask=mask
        )
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class Decoder(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.bytes = nn.Embedding(256, sizes.width)
        self.positions = nn.Embedding(sizes.num_positions, sizes.width)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.num_layers))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, 256)

    def forward(
        self, tokens: Tensor, start: Tensor, slots: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """Return logits after each row's last token.

        Args:
            tokens: [batch, length].
            start: [batch], the position of each row's first token.
            slots: [batch], where each row's sequence is in the cache.
            keys: the cache, written in place.
            values: the cache, written in place.
        """
        positions = start[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        x = self.bytes(tokens) + self.positions(positions)
        seen = torch.arange(self.sizes.num_positions, device=tokens.device)
        mask = (seen <= positions[:, :, None])[:, None]
        for number, layer in enumerate(self.layers):
            x = layer(x, (slots, positions), mask, keys[number], values[number])
        return self.head(self.norm(x[:, -1]))


def main() -> None:
    """Read three tokens of one sequence, then one more of two."""
    torch.manual_seed(0)
    model = Decoder(Sizes()).eval()
    cache = [torch.zeros(model.sizes.cache_shape) for _ in "kv"]
    with torch.no_grad():
        start, slots = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        logits = model(torch.tensor([[1, 2, 3]]), start, slots, *cache)
        print("a prompt:", tuple(logits.shape))
        step = torch.tensor([[4], [5]]), torch.tensor([3, 0]), torch.tensor([0, 1])
        print("one token of two sequences:", tuple(model(*step, *cache).shape))


if __name__ == "__main__":
    main()
