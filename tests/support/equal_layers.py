"""Models of equal layers, each with something odd about them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Dropouts(nn.Module):
    """Draws random numbers in each layer."""

    def __init__(self, dim: int = 24, layers: int = 5) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, 4, 40, dropout=0.3, batch_first=True)
            for _ in range(layers)
        )

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Mixed(nn.Module):
    """Two kinds of layers in turn, then equal ones that share their weights."""

    def __init__(self, dim: int = 20) -> None:
        super().__init__()
        kinds = (nn.GELU, nn.Tanh)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), kind(), nn.Linear(3 * dim, dim)
            )
            for _ in range(5)
            for kind in kinds
        )
        self.shared = nn.Sequential(
            nn.Linear(dim, dim), nn.SiLU(), nn.LayerNorm(dim), nn.Linear(dim, dim)
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        for _ in range(4):
            x = x + self.shared(x)
        return x.square().mean()


class Collecting(nn.Module):
    """Gives what each layer made, and a loss of each."""

    def __init__(self, dim: int = 20, layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.GELU(), nn.Linear(3 * dim, dim)
            )
            for _ in range(layers)
        )
        self.routers = nn.ModuleList(nn.Linear(dim, 3) for _ in range(layers))

    def forward(self, x):
        states, losses = [], []
        for layer, router in zip(self.layers, self.routers, strict=True):
            weights = router(x).softmax(-1)
            losses.append(weights.square().mean())
            x = x + layer(x) * weights[..., :1]
            states.append(x)
        return x.square().mean() + 0.1 * sum(losses) + states[2].mean()


class Caching(nn.Module):
    """Gives the values of attention of each layer, views of products that backward reads."""

    def __init__(
        self, dim: int = 24, heads: int = 3, layers: int = 6, turned: bool = False
    ) -> None:
        super().__init__()
        self.heads, self.turned = heads, turned
        self.weights = nn.ParameterList(torch.randn(dim, dim) / dim for _ in range(layers))

    def forward(self, x):
        rows, dim = x.shape[:-1], x.shape[-1]
        cache = []
        for weight in self.weights:
            values = x.reshape(-1, dim) @ weight
            if self.turned:
                values = values.t().unsqueeze(0).view(self.heads, -1, rows.numel()).transpose(1, 2)
                values = values.unflatten(1, rows).permute(1, 0, 2, 3)
            else:
                values = values.view(*rows, self.heads, -1).permute(0, 2, 1, 3)
            mixed = (values @ values.transpose(-1, -2)).softmax(-1) @ values
            cache.append(values)
            x = x + mixed.permute(0, 2, 1, 3).reshape(x.shape)
        return x.square().mean() + sum(each.pow(3).mean() for each in cache)


class Watched(Collecting):
    """Layers whose routers are read behind all of them without a gradient, which theirs then is not."""

    def forward(self, x):
        seen = []
        for layer, router in zip(self.layers, self.routers, strict=True):
            x = x + layer(x)
            seen.append(router(x))
        with torch.no_grad():
            scale = 1 + sum(each.softmax(-1).square().mean() for each in seen)
        return x.square().mean() * scale


class Parts(nn.Module):
    """Gives a part of what each layer makes that begins inside of it."""

    def __init__(self, dim: int = 12, layers: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(dim, dim)
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(layers))

    def forward(self, x):
        x, parts = self.first(x), []
        for layer in self.layers:
            made = layer(x).tanh()
            x = x + made
            parts.append(made[-1])
        return x.square().mean() + sum(each.cos().mean() for each in parts)


class Tops(Parts):
    """Gives the first rows of what each layer makes, all of which stays in memory with them."""

    def forward(self, x):
        x, tops = self.first(x), []
        for layer in self.layers:
            made = layer(x.sin())
            x = x + made.tanh().cos()
            tops.append(made[:4])
        return x.square().mean() + sum(each.cos().mean() for each in tops)


class Images(nn.Module):
    """Convolutions, whose inputs Inductor lays out in its own way."""

    def __init__(self, channels: int = 11, layers: int = 6) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 1)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(channels, channels, 3, padding=1),
                nn.SiLU(),
                nn.Conv2d(channels, channels, 1),
            )
            for _ in range(layers)
        )

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


class Normed(nn.Module):
    """Layers that write their buffers."""

    def __init__(self, layers: int = 5) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 12))
            for _ in range(layers)
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


class InPlace(nn.Module):
    """Values of their own are written in place."""

    def __init__(self, layers: int = 5) -> None:
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 30), nn.ReLU(), nn.Linear(30, 12))
            for _ in range(layers)
        )

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            made = layer(x)
            made += x
            x = made
        return x.square().mean()


class LowRank(nn.Module):
    """Frozen weights with trained additions of low rank."""

    def __init__(self, dim: int = 24, layers: int = 5) -> None:
        super().__init__()
        self.base = nn.ModuleList(nn.Linear(dim, dim) for _ in range(layers))
        self.base.requires_grad_(False)
        self.down = nn.ModuleList(nn.Linear(dim, 3, bias=False) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(3, dim, bias=False) for _ in range(layers))

    def forward(self, x):
        for base, down, up in zip(self.base, self.down, self.up, strict=True):
            x = x + torch.tanh(base(x) + 2.0 * up(down(x)))
        return x.square().mean()


class TwiceTheGradient(torch.autograd.Function):
    """A derivative of its own, which is wrong on purpose."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x.cos() * 2


