"""What forward writes into a weight is kept where ranks hold it whole, and refused, not lost, where it is a copy."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torchloom
from support.pool import run_ranks
from support.runs import SGD, micro_step, sharded
from torchloom.errors import ShardError

NUM, WIDTH = 11, 6


class Layer(nn.Module):
    """A linear layer whose forward does something to its weight first."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def touch(self) -> None: ...

    def forward(self, x: Tensor) -> Tensor:
        self.touch()
        return F.linear(x, self.weight, self.bias).square().mean()


class Clamps(Layer):
    @torch.no_grad()
    def touch(self):
        self.weight.clamp_(-0.5, 0.5)


class Indexes(Layer):
    @torch.no_grad()
    def touch(self):
        self.weight[0] = 0.0


class Initializes(Layer):
    def touch(self):
        nn.init.zeros_(self.bias)


class Foreach(Layer):
    @torch.no_grad()
    def touch(self):
        torch._foreach_mul_([self.weight, self.bias], 0.5)


class Views(Layer):
    def touch(self):
        self.weight.detach().view(-1)[:3].zero_()


class DataIsAssigned(Layer):
    def touch(self) -> None:
        self.weight.data = F.normalize(self.weight.data)


class DataIsWritten(Layer):
    """No counter tells of writes through `data`."""

    def touch(self) -> None:
        self.weight.data.clamp_(-0.5, 0.5)


class Halves(Layer):
    """A variable that lives on after other weights were gathered."""

    def touch(self):
        data = [self.weight.data, self.bias.data][0]
        data *= 0.5


class Flips(Layer):
    """A view, in a function; the sum stays."""

    def touch(self):
        _flip(getattr(self, "weight"))  # noqa: B009


def _flip(weight: Tensor) -> None:
    weight.data.view(-1).copy_(weight.data.flip(0).reshape(-1))


class Assigned(Layer):
    """Dynamo leaves the assignment to Python, with a weight that a graph returned."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        weight.data = F.normalize(weight.data)
        return F.linear(x, weight, self.bias).square().mean()


class InLeaf(Layer):
    """A leaf module gathers its weights once for a call."""

    _z3_leaf = True

    def touch(self):
        self.weight.data[1] = 0.25


class OfChild(Layer):
    """A part of another module's `data`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.inner.weight.data[:2] = 0.25
        return super().forward(self.inner(x))


class Hooked(Layer):
    """`data` is another tensor while a module runs, as where weights are rounded."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.inner.register_forward_pre_hook(self.round)

    @staticmethod
    def round(module: nn.Module, args: object) -> None:
        module.weight.data = (module.weight.data * 16).round() / 16

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.inner(x))


class Renormed(nn.Module):
    """The name of an embedding's operator does not tell that it writes."""

    make = staticmethod(lambda: nn.Embedding(NUM, WIDTH, max_norm=0.5))

    def __init__(self) -> None:
        super().__init__()
        self.table = self.make()

    def rows(self, ids: Tensor) -> Tensor:
        return self.table(ids)

    def forward(self, x: Tensor) -> Tensor:
        return self.rows(torch.arange(NUM)).square().mean()


class Bagged(Renormed):
    make = staticmethod(lambda: nn.EmbeddingBag(NUM, WIDTH, max_norm=0.5, mode="sum"))

    def rows(self, ids: Tensor) -> Tensor:
        return self.table(ids[None])


class Functional(Renormed):
    make = staticmethod(lambda: nn.Embedding(NUM, WIDTH))

    def rows(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.table.weight, max_norm=0.5)


class Out(Functional):
    def rows(self, ids: Tensor) -> Tensor:
        weight = self.table.weight
        with torch.no_grad():
            torch.mul(weight, 0.5, out=weight)
        return F.embedding(ids, weight)


BY_OPERATOR = [Renormed, Bagged, Functional, Out]
BY_CODE = [Clamps, Indexes, Initializes, Foreach, Views, DataIsAssigned, DataIsWritten]
BY_CODE += [Halves, Flips, Assigned, InLeaf, OfChild, Hooked]


class Late(Layer):
    """Writes in its fourth forward pass, which is compared, as the first ones and ever fewer later ones are."""

    calls = 0

    def touch(self):
        self.calls += 1
        if self.calls == 4:
            self.weight.data.clamp_(-0.5, 0.5)


