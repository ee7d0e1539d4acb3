"""Models that decide by size in all the ways that there are, and some that do not."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchloom.serve import Contract, Dim

BATCH = Dim("batch", 1, 64)


class Plain(nn.Module):
    """Does the same for every size."""

    def __init__(self, width: int = 16, eps: float = 1e-5) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width, eps=eps)
        self.scale = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(torch.relu(self.inner(x))) * self.scale


class Of(nn.Module):
    """Computes what a function does."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Branching(nn.Module):
    """Takes another branch below four rows."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] >= 4:
            return x * 2
        return x * 100


class Blocks(nn.Module):
    """Works on blocks of eight, and on two rows for each of another argument."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor]:
        assert x.shape[1] % 8 == 0
        assert pairs.shape[0] == 2 * x.shape[0]
        blocks = self.inner(x.view(x.shape[0], x.shape[1] // 8, 8)).reshape(x.shape[0], -1)
        one, two = pairs.chunk(2)
        return blocks + one * two, torch.cat([blocks, blocks]) + pairs


class Squeezing(nn.Module):
    """Returns another rank at one row, without asking for the size."""

    def forward(self, x: Tensor) -> Tensor:
        return x.squeeze() + 1


class Striding(nn.Module):
    """Asks for a property of strides that is another at one row."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.t().is_contiguous() else x * 100


class Pinned(nn.Module):
    """Adds eight rows, whatever it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.ones(8, 16)


class Viewed(nn.Module):
    """Folds its 16 columns to 24, which three rows at a time can be."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view(-1, 24).sum(1)


class Block(nn.Module):
    """A layer like that of a decoder."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = self.q(y), self.k(y), self.v(y)
        weights = torch.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, dim=-1)
        x = x + weights @ v
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Stack(nn.Module):
    """Equal layers between an embedding and a head."""

    def __init__(self, num_layers: int, width: int = 16, vocabulary: int = 31) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(num_layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


CALLS: list[int] = []


@torch.library.custom_op("serve_tests::attend", mutates_args=("out",))
def attend(x: Tensor, out: Tensor) -> None:
    """Count a call, and write twice the input."""
    CALLS.append(len(x))
    out.copy_(x * 2)


@attend.register_fake
def _(x: Tensor, out: Tensor) -> None:
    return None


class Attending(nn.Module):
    """Calls an operator that stays as it is, in each of its layers."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
            out = torch.empty_like(x)
            attend(x, out)
            x = out + 1
        return x


SEEN: list[int] = []


def look(graph: torch.fx.Graph) -> None:
    """Note a graph: a pass that changes nothing."""
    SEEN.append(len(graph.nodes))


def rows(dim: Dim = BATCH) -> Contract:
    """Return the contract of models that take `x` of 16 columns."""
    return Contract({"x": (dim, 16)})


def made(kind: type[nn.Module], *args: object, **kwargs: object) -> nn.Module:
    """Return a model with the same random weights each time, ready to serve."""
    torch.manual_seed(0)
    return kind(*args, **kwargs).eval()


class Kinds(nn.Module):
    """Does what a runtime has to take care of, by name."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.inner = nn.Linear(16, 16)
        self.register_buffer("seen", torch.zeros(16))
        self.table = [0.5, 1.5, -2.0, 4.0]

    def forward(self, x: Tensor) -> object:
        match self.kind:
            case "computes":
                return torch.relu(self.inner(x)).sum(-1)
            case "returns an argument":
                return self.inner(x), x
            case "returns a view of an argument":
                return x[:, :8], self.inner(x)
            case "returns the bits of an argument":
                return x.view(torch.int32), self.inner(x)
            case "returns views of what it writes to":
                x.mul_(2)
                self.seen.add_(x.sum(0))
                half = x.view(2 * x.shape[0], 8)
                return x[1:], half.t(), x.unfold(1, 4, 2), self.seen[8:], self.inner.weight.t(), x
            case "returns views of one result":
                y = self.inner(x)
                return y[:, :8], y[:, 8:]
            case "writes to a buffer":
                self.seen.add_(x.sum(0))
                return x + self.seen
            case "writes to its argument":
                x.mul_(2)
                return x.sum()
            case "holds a table":
                return x[:, :4] * torch.tensor(self.table)
            case "convolves":
                return torch.nn.functional.conv1d(x[:, None], self.inner.weight[:, None, :3])
            case "draws":
                return x + torch.rand(x.shape[0], 16)
            case "sorts":
                values, places = torch.sort(x, dim=-1)
                return values, places
        raise AssertionError(self.kind)
