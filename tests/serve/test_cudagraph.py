"""Recorded programs: dispatch by size, fixed memory in and out. The recorder is a stand-in without a GPU."""

from __future__ import annotations

import pytest
import torch

from serve.models import Attending, Plain, made, rows
from torchloom.errors import ServeError
from torchloom.serve import build, counter
from torchloom.serve.cudagraph import Recorded


class Tape:
    """Notes a function as a CUDA graph notes launches: run again, it writes to the same outputs."""

    made = 0
    replayed = 0

    def __init__(self) -> None:
        Tape.made += 1

    def record(self, call):
        self._call = call
        self._outputs = call()
        return self._outputs

    def replay(self) -> None:
        Tape.replayed += 1
        for mine, new in zip(self._outputs, self._call(), strict=True):
            mine.copy_(new)


@pytest.fixture(autouse=True)
def tape(monkeypatch) -> None:
    monkeypatch.setattr("torchloom.serve.cudagraph.CudaRecording", Tape)
    Tape.made = Tape.replayed = 0


def test_a_recording_per_size_and_results_of_their_own():
    weight = torch.randn(4, 4)
    recorded = Recorded(lambda w, x: (x @ w,), fixed={0})
    with counter.expect(num_recorded=2):
        first = recorded(weight, torch.ones(2, 4))[0]
        second = recorded(weight, torch.full((2, 4), 3.0))[0]
        recorded(weight, torch.ones(3, 4))
    torch.testing.assert_close(second, first * 3)
    assert Tape.made == 2
    assert Tape.replayed == 3


def test_weights_are_read_where_they_are():
    weight = torch.ones(4, 4)
    recorded = Recorded(lambda w, x: (x @ w,), fixed={0})
    x = torch.ones(2, 4)
    recorded(weight, x)
    weight.mul_(2)
    assert torch.equal(recorded(weight, x)[0], torch.full((2, 4), 8.0))


@pytest.mark.parametrize("how", ["full", "pieces"])
def test_exact_sizes_are_recorded_and_ranges_are_not(how):
    model = made(Plain)
    program = build(model, rows(), sizes=[2, 4], backend="eager", cuda_graphs=how)
    Tape.replayed = 0
    with torch.no_grad():
        for n in (2, 3, 4, 2):
            x = torch.randn(n, 16)
            torch.testing.assert_close(program(x), model(x))
    assert Tape.replayed == 3


def test_buckets_replay_padded_recordings():
    model = made(Plain)
    program = build(
        model, rows(), shapes="bucket", sizes=[8, 64], backend="eager", cuda_graphs="full"
    )
    Tape.replayed = 0
    with torch.no_grad():
        for n in (1, 5, 8, 9, 64):
            x = torch.randn(n, 16)
            torch.testing.assert_close(program(x), model(x))
    assert Tape.replayed == 5


def test_pieces_are_recorded_around_operators_that_stay():
    model = made(Attending, 2)
    program = build(
        model,
        rows(),
        sizes=[4],
        splitting_ops=["serve_tests::attend"],
        backend="eager",
        cuda_graphs="pieces",
    )
    Tape.replayed = 0
    x = torch.randn(4, 16)
    with torch.no_grad():
        torch.testing.assert_close(program(x), model(x))
    assert Tape.replayed == 3


class Counting(torch.nn.Module):
    """Writes to a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1)
        return x + self.seen


@pytest.mark.parametrize("how", ["full", "pieces"])
def test_what_writes_is_not_recorded(how):
    with pytest.raises(ServeError, match="writes to its arguments or buffers"):
        build(made(Counting), rows(), sizes=[4], backend="eager", cuda_graphs=how)


def test_without_a_device_it_is_an_error(monkeypatch):
    monkeypatch.undo()
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    with pytest.raises(ServeError, match="needs a CUDA device"):
        build(made(Plain), rows(), sizes=[4], backend="eager", cuda_graphs="full")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_device(monkeypatch):
    monkeypatch.undo()
    from torchloom.serve import Contract, Dim, tensor

    model = made(Plain).cuda()
    contract = Contract({"x": tensor(Dim("batch", 1, 64), 16, device="cuda")})
    program = build(model, contract, sizes=[8], cuda_graphs="full")
    with torch.no_grad():
        for n in (1, 8, 64, 8):
            x = torch.randn(n, 16, device="cuda")
            torch.testing.assert_close(program(x), model(x), atol=1e-3, rtol=1e-3)