class Innocent(Layer):
    """Writes into values that it made of weights, and into buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.float().clone()
        with torch.no_grad():
            self.seen += 1
        weight = weight * 2
        weight.clamp_(-0.5, 0.5)
        norm = self.weight.data.requires_grad_(False).norm()
        x = F.linear(x, weight, self.bias) * 2.0
        x[0] = 0.0
        x /= 1 + norm
        x[:] = x + 0 * self.bias.data
        return x.square().mean()


def told(
    kind: type[nn.Module], stage: int, compiled: bool, threshold: int = 0, **sections: object
) -> str | float:
    """Return the largest norm of a row after a step, or what was said against them."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = nn.Sequential(kind())
    backend = "aot_eager" if compiled else None
    try:
        engine = sharded(
            model, stage, optimizer=SGD, backend=backend, threshold=threshold, **sections
        )
        micro_step(engine, torch.randn(3, WIDTH))
        engine(torch.randn(3, WIDTH))  # what the step has moved is written once more
    except ShardError as error:
        return str(error)
    with torchloom.shard.gathered(model):
        return max(float(p.detach().norm(dim=-1).max()) for p in model.parameters())


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_write_is_kept_or_refused(stage: int, compiled: bool) -> None:
    is_kept = stage < 2 and not compiled
    kinds = [*BY_OPERATOR, *(BY_CODE if stage > 1 else [Clamps, DataIsAssigned] * is_kept)]
    # At stage 2 whole parameters, whose gradients are averaged, are copies as well.
    whole = 10**6 if stage == 2 else 0

    def fn(rank: int) -> dict[str, str | float]:
        return {
            kind.__name__: told(kind, stage, compiled, whole * (kind in BY_CODE)) for kind in kinds
        }

    for found in run_ranks(2, fn):
        for name, text in found.items():
            if is_kept:
                assert isinstance(text, float), (name, text)
                assert text <= 0.501 or name not in ("Renormed", "Bagged", "Functional"), name
            else:
                which = "bias" if name == "Initializes" else "0."
                start = "forward writes into the weight"
                assert str(text).startswith(start) and which in text, (name, text)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("stage", "world"), [(0, 2), (1, 2), (3, 2), (3, 1)])
def test_a_write_into_a_cast_weight_is_refused(stage: int, world: int, compiled: bool) -> None:
    def fn(rank: int) -> list[str | float]:
        more = {"bf16": {"enabled": True}, "gradient_accumulation_steps": 2}
        return [told(kind, stage, compiled, **more) for kind in (Clamps, DataIsWritten, Renormed)]

    for found in run_ranks(world, fn):
        for text, weight in zip(found, ("0.weight", "0.weight", "0.table.weight"), strict=True):
            assert str(text).startswith(f"forward writes into the weight '{weight}'"), text


@pytest.mark.parametrize("compiled", [False, True])
def test_what_is_made_of_a_weight_may_be_written(compiled: bool) -> None:
    def fn(rank: int) -> list[str | float]:
        return [told(Innocent, stage, compiled) for stage in (0, 1, 2, 3)]

    for found in run_ranks(2, fn):
        assert all(isinstance(each, float) for each in found), found


def test_cast_weights_train_as_before_when_compiled() -> None:
    def fn(rank: int) -> list[float]:
        losses = []
        for compiled in (False, True):
            torch.manual_seed(0)
            more = {"bf16": {"enabled": True}, "gradient_accumulation_steps": 2}
            engine = sharded(Layer(), 1, optimizer=SGD, **more)
            if compiled:
                engine.compile(backend="aot_eager", compile_kwargs={"fullgraph": True})
            losses.append([micro_step(engine, torch.ones(3, WIDTH)) for _ in range(4)][-1])
        return losses

    for eager, compiled in run_ranks(2, fn):
        assert eager == pytest.approx(compiled, rel=1e-2)


def test_world_of_one_in_fp32_keeps_writes() -> None:
    def fn(rank: int) -> list[float | str]:
        return [told(kind, 3, True) for kind in (Renormed, Bagged, Functional)]

    (found,) = run_ranks(1, fn)
    assert all(isinstance(each, float) and each <= 0.501 for each in found), found


def test_a_write_in_a_later_pass_is_refused_in_that_pass() -> None:
    def fn(rank: int) -> list[int]:
        engine = sharded(Late(), 3, optimizer=SGD)
        with pytest.raises(ShardError, match="'weight'"):
            for _ in range(5):
                micro_step(engine, torch.ones(3, WIDTH))
        return [engine.module.calls, engine.global_steps]

    assert run_ranks(2, fn) == [[4, 3]] * 2


def test_evaluation_in_inference_mode_works() -> None:
    def fn(rank: int) -> list[float]:
        torch.manual_seed(0)
        engine = sharded(nn.Sequential(Innocent()), optimizer=SGD)
        found = []
        for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
            with mode():
                found.append(float(engine(torch.ones(3, WIDTH)).detach()))
        return found

    for found in run_ranks(2, fn):
        assert len(set(found)) == 1
