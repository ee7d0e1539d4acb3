"""Equal layers that are compiled as one body train to the weights of the flat compile, to the bit."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torchloom
from support import zoo
from support.pool import run_ranks

STEPS = 3


class Trained:
    """What a run came to, in numbers that can be compared."""

    def __init__(self, losses: list[float], weights: list[list[float]], report: Any) -> None:
        self.losses, self.weights = losses, weights
        self.calls = [len(each.layers) for graph in report.graphs for each in graph.regions]
        self.reasons = [each for graph in report.graphs for each in graph.flat_because]
        self.fallbacks = report.fallbacks


def train(
    make: Callable[[], tuple[nn.Module, tuple[Tensor, ...]]],
    rank: int,
    *,
    regions: bool,
    stage: int = 3,
    backend: str = "aot_eager",
    config: dict[str, Any] | None = None,
) -> Trained:
    torch.manual_seed(0)
    model, batch = make()
    given = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 50},
        "steps_per_print": float("inf"),
        **copy.deepcopy(config or {}),
    }
    given["compile"] = {"strict": True, "regions": regions, **given.get("compile", {})}
    engine, *_ = torchloom.initialize(model=model, config=given)
    engine.compile(backend=backend)
    losses = []
    for step in range(STEPS):
        torch.manual_seed(100 * step + rank)
        own = tuple(each if each.dtype is torch.long else each + 0.1 * rank for each in batch)
        loss = engine(*own)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    weights = [each.flatten().tolist() for each in engine.module.state_dict().values()]
    return Trained(losses, weights, engine.compile_report())


def both(make: Any, **options: Any) -> tuple[Trained, Trained]:
    def run(rank: int) -> tuple[Trained, Trained]:
        return tuple(train(make, rank, regions=each, **options) for each in (False, True))

    first, _ = run_ranks(2, run, timeout_s=300)
    return first


def check(make: Any, *, calls: list[int] | None = None, **options: Any) -> Trained:
    flat, found = both(make, **options)
    assert found.fallbacks == [] and flat.fallbacks == []
    assert flat.calls == []
    assert found.losses == flat.losses
    assert found.weights == flat.weights
    assert flat.losses[0] != flat.losses[-1]
    if calls is not None:
        assert found.calls == calls, found.reasons
    return found


def llama() -> Any:
    return zoo.llama(layers=5)


def gpt2() -> Any:
    return zoo.gpt2(layers=4)


def encoder() -> Any:
    return zoo.Encoder(layers=5), (torch.randint(0, 97, (3, 7)), torch.randint(0, 3, (3,)))


MODELS = {"llama": (llama, [5]), "encoder": (encoder, [5])}


@pytest.mark.parametrize(
    ("name", "stage"),
    [("llama", 0), ("llama", 1), ("llama", 2), ("llama", 3), ("encoder", 3)],
)
def test_equal_layers_train_as_in_the_flat_graph(name: str, stage: int) -> None:
    make, calls = MODELS[name]
    check(make, calls=calls, stage=stage)


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


class Checkpointed(nn.Module):
    """Computes each layer again in backward, random numbers included."""

    def __init__(self, dim: int = 24, layers: int = 5, p: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(dim), nn.Linear(dim, 50), nn.GELU(), nn.Linear(50, dim), nn.Dropout(p)
            )
            for _ in range(layers)
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
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

    def detached(self, x):
        for layer in self.layers:
            x = x + layer(x) * x.detach().tanh()
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

    def two_streams(self, x):
        y = x * 2
        for layer in self.layers:
            x, y = y + layer(x), x * 0.9
        return (x * y).mean()

    def skips(self, x):
        seen = [x]
        for layer in self.layers:
            x = x + layer(x)
            seen.append(x)
        return sum((a * b).mean() for a, b in zip(seen, seen[::-1], strict=True))

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

    def views(self, x):
        for layer in self.layers:
            x = (x + layer(x)).view(-1, 2, 8).transpose(1, 2).reshape(-1, 16)
        return x.square().mean()

    def complex_numbers(self, x):
        for layer in self.layers:
            made = torch.view_as_complex(layer(x).reshape(-1, 8, 2).contiguous())
            x = x + torch.view_as_real(made * 1j).reshape(-1, 16)
        return x.square().mean()

    def functions_of_users(self, x):
        """Functions that Dynamo does not look into share a name, and do other things."""
        for layer, scaled in zip(self.layers, SCALED, strict=True):
            x = x + scaled(layer(x))
        return x.square().mean()

    def storage_behind(self, x):
        seen = torch.cat([x, x])[2:7]
        for layer in self.layers:
            x = x + layer(x) * torch.as_strided(seen, (5, 16), (16, 1), 16)
        return x.square().mean()

    def strides(self, x):
        for layer in self.layers:
            x = (x + layer(x)).t().contiguous().t()
        return x.square().mean()


KINDS = {
    "no grad inside": [6],
    "detached": [6],
    "written results": [6],
    "written stream": [],
    "own derivative": [6],
    "two streams": [6],
    "skips": [6],
    "autocast around": [6],
    "autocast within": [6],
    "twice with dropout": [12],
    "views": [6],
    "complex numbers": [6],
    "strides": [],
    "functions of users": [],
    "storage behind": [],
}
"""How many layers are calls of one body."""


def of(kind: type[nn.Module], *sizes: int, **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        return kind(**options), (torch.randn(*sizes),)

    return make


def experts() -> Any:
    blocks = [
        zoo.Block(48, zoo.Attention(48, 4, 2), zoo.Experts(48, 40, 4), zoo.Norm) for _ in range(4)
    ]
    return zoo.Lm(blocks, 48), (torch.randint(0, 131, (2, 21)),)


def tied() -> Any:
    return zoo.llama(layers=5, tied=True)


def tied_between() -> Any:
    model, batch = zoo.llama(layers=5)
    for block in model.blocks[1:]:
        block.mlp = model.blocks[0].mlp
    return model, batch


def half_frozen() -> Any:
    model, batch = zoo.llama(layers=9)
    model.embed.requires_grad_(False)
    model.blocks[:4].requires_grad_(False)
    return model, batch


def recurrence() -> Any:
    return zoo.Gru(), (torch.randn(3, 9, 23),)


SHARDED = {
    "experts": (experts, [4]),
    "tied": (tied, [5]),
    "tied between layers": (tied_between, [5]),
    "half frozen": (half_frozen, [4, 4]),
    "low rank": (of(LowRank, 3, 24), [4]),
    "dropout": (of(Dropouts, 3, 7, 24, layers=6), [5]),
    "checkpointed": (of(Checkpointed, 3, 7, 24, layers=6), [5]),
    "checkpointed dropout": (of(Checkpointed, 3, 7, 24, p=0.3, layers=6), [5]),
}
ODD = {
    "two kinds, then one": (of(Mixed, 3, 20), [4, 4]),
    "collecting": (of(Collecting, 3, 20), [5]),
    "buffers": (of(Normed, 9, 12), []),
    "in place": (of(InPlace, 9, 12), [5]),
    "recurrence": (recurrence, []),
    **{name: (of(Residual, 5, 16, what=name), calls) for name, calls in KINDS.items()},
}


def check_all(models: dict[str, Any]) -> None:
    """Compare several models with their flat graphs in one pair of ranks."""

    def run(rank: int) -> list[Any]:
        # Dynamo makes an object of torch.autograd.Function to trace one of a user.
        warnings.filterwarnings("ignore", message=".*should not be instantiated")
        found = []
        for make, _ in models.values():
            ways = []
            for regions in (False, True):
                torch._dynamo.reset()
                ways.append(train(make, rank, regions=regions))
            found.append(tuple(ways))
        return found

    results, _ = run_ranks(2, run, timeout_s=400)
    for (name, (_, calls)), (flat, found) in zip(models.items(), results, strict=True):
        assert found.fallbacks == [] and flat.fallbacks == [], name
        assert found.losses == flat.losses, name
        assert found.weights == flat.weights, name
        assert flat.losses[0] != flat.losses[-1], name
        assert (flat.calls, found.calls) == ([], calls), (name, found.reasons)


@pytest.mark.parametrize("part", range(2))
def test_sharded_layers_of_other_kinds_train_as_in_the_flat_graph(part: int) -> None:
    check_all(dict(list(SHARDED.items())[part::2]))


@pytest.mark.parametrize("part", range(3))
def test_odd_layers_train_as_in_the_flat_graph(part: int) -> None:
    check_all(dict(list(ODD.items())[part::3]))


def test_why_layers_stay_apart_is_told() -> None:
    found = check(of(Normed, 9, 12), calls=[])
    assert found.reasons == ["it writes to what it reads"]


SETTINGS: dict[str, dict[str, Any]] = {
    "accumulation": {"gradient_accumulation_steps": 2, "gradient_clipping": 0.1},
    "bf16": {"bf16": {"enabled": True}},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    "small buckets": {
        "compile": {"offload_activation": True},
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": 3000,
            "stage3_prefetch_bucket_size": 9000,
        },
    },
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_mean_the_same(name: str) -> None:
    check(llama, calls=[5], config=SETTINGS[name])


def test_inductor_trains_to_nearly_the_same() -> None:
    flat, found = both(gpt2, backend="inductor")
    assert found.calls == [4]
    torch.testing.assert_close(found.losses, flat.losses, rtol=1e-6, atol=0)
