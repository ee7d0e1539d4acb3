"""Pieces: operators that stay as they are, and layers that are compiled once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from serve.models import BATCH, CALLS, Attending, Block, Stack, made, rows
from torchloom.errors import ServeError
from torchloom.serve import Contract, build, counter, load, tensor


@pytest.mark.parametrize("num_layers", [1, 3])
def test_n_operators_make_2n_plus_1_pieces_and_run_n_times(num_layers):
    model = made(Attending, num_layers)
    program = build(model, rows(), splitting_ops=["serve_tests::attend"], backend="eager")
    assert program.variants[0].num_calls == 2 * num_layers + 1
    x = torch.randn(5, 16)
    with torch.no_grad():
        wanted = model(x)
        CALLS.clear()
        assert torch.equal(program(x), wanted)
    assert [5] * num_layers == CALLS


def test_a_split_program_starts_warm(tmp_path):
    model = made(Attending, 2)
    options = {"splitting_ops": ["serve_tests::attend"], "store": tmp_path}
    build(model, rows(), **options)
    with counter.expect(num_loads=1, num_traces=0):
        program = build(model, rows(), **options)
    x = torch.randn(5, 16)
    with torch.no_grad():
        torch.testing.assert_close(program(x), model(x))


def test_an_operator_that_is_not_called_is_an_error():
    with pytest.raises(ServeError, match="'no::such', which the model does not call"):
        build(made(Attending, 1), rows(), splitting_ops=["no::such"], backend="eager")


class Remembering(Block):
    """Writes what it reads to a cache, and reads the cache through a view."""

    def forward(self, x: Tensor, cache: Tensor, view: Tensor | None) -> Tensor:
        cache.copy_(self.norm(x))
        seen = cache[:, None].expand(-1, 2, -1) if view is None else view
        return super().forward(x + seen.sum(1))


class Caching(nn.Module):
    """Layers with caches that are parts of one tensor; views may be taken before they are written."""

    def __init__(self, early: bool) -> None:
        super().__init__()
        self.early = early
        self.layers = nn.ModuleList(Remembering(16) for _ in range(3))

    def forward(self, x: Tensor, cache: Tensor) -> Tensor:
        caches = [cache[number] for number in range(3)]
        views = [each[:, None].expand(-1, 2, -1) if self.early else None for each in caches]
        for layer, each, view in zip(self.layers, caches, views, strict=True):
            x = layer(x, each, view)
        return x


@pytest.mark.parametrize("early", [False, True])
def test_a_cache_is_written_and_read_through_views(early):
    model = made(Caching, early)
    contract = Contract({"x": (BATCH, 16), "cache": (3, BATCH, 16)})
    program = build(model, contract)
    x = torch.randn(5, 16)
    caches = torch.zeros(2, 3, 5, 16)
    with torch.no_grad():
        torch.testing.assert_close(program(x, caches[0]), model(x, caches[1]), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(caches[0], caches[1], atol=1e-4, rtol=1e-4)
    assert caches[0].abs().min() > 0


def test_equal_layers_are_compiled_once():
    contract = Contract({"ids": tensor(BATCH, 5, dtype=torch.int64, below=31)})
    pieces = {}
    for num_layers in (3, 7):
        model = made(Stack, num_layers)
        before = counter.num_pieces
        program = build(model, contract)
        pieces[num_layers] = counter.num_pieces - before
        assert program.variants[0].num_calls == num_layers + 2
        ids = torch.randint(0, 31, (4, 5))
        with torch.no_grad():
            torch.testing.assert_close(program(ids), model(ids), atol=1e-4, rtol=1e-4)
    assert pieces == {3: 3, 7: 3}


class Deciding(nn.Module):
    """Does something else at one row, if asked to."""

    def __init__(self, *, decides: bool) -> None:
        super().__init__()
        self.decides = decides
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.inner(x.view(x.shape[0] * 2, 8))).view(x.shape)
        if self.decides and x.shape[0] == 1:
            return y * 2
        return y


def assuming(graph_module, inputs):
    """Compile nothing, and assume that sizes are not 1."""
    for size in inputs:
        if isinstance(size, torch.SymInt):
            bool(size >= 2)
    return graph_module.forward


@pytest.mark.parametrize("decides", [False, True])
def test_sizes_that_a_compiler_cuts_off_get_a_program(decides):
    model = Deciding(decides=decides).eval()
    with counter.expect(num_traces=2, num_compiles=2):
        program = build(model, Contract({"x": (BATCH, 16)}), shapes="split", backend=assuming)
    assert [str(variant.box) for variant in program.variants] == ["batch 1", "batch 2 to 64"]
    assert all(verdict.holds for each in program.variants for verdict in each.verdicts)
    for n in (1, 2, 5, 64):
        x = torch.randn(n, 16)
        with torch.no_grad():
            torch.testing.assert_close(program(x), model(x))


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_exact_sizes_have_programs_of_their_own(backend, tmp_path):
    ids = Contract({"ids": tensor(BATCH, 5, dtype=torch.int64, below=31)})
    model = made(Stack, 3)
    with counter.expect(num_traces=4, num_compiles=4):
        program = build(model, ids, sizes=[1, 7, 64], backend=backend, store=tmp_path)
    assert [str(each.box) for each in program.variants] == [
        *("batch 1", "batch 7", "batch 64"),
        "batch 1 to 64",
    ]
    pieces = [set(each.pieces) for each in program.variants]
    assert len(set.union(*pieces)) == sum(map(len, pieces))  # each is compiled for its own size
    for each in (program, load(tmp_path, model)):
        for n in (1, 2, 7, 64):
            given = torch.randint(0, 31, (n, 5))
            with torch.no_grad():
                torch.testing.assert_close(each(given), model(given))
