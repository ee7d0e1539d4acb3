"""Slices along sizes that vary: written, read again, and moved, as one program for all sizes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchloom._torch.standalone import own_instructions
from torchloom.errors import ServeError
from torchloom.serve import Contract, Dim, build, tensor


class Slices(nn.Module):
    """Writes to slices in all the ways there are, and moves rows."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        n = x.shape[0]
        shifted = torch.zeros_like(x)
        shifted[1:] = x[:-1]
        stepped = x.sin()
        stepped[::2] += 1
        stepped[:2] += 1
        stepped[-2:] *= 3
        cache = torch.zeros(2, 16, 4) + x.sum()
        cache[:, :n] = x
        cache[:, n:] = 7
        scattered = torch.slice_scatter(torch.zeros(32, 4), x, 0, 5, 5 + n)
        last = torch.cat([x[1:], x[:1]]) + torch.roll(x, 1, 0)
        return shifted, stepped, cache, scattered, last, cache.flatten(0, 1)[-n:]


class Cached(nn.Module):
    """Writes keys at a position, and attends to what is there."""

    def forward(self, x: Tensor, keys: Tensor, pos: int) -> Tensor:
        n = x.shape[1]
        keys[:, pos : pos + n] = x.sin()
        read = keys[:, : pos + n]
        return F.scaled_dot_product_attention(x, read, read)


@pytest.fixture
def no_caches(monkeypatch, tmp_path):
    """Inductor's caches hide what its lowering asks of sizes."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with torch._inductor.config.patch(fx_graph_cache=False):
        yield


def alike(model, program, *args):
    own, others = ([a.clone() if isinstance(a, Tensor) else a for a in args] for _ in "ab")
    torch.testing.assert_close(program(*own), model(*others), atol=1e-5, rtol=1e-5)
    for mine, other in zip(own, others, strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize(("shapes", "least"), [("prove", 3), ("unbacked", 1), ("split", 1)])
@pytest.mark.usefixtures("no_caches")
def test_slices_are_written_for_all_sizes(shapes, least):
    model = Slices().eval()
    with torch.no_grad():
        program = build(model, Contract({"x": tensor(Dim("n", least, 12), 4)}), shapes=shapes)
        assert len(program.variants) == 1 or shapes == "split"
        for n in (least, least + 1, 12):
            alike(model, program, torch.randn(n, 4))


@pytest.mark.usefixtures("no_caches")
def test_a_cache_is_written_at_a_position_and_attended_to():
    model, rows = Cached().eval(), Dim("rows", 2, 3)
    length, pos = Dim("length", 1, 4), Dim("pos", 0, 8)
    contract = Contract({"x": tensor(rows, length, 4), "keys": tensor(rows, 16, 4), "pos": pos})
    with torch.no_grad():
        program = build(model, contract, shapes="split")
        for n, at in ((1, 0), (4, 0), (1, 8), (4, 8), (3, 2), (2, 1)):
            alike(model, program, torch.randn(3, n, 4), torch.randn(3, 16, 4), at)


def test_ranges_do_not_meet_in_the_compilers_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model = Slices().eval()
    with torch.no_grad(), own_instructions():
        for least in (4, 3):
            program = build(model, Contract({"x": tensor(Dim("n", least, 12), 4)}))
            alike(model, program, torch.randn(least, 4))


def test_an_error_of_the_compiler_is_one_sentence_with_the_users_line():
    contract = Contract(
        {"x": tensor(2, Dim("length", 1, 4), 4), "keys": tensor(2, 16, 4), "pos": Dim("pos", 0, 8)}
    )
    with torch.no_grad(), pytest.raises(ServeError) as caught:
        build(Cached().eval(), contract, shapes="unbacked")
    text = str(caught.value)
    assert len(text.splitlines()) == 1 and len(text) < 900
    for part in ("test_slices.py:", "in forward", "aten.bmm", "shapes='split'", "length 1 to 4"):
        assert part in text
    assert len(str(caught.value.__cause__).splitlines()) > 20
