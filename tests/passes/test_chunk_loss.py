"""chunk_loss: losses that compute a few rows of logits at a time, against the same losses with all logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from torchloom.errors import CompileError
from torchloom.passes import PASSES
from torchloom.pipeline import session as sessions

ROWS, WIDTH, CLASSES = 37, 16, 53
Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Any]


def of_transformers(logits: Tensor, labels: Tensor, items: Tensor | None = None) -> Tensor:
    """The loss of transformers' causal models: labels are shifted by padding, the sum is divided by a count."""
    labels = labels.masked_fill(labels == 7, -100)
    labels = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous().view(-1)
    logits = logits.float().view(-1, logits.shape[-1])
    loss = F.cross_entropy(logits, labels, reduction="mean" if items is None else "sum")
    return loss if items is None else loss / items


def mean(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return of_transformers(F.linear(h, w), y)


def capped(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return of_transformers(3.0 * torch.tanh(F.linear(h, w) / 3.0), y, torch.tensor(31.0))


def flat(h: Tensor, w: Tensor, b: Tensor, y: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(F.linear(h, w, b).flatten(0, 1), y.flatten(), **options)


def sliced(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    logits = (h @ w.t())[..., :-1, :].contiguous() * 0.5
    return F.cross_entropy(logits.view(-1, CLASSES), y[..., 1:].reshape(-1))


def under_autocast(loss: Loss, given: tuple[Tensor, ...]) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=given[0].dtype == torch.float32):
        return loss(*given)


def checkpointed_loss(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    def end(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        normed = F.layer_norm(h, (WIDTH,))
        return normed, capped(normed, w, b, y) + 0.1 * flat(normed, w, b, y)

    normed, loss = checkpoint(end, h.tanh(), w, b, y, use_reentrant=False)
    return loss + normed.square().mean()


def checkpointed_head(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    def layer(h: Tensor) -> Tensor:
        return torch.tanh(F.linear(F.linear(h, w), w.t()) / 9)

    def head(h: Tensor) -> Tensor:
        return F.linear(h.sin(), w.to(h.dtype), b)

    h = checkpoint(layer, h.tanh(), use_reentrant=False)
    return of_transformers(checkpoint(head, h, use_reentrant=False), y)


def in_autocast_behind_the_head(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    logits = F.linear(h, w)
    with torch.autocast("cpu", torch.bfloat16):
        return of_transformers(logits, y)


def with_next_tokens(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    """A second head over the same weight predicts the token after the next one."""
    ahead = F.linear(h.tanh()[:, :-2], w).float()
    return sliced(h, w, b, y) + 0.3 * F.cross_entropy(ahead.flatten(0, 1), y[:, 2:].flatten())


def sliced_behind_a_view(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    logits = F.linear(h[:, :36], w).view(8, 9, CLASSES)[:2, :8]
    return F.cross_entropy(logits.reshape(-1, CLASSES), y[0, :16])


LOSSES: dict[str, Loss] = {
    "keywords": lambda h, w, b, y: F.cross_entropy(
        F.linear(h, bias=b, weight=w).flatten(0, 1), y.flatten()
    ),
    "T5: rows are scaled": lambda h, w, b, y: mean(h * WIDTH**-0.5, w, b, y),
    "Cohere, Granite": lambda h, w, b, y: of_transformers(F.linear(h, w) * 0.0625 / -8.0, y),
    "BERT": lambda h, w, b, y: flat(F.layer_norm(F.gelu(h), (WIDTH,)), w, b, y, ignore_index=7),
    "labels of a teacher": lambda h, w, b, y: flat(h, w, b, F.linear(h, w.flip(0)).argmax(-1)),
    "detached head, squared": lambda h, w, b, y: mean(h, w.detach(), b, y).square(),
    "next tokens": with_next_tokens,
    "checkpointed loss": checkpointed_loss,
    "checkpointed head": checkpointed_head,
    "autocast behind the head": in_autocast_behind_the_head,
    "mean": mean,
    "capped": capped,
    "smooth, bias": lambda *a: flat(*a, label_smoothing=0.1),
    "sum, ignores a class": lambda *a: flat(*a, reduction="sum", ignore_index=7),
    "slice, product, scale": sliced,
    "turned": lambda h, w, b, y: F.cross_entropy(F.linear(h, w, b).transpose(1, 2), y),
    "none counts": lambda h, w, b, y: mean(h, w, b, torch.full_like(y, -100)),
    "autocast": lambda *given: under_autocast(mean, given),
    "two": lambda h, w, b, y: mean(h, w, b, y) + flat(h.flip(1), w, b, y, label_smoothing=0.2),
}


def data(dtype: torch.dtype, rows: int = ROWS) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    h = torch.randn(2, rows, WIDTH, dtype=dtype, requires_grad=True)
    w, b = (
        torch.randn(*s, dtype=dtype, requires_grad=True) for s in ((CLASSES, WIDTH), (CLASSES,))
    )
    y = torch.randint(0, CLASSES, (2, rows))
    y[0, 3:19] = 7  # a whole chunk that does not count, where losses ignore it
    return h, w, b, y


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []

    class Session(sessions.CompileSession):
        def __init__(self, **given: Any) -> None:
            super().__init__(**given)
            found.append(self.report)

    monkeypatch.setattr("torchloom.pipeline.backend.CompileSession", Session)
    torch._dynamo.reset()
    return found


def compiled(loss: Any, lowering: str = "eager", rows: int = 9, **options: Any) -> Any:
    chunked = PASSES["chunk_loss"].with_options(chunk_bytes=rows * CLASSES * 4, **options)
    options = {"lowering": lowering, "passes": [chunked], "strict": True}
    return torch.compile(loss, backend="torchloom", options=options)


def step(loss: Loss, given: tuple[Tensor, ...], tangent: float = 1.7) -> list[Tensor]:
    leaves = [each.detach().clone().requires_grad_(each.requires_grad) for each in given]
    value = loss(*leaves)
    (value * tangent).backward()
    zero = torch.zeros(())
    return [value.detach(), *(zero if each.grad is None else each.grad for each in leaves[:3])]


def error(got: list[Tensor], want: list[Tensor]) -> float:
    return max(
        float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-30))
        for a, b in zip(got, want, strict=True)
    )


def notes(reports: list[Any]) -> list[str]:
    return [text for r in reports for g in r.graphs for p in g.passes for text in p.notes]


@pytest.mark.parametrize("name", sorted(LOSSES.keys() - {"autocast"}))
def test_losses_and_gradients_are_those_of_all_logits(name: str, reports: list[Any]) -> None:
    given = data(torch.float32)
    want = step(LOSSES[name], given)
    got = step(compiled(LOSSES[name]), given)
    assert notes(reports) == [each for each in notes(reports) if "in parts" in each] != []
    if name == "none counts":
        assert got[0].isnan() and want[0].isnan()
        assert not any(each.any() for each in (*got[1:], *want[1:]))
    else:
        assert error(got, want) <= 1e-6


@pytest.mark.parametrize(
    ("dtype", "name", "tangent"),
    [
        (torch.float64, "smooth, bias", 1.7),
        (torch.float32, "autocast", 1.7),
        (torch.bfloat16, "mean", 1.7),
        (torch.bfloat16, "capped", 1.7),
        (torch.bfloat16, "smooth, bias", 1.7),
        (
            torch.float16,
            "mean",
            65536.0,
        ),  # gradients of a mean must not vanish before they are scaled
        (torch.float16, "capped", 65536.0),
        (torch.float16, "smooth, bias", 512.0),
    ],
)
def test_other_dtypes_are_as_good_as_with_all_logits(
    dtype: torch.dtype, name: str, tangent: float
) -> None:
    torch._dynamo.reset()
    given = data(dtype)
    wide = [x.detach().double().requires_grad_() if x.is_floating_point() else x for x in given]
    exact = step(LOSSES[name], tuple(wide), tangent)
    unchunked = step(LOSSES[name], given, tangent)
    chunked = step(compiled(LOSSES[name], rows=18), given, tangent)
    rounding = torch.finfo(torch.bfloat16 if name == "autocast" else dtype).eps
    for own, other, right in zip(chunked, unchunked, exact, strict=True):
        assert own.dtype == other.dtype
        assert error([own], [right]) <= error([other], [right]) + max(2 * rounding, 1e-14)


@pytest.mark.parametrize("lowering", ["aot_eager", "inductor"])
def test_both_routes_and_sizes_that_change(lowering: str, reports: list[Any]) -> None:
    loss = compiled(LOSSES["mean"], lowering)
    for rows in (37, 40, 51):  # the second makes the size a symbol
        given = data(torch.float32, rows)
        assert error(step(loss, given), step(LOSSES["mean"], given)) <= 2e-6
    assert len(notes(reports)) == 2


def test_what_needs_no_gradient_gets_none(reports: list[Any]) -> None:
    h, w, b, y = data(torch.float32)
    for given in ((h, w.detach(), b, y), (h.detach(), w, b.detach(), y)):
        assert error(step(compiled(flat), given), step(flat, given)) <= 1e-6
    with torch.no_grad():
        assert torch.equal(compiled(mean)(h, w, b, y), mean(h, w, b, y))
    assert len(notes(reports)) == 2  # without a gradient logits are as they were


def in_a_checkpoint(end: Callable[..., Tensor]) -> Loss:
    return lambda h, w, b, y: checkpoint(end, h.tanh(), w, b, y, use_reentrant=False)


def with_its_square(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    logits = F.linear(h, w)
    return of_transformers(logits, y) + logits.logsumexp(-1).square().mean()


def under_autocast_within(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        logits = F.linear(h, w)
    return of_transformers(logits, y)


def two_of_one(h: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    logits = F.linear(h, w)[:, :, : CLASSES - 1]
    return of_transformers(logits, y.clamp(max=CLASSES - 2))


STAYS: dict[str, tuple[Loss, str]] = {
    "z loss in a checkpoint": (in_a_checkpoint(with_its_square), "more than a loss is made"),
    "autocast in a checkpoint": (in_a_checkpoint(under_autocast_within), "more than a loss"),
    "padded classes": (two_of_one, "indexed in an unknown way"),
    "sliced behind a view": (sliced_behind_a_view, "getitem changes them"),
    "keyword of a step": (
        lambda h, w, b, y: of_transformers(torch.tanh(input=F.linear(h, w)), y),
        "tanh makes them",
    ),
    "scale that is trained": (
        lambda h, w, b, y: of_transformers(F.linear(h, w) * b.mean(), y),
        "mul makes them",
    ),
    "distilled": (
        lambda h, w, b, y: (
            of_transformers(z := F.linear(h, w), y)
            + F.kl_div(
                z.log_softmax(-1),
                h @ w.detach().flip(0).t(),
                reduction="batchmean",
                log_target=True,
            )
        ),
        "log_softmax reads",
    ),
    "weights": (lambda h, w, b, y: flat(h, w, b, y, weight=b.detach().exp()), "weighs classes"),
    "none": (lambda h, w, b, y: flat(h, w, b, y, reduction="none").sum(), "for each row"),
    "probabilities": (
        lambda h, w, b, y: F.cross_entropy(h @ w.t(), (h @ w.t()).softmax(1).detach()),
        "probabilities",
    ),
    "read": (
        lambda h, w, b, y: (z := F.linear(h, w)).logsumexp(-1).mean() + of_transformers(z, y),
        "logsumexp reads",
    ),
    "returned": (
        lambda h, w, b, y: (z := F.linear(h, w), of_transformers(z, y))[::-1],
        "the model returns them",
    ),
    "no head": (lambda h, w, b, y: of_transformers(F.linear(h, w).exp(), y), "exp makes them"),
    "written": (
        lambda h, w, b, y: (z := F.linear(h.mul(2), w), y.add_(0), of_transformers(z, y))[2],
        "add_ writes",
    ),
    "small": (
        lambda h, w, b, y: mean(h[:1, :5], w, b, y[:1, :5]),
        "they fit, as they are 1,060 bytes",
    ),
}


@pytest.mark.parametrize("name", STAYS)
def test_other_losses_stay_and_the_report_says_why(name: str, reports: list[Any]) -> None:
    loss, why = STAYS[name]
    given = data(torch.float32)

    def first(*args: Tensor) -> Tensor:
        found = run(*args)
        return found[0] if isinstance(found, tuple) else found

    run = loss
    want = step(first, given)
    run = compiled(loss)
    assert error(step(first, given), want) <= 1e-6
    (note,) = notes(reports)
    assert why in note and "makes its logits" in note


def test_returned_logits_are_made_when_they_are_read(reports: list[Any]) -> None:
    h, w, b, y = data(torch.float32)
    plain = STAYS["returned"][0]
    loss = compiled(plain, "aot_eager", returns_stand_ins=True)
    value, logits = loss(h, w, b, y)
    value.backward()
    assert "in parts" in notes(reports)[0]
    want = F.linear(h, w)
    assert (logits.shape, logits.dtype, logits.device) == (want.shape, want.dtype, want.device)
    assert "UnreadLogits" in repr(logits) and logits.requires_grad
    assert torch.equal(logits.argmax(-1), want.argmax(-1))
    assert torch.equal(logits.detach()[0, 1:], want[0, 1:]) and logits.tolist() == want.tolist()
    with pytest.raises(CompileError, match="no gradient"):
        (logits * 2).sum().backward()
    value, logits = loss(h, w, b, y)
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(CompileError, match="after the weights changed"):
        logits.argmax(-1)
