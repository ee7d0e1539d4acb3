"""Small models of many kinds, each with its loss inside: `ZOO[name]() -> (model, batch)`."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Made = tuple[nn.Module, tuple[Tensor, ...]]


class Mlp(nn.Module):
    def __init__(self, widths=(17, 301, 301, 5), act=F.gelu, *, bias=True) -> None:
        super().__init__()
        pairs = itertools.pairwise(widths)
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=bias) for a, b in pairs)
        self.act = act

    def forward(self, x):
        for layer in self.layers[:-1]:
            x = self.act(layer(x))
        return self.layers[-1](x).square().mean()


class Norm(nn.Module):
    """RMSNorm in plain operators."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(dim) + 0.5)

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int, *, causal=True, rope=False) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.causal, self.rope = heads, kv_heads, causal, rope
        self.size = dim // heads
        self.q = nn.Linear(dim, dim, bias=False)
        self.kv = nn.Linear(dim, 2 * kv_heads * self.size, bias=False)
        self.o = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        b, t, d = x.shape
        q = self.q(x).view(b, t, self.heads, self.size).transpose(1, 2)
        k, v = self.kv(x).view(b, t, 2, self.kv_heads, self.size).permute(2, 0, 3, 1, 4)
        if self.rope:
            q, k = self._turned(q, t), self._turned(k, t)
        if self.kv_heads != self.heads:
            k, v = (each.repeat_interleave(self.heads // self.kv_heads, 1) for each in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.o(y.transpose(1, 2).reshape(b, t, d))

    def _turned(self, x, length):
        half = self.size // 2
        angle = torch.arange(length)[:, None] * (100.0 ** -(torch.arange(half) / half))
        a, b = x[..., :half], x[..., half:]
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class SwiGlu(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Dense mixture of experts: every expert sees every token, gates weigh."""

    def __init__(self, dim: int, hidden: int, num: int) -> None:
        super().__init__()
        self.router = nn.Linear(dim, num, bias=False)
        self.experts = nn.ModuleList(SwiGlu(dim, hidden) for _ in range(num))

    def forward(self, x):
        top, index = self.router(x).topk(2, dim=-1)
        gates = torch.zeros_like(self.router(x)).scatter(-1, index, top.softmax(-1))
        return sum(gates[..., i : i + 1] * e(x) for i, e in enumerate(self.experts))


class Block(nn.Module):
    def __init__(self, dim, attention, mlp, norm) -> None:
        super().__init__()
        self.n1, self.n2, self.attention, self.mlp = norm(dim), norm(dim), attention, mlp

    def forward(self, x):
        x = x + self.attention(self.n1(x))
        return x + self.mlp(self.n2(x))


class Lm(nn.Module):
    def __init__(self, blocks, dim=48, vocab=131, *, positions=0, tied=False, norm=Norm) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.positions = nn.Embedding(positions, dim) if positions else None
        self.blocks, self.norm = nn.ModuleList(blocks), norm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        if self.positions is not None:
            x = x + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def _ids(batch: int, length: int, vocab: int = 131) -> tuple[Tensor]:
    return (torch.randint(0, vocab, (batch, length)),)


def llama(layers=3, dim=48, heads=4, kv_heads=2, **rest) -> Made:
    blocks = [
        Block(dim, Attention(dim, heads, kv_heads, rope=True), SwiGlu(dim, 2 * dim + 7), Norm)
        for _ in range(layers)
    ]
    return Lm(blocks, dim, **rest), _ids(2, 33)


def gpt2(layers=3, dim=40, **rest) -> Made:
    blocks = [
        Block(
            dim,
            Attention(dim, 4, 4),
            nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)),
            nn.LayerNorm,
        )
        for _ in range(layers)
    ]
    return Lm(blocks, dim, positions=64, norm=nn.LayerNorm, **rest), _ids(3, 29)


def mixtral() -> Made:
    blocks = [Block(48, Attention(48, 4, 2), Experts(48, 40, 4), Norm) for _ in range(2)]
    return Lm(blocks, 48), _ids(2, 21)


class Encoder(nn.Module):
    def __init__(self, layers: int = 2, dim: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(97, dim)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, 4, 3 * dim, dropout=0.0, batch_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(dim, 3)

    def forward(self, ids, labels):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x.mean(1)), labels)


class Vit(nn.Module):
    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, dim, 5, stride=5)
        self.cls = nn.Parameter(torch.randn(1, 1, dim))
        self.blocks = nn.ModuleList(
            Block(
                dim,
                Attention(dim, 4, 4, causal=False),
                nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim)),
                nn.LayerNorm,
            )
            for _ in range(2)
        )
        self.head = nn.Linear(dim, 7)

    def forward(self, images, labels):
        x = self.patch(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x[:, 0]), labels)


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 33, 3, bias=False),
            nn.GroupNorm(3, 33),
            nn.SiLU(),
        )
        self.head = nn.Linear(33, 5)

    def forward(self, x, labels):
        return F.cross_entropy(self.head(self.layers(x).mean((2, 3))), labels)


class Unet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.mid = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 1, 1)
        self.up, self.out = nn.ConvTranspose2d(8, 8, 2, 2), nn.Conv2d(11, 3, 1)

    def forward(self, x):
        y = F.gelu(self.mid(F.gelu(self.down(x))))
        return F.mse_loss(self.out(torch.cat([x, self.up(y)], 1)), x)


class Gru(nn.Module):
    """A recurrence written out: many small uses of the same weights."""

    def __init__(self, dim: int = 23) -> None:
        super().__init__()
        self.cell = nn.GRUCell(dim, dim)

    def forward(self, x):
        state = torch.zeros_like(x[:, 0])
        for step in x.unbind(1):
            state = self.cell(step, state)
        return state.square().sum()


class Frozen(Mlp):
    """The middle layer is not trained."""

    def __init__(self) -> None:
        super().__init__((31, 77, 77, 3))
        self.layers[1].requires_grad_(False)


class Lora(nn.Module):
    def __init__(self, dim: int = 64, rank: int = 3) -> None:
        super().__init__()
        self.base = nn.Linear(dim, dim).requires_grad_(False)
        self.a, self.b = nn.Linear(dim, rank, bias=False), nn.Linear(rank, dim, bias=False)

    def forward(self, x):
        return (self.base(x) + self.b(self.a(x))).tanh().square().mean()


class Checkpointed(nn.Module):
    """Blocks under torch.utils.checkpoint, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            Block(32, Attention(32, 4, 4), SwiGlu(32, 90), nn.LayerNorm) for _ in range(3)
        )

    def forward(self, x):
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        return x.square().mean()


class InPlace(nn.Module):
    """A buffer that forward updates, values written in place, a result that is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(19, 41)
        self.register_buffer("seen", torch.zeros(41))

    def forward(self, x):
        y = self.linear(x)
        self.seen += y.detach().mean(0)
        y = y.clone().mul_(2.0)
        y[:, :7] = 0.5
        return (y.t()[3:] * self.seen.sum()).relu().mean()


class TwoResults(nn.Module):
    """The caller keeps the logits as well as the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(50, 201), nn.Linear(201, 11)

    def forward(self, x, labels):
        logits = self.head(self.body(x).relu())
        return F.cross_entropy(logits, labels), logits


def _half(made: Made) -> Made:
    model, batch = made
    return model.to(torch.bfloat16), batch


def _labels(batch: int, classes: int) -> Tensor:
    return torch.randint(0, classes, (batch,))


ZOO: dict[str, Callable[[], Made]] = {
    "mlp": lambda: (Mlp(), (torch.randn(511, 17),)),
    "mlp_deep": lambda: (Mlp((64,) * 9 + (1,), torch.tanh), (torch.randn(129, 64),)),
    "mlp_no_bias_odd": lambda: (Mlp((13, 127, 1), F.silu, bias=False), (torch.randn(77, 13),)),
    "mlp_bf16": lambda: (Mlp().to(torch.bfloat16), (torch.randn(511, 17).to(torch.bfloat16),)),
    "llama": llama,
    "llama_deep": lambda: llama(6, 32, 4, 4),
    "llama_tied": lambda: llama(2, tied=True),
    "llama_bf16": lambda: _half(llama(2)),
    "gpt2": gpt2,
    "gpt2_tied": lambda: gpt2(2, tied=True),
    "mixtral": mixtral,
    "encoder": lambda: (Encoder(), (torch.randint(0, 97, (3, 17)), _labels(3, 3))),
    "vit": lambda: (Vit(), (torch.randn(3, 3, 25, 20), _labels(3, 7))),
    "conv": lambda: (Conv(), (torch.randn(4, 3, 31, 29), _labels(4, 5))),
    "unet": lambda: (Unet(), (torch.randn(2, 3, 24, 20),)),
    "gru": lambda: (Gru(), (torch.randn(9, 7, 23),)),
    "frozen": lambda: (Frozen(), (torch.randn(65, 31),)),
    "lora": lambda: (Lora(), (torch.randn(33, 64),)),
    "checkpointed": lambda: (Checkpointed(), (torch.randn(2, 37, 32),)),
    "in_place": lambda: (InPlace(), (torch.randn(53, 19),)),
    "two_results": lambda: (TwoResults(), (torch.randn(71, 50), _labels(71, 11))),
}
