"""Compiled stage 3: parts that Dynamo leaves to Python keep pieces of weights from forward to backward, too."""

from __future__ import annotations

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import torchloom
from support.memory import measure
from support.pool import run_ranks
from support.runs import SGD, sharded

WIDTH = 192
WEIGHT_BYTES = WIDTH * WIDTH * 4


class Traced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.lin(x))


class Disabled(Traced):
    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.lin(x)) + x


class Checkpointed(Traced):
    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)


class Hooked(Traced):
    """Keeps what it saves in half precision, as users do who are short of memory."""

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.half(), lambda t: t.float()):
            return torch.relu(self.lin(x)) + x


def train(
    kinds: tuple[type[Traced], ...], backend: str | None
) -> tuple[list[float], int, list[Tensor]]:
    """Return losses, the bytes that wait for backward after a warm forward pass, and the weights."""
    torch.manual_seed(3)
    model = nn.Sequential(*[kind() for kind in kinds])
    model[0].lin.bias.requires_grad_(False)
    engine = sharded(model, optimizer=SGD)
    if backend is not None:
        engine.compile(backend=backend)
    losses, kept = [], 0
    for _ in range(3):
        x = torch.randn(3, WIDTH)
        forward = measure(lambda x=x: engine(x).square().mean())
        kept = forward.kept
        losses.append(forward.result.item())
        engine.backward(forward.result)
        engine.step()
    with torchloom.shard.gathered(model):
        return losses, kept, [param.detach().clone() for param in model.parameters()]


def both(rank: int, kinds: tuple[type[Traced], ...], backend: str):
    eager, compiled = train(kinds, None), train(kinds, backend)
    for one, other in zip((eager[0], *eager[2]), (compiled[0], *compiled[2]), strict=True):
        torch.testing.assert_close(torch.as_tensor(one), torch.as_tensor(other))
    return eager[1], compiled[1]


@pytest.mark.parametrize(
    "kinds",
    [
        (Traced, Disabled, Disabled, Disabled),
        (Checkpointed, Traced, Checkpointed),
    ],
    ids=lambda kinds: "-".join(kind.__name__ for kind in kinds),
)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_no_whole_weight_waits_for_backward(kinds, backend) -> None:
    for eager, compiled in run_ranks(2, both, kinds, backend, timeout_s=300):
        assert eager < WEIGHT_BYTES // 2  # the activations of three samples
        assert compiled < WEIGHT_BYTES // 2


def test_hooks_of_the_user_inside_go_first() -> None:
    for _, compiled in run_ranks(2, both, (Traced, Hooked, Disabled), "aot_eager"):
        # What they make of a weight is theirs to keep.
        assert WEIGHT_BYTES // 2 <= compiled < WEIGHT_BYTES


def test_hooks_of_the_user_around_see_all_but_weights() -> None:
    def fn(rank: int) -> tuple[list[set[int]], list[float]]:
        torch.manual_seed(1)
        model = nn.Sequential(Traced(), Disabled())
        engine = sharded(model, optimizer=SGD)
        losses = []
        sizes = []
        for backend in (None, "aot_eager"):
            if backend is not None:
                engine.compile(backend=backend)
            packed = []
            with torch.autograd.graph.saved_tensors_hooks(
                lambda t, packed=packed: packed.append(t) or t, lambda t: t
            ):
                loss = engine(torch.ones(3, WIDTH)).square().mean()
            sizes.append({each.numel() for each in packed})
            losses.append(loss.item())
            engine.backward(loss)
            engine.zero_grad()
        return sizes, losses

    for sizes, losses in run_ranks(2, fn):
        assert losses[0] == pytest.approx(losses[1])
        for seen in sizes:
            assert 3 * WIDTH in seen
            assert WIDTH * WIDTH not in seen


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_checkpoints_around_an_engine_keep_no_activations(backend) -> None:
    def fn(rank: int) -> tuple[float, float, int]:
        torch.manual_seed(1)
        model = nn.Sequential(Disabled(), Disabled(), Traced(), Disabled())
        engine = sharded(model, batch=64, optimizer=SGD)
        x = torch.randn(64, WIDTH)
        losses = [engine(x).square().mean().item() for _ in range(1)]
        if backend is not None:
            engine.compile(backend=backend)
        kept = 0
        for _ in range(2):
            forward = measure(
                lambda: (
                    torch.utils.checkpoint.checkpoint(engine, x, use_reentrant=False)
                    .square()
                    .mean()
                )
            )
            kept = forward.kept
            losses.append(forward.result.item())
            engine.backward(forward.result)
            engine.step()
        return losses[1] - losses[0], losses[2] - losses[1], kept

    for same, less, kept in run_ranks(2, fn):
        assert abs(same) < 1e-6
        assert less < 0
        assert kept < 3 * 64 * WIDTH * 4  # the output and its square


def test_evaluation_keeps_nothing_and_hooks_end_with_the_call() -> None:
    def fn(rank: int) -> bool:
        torch.manual_seed(1)
        model = nn.Sequential(Traced(), Disabled())
        engine = sharded(model)
        engine.compile(backend="aot_eager")
        with torch.no_grad():
            quiet = measure(lambda: engine(torch.ones(3, WIDTH)))
            quiet = measure(lambda: engine(torch.ones(3, WIDTH)))
        assert quiet.kept < WEIGHT_BYTES // 2
        with pytest.raises(RuntimeError):
            engine(torch.ones(3, WIDTH + 1))
        engine(torch.ones(3, WIDTH))
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        return True

    assert run_ranks(2, fn) == [True, True]