def _scaled_by(factor: float) -> Callable[[Tensor], Tensor]:
    def scaled(x):
        return x * factor

    return torch.compiler.allow_in_graph(scaled)


SCALED = [_scaled_by(0.1 * n) for n in range(1, 7)]


class Residual(nn.Module):
    """Equal layers, and one odd thing about how they are used."""

    def __init__(self, what: str, dim: int = 16, layers: int = 6) -> None:
        super().__init__()
        self.what = what.replace(" ", "_")
        self.first = nn.Linear(dim, dim)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim)
            )
            for _ in range(layers)
        )

    def forward(self, x):
        return getattr(self, self.what)(self.first(x))

    def no_grad_inside(self, x):
        for layer in self.layers:
            with torch.no_grad():
                gate = layer(x).abs().mean(-1, keepdim=True)
            x = x + layer(x) * gate
        return x.square().mean()

    def written_results(self, x):
        for layer in self.layers:
            made = layer(x)
            made.mul_(0.5)
            made[:, :3] = 0
            x = x + made
        return x.square().mean()

    def written_stream(self, x):
        x = x.clone()
        for layer in self.layers:
            x.add_(layer(x.clone()))
        return x.square().mean()

    def own_derivative(self, x):
        for layer in self.layers:
            x = x + TwiceTheGradient.apply(layer(x))
        return x.square().mean()

    def autocast_around(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for layer in self.layers:
                x = x + layer(x)
        return x.float().square().mean()

    def autocast_within(self, x):
        for layer in self.layers:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                made = layer(x)
            x = x + made.float()
        return x.square().mean()

    def twice_with_dropout(self, x):
        a = b = x
        for layer in self.layers:
            a = a + F.dropout(layer(a), 0.5)
        for layer in self.layers:
            b = b + F.dropout(layer(b), 0.5)
        return F.mse_loss(a, b)

    def conjugates(self, x):
        """What a layer gives is a conjugate that nobody has computed yet."""
        y = torch.view_as_complex(x.reshape(-1, 8, 2).contiguous())
        for layer in self.layers:
            seen = torch.view_as_real(y.resolve_conj()).reshape(-1, 16)
            made = torch.view_as_complex(layer(seen).reshape(-1, 8, 2).contiguous())
            y = (y * 0.5 + made * y.conj()).conj()
        return torch.view_as_real(y.resolve_conj()).square().mean()

    def constants(self, x):
        for layer in self.layers:
            x = x + layer(x) * torch.tensor([0.5, 0.25, 1.5, 2.0]).repeat(4)
        return x.square().mean()

    def functions_of_users(self, x):
        """Functions that Dynamo does not look into share a name, and do other things."""
        for layer, scaled in zip(self.layers, SCALED, strict=True):
            x = x + scaled(layer(x))
        return x.square().mean()

    def read_twice_at_once(self, x):
        """One operator reads a value at two places, and others read it, too."""
        kept = []
        for layer in self.layers:
            x = x + torch.addcmul(x, x, layer(x).tanh(), value=0.3)
            kept.append(x)
        return sum(each.tanh().square().mean() for each in kept)

    def storage_behind(self, x):
        seen = torch.cat([x, x])[2:7]
        for layer in self.layers:
            x = x + layer(x) * torch.as_strided(seen, (5, 16), (16, 1), 16)
        return x.square().mean()

    def strides(self, x):
        for layer in self.layers:
            x = (x + layer(x)).t().contiguous().t()
        return x.square().mean()
