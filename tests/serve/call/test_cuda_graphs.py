"""Recorded programs: dispatch by size, fixed memory in and out. The recorder is a stand-in without a GPU."""

from __future__ import annotations

import gc
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from serve.models import BATCH, Attending, Plain, made, rows
from support.gpu import gpu
from torchloom._torch.cuda_graphs import Pool
from torchloom.errors import CompileError, ContractError
from torchloom.serve import Contract, build, counter, load, tensor
from torchloom.serve.call.cuda_graphs import Recorded


class Tape:
    """Notes a function as a CUDA graph notes launches: run again, it writes to the same outputs."""

    made = 0
    replayed = 0
    pause_s = 0.0
    scribbles = False
    forgets = False
    """Whether it keeps nothing but addresses, as a device does; it can then not be replayed."""
    pools: ClassVar[list[Pool]] = []
    sizes: ClassVar[list[int]] = []
    """The first size of each recording's output, in order."""
    others: ClassVar[weakref.WeakSet[Tape]] = weakref.WeakSet()
    """All that live: a replay may write to the results of each other one, which lie in the pool that they share."""
    num_at_work = 0

    def __init__(self, pool: Pool) -> None:
        Tape.made += 1
        Tape.pools.append(pool)

    def record(self, call):
        self._outputs = call()
        Tape.sizes.append(len(self._outputs[0]))
        Tape.others.add(self)
        self._call = None if Tape.forgets else call
        return self._outputs

    def replay(self) -> None:
        Tape.replayed += 1
        assert Tape.num_at_work == 0
        Tape.num_at_work += 1
        time.sleep(Tape.pause_s)
        for each in Tape.others if Tape.scribbles else ():
            for output in each._outputs:
                output.fill_(torch.nan)
        if self._call is not None:
            for mine, new in zip(self._outputs, self._call(), strict=True):
                mine.copy_(new)
        Tape.num_at_work -= 1


@pytest.fixture(autouse=True)
def tape(monkeypatch) -> None:
    monkeypatch.setattr("torchloom.serve.call.cuda_graphs.CudaRecording", Tape)
    Tape.made, Tape.replayed, Tape.pause_s, Tape.forgets, Tape.pools = 0, 0, 0.0, False, []
    Tape.scribbles, Tape.sizes, Tape.others, Tape.num_at_work = False, [], weakref.WeakSet(), 0


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


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("how", ["full", "pieces"])
def test_a_buffer_is_written_once_for_each_call(how, backend):
    model, plain = made(Counting), made(Counting)
    program = build(model, rows(), sizes=[4], backend=backend, cuda_graphs=how)
    assert model.seen == 0  # building records nothing, and leaves no trace
    with torch.no_grad():
        for n in (4, 2, 4, 4):
            x = torch.randn(n, 16)
            torch.testing.assert_close(program(x), plain(x))
            assert torch.equal(model.seen, plain.seen)


class Caching(torch.nn.Module):
    """Writes rows into a cache that is handed in, reads all of it, and returns it."""

    def forward(self, x, place, cache):
        cache.index_copy_(0, place, x * 2)
        return cache.sum(0), cache


CACHE = Contract(
    {
        "x": tensor(BATCH, 16),
        "place": tensor(BATCH, dtype=torch.int64, fill=lambda shape: torch.arange(shape[0])),
        "cache": tensor(64, 16),
    }
)


def call_with_caches(device: str, how: str) -> int:
    """Serve steps that write to two caches in turn; return how many recordings were made."""
    model = made(Caching)
    specs = {name: replace(each, device=torch.device(device)) for name, each in CACHE.tensors()}
    program = build(model, Contract(specs), sizes=[2], backend="eager", cuda_graphs=how)
    before = counter.num_recorded
    with torch.no_grad(), torch.device(device):
        caches = [torch.zeros(64, 16), torch.ones(64, 16)]
        wanted = [cache.clone() for cache in caches]
        for step in range(6):
            cache, mine = caches[step % 2], wanted[step % 2]
            x, place = torch.randn(2, 16), torch.tensor([step, step + 9])
            total, found = program(x, place, cache)
            torch.testing.assert_close(total, model(x, place, mine)[0])
            assert found.data_ptr() == cache.data_ptr()
            assert torch.equal(cache, mine)
    return counter.num_recorded - before


@pytest.mark.parametrize("how", ["full", "pieces"])
def test_caches_are_written_where_they_are(how):
    assert call_with_caches("cpu", how) == 2  # one for each cache


@gpu
@pytest.mark.parametrize("how", ["full", "pieces"])
def test_caches_on_a_device(how, monkeypatch):
    monkeypatch.undo()
    assert call_with_caches("cuda", how) == 2


def test_a_cache_that_fills_the_device_is_recorded(monkeypatch):
    """What it held before the warm-up is kept on the host, where the device has no room for a second one."""
    clone = torch.Tensor.clone

    def full(tensor, **options):
        if tensor.shape == (64, 16):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return clone(tensor, **options)

    recorded = Recorded(lambda x, cache: (cache.add_(x),), fixed=(), written={1})
    # `.cpu()` of a tensor that is there already is that tensor, which the warm-up writes to.
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: tensor + 0)
    monkeypatch.setattr(torch.Tensor, "clone", full)
    cache = torch.zeros(64, 16)
    recorded(torch.ones(()), cache)
    assert torch.equal(cache, torch.ones(64, 16))


def test_each_device_records_on_a_stream_of_its_own(monkeypatch):
    """torch's default stream for recordings is one of whichever device was recorded first."""
    found, entered = [], []

    @contextmanager
    def graph(noted, *, pool, stream, capture_error_mode):
        found.append((noted, stream, capture_error_mode))
        yield

    @contextmanager
    def on(device):
        entered.append(str(device))
        yield

    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: 1)
    for index in (0, 1, 0):
        pool = Pool(torch.device("cuda", index))
        with pool.capturing(Tape(pool), index):
            pass
    assert entered == ["cuda:0", "cuda:1", "cuda:0"]
    assert found == [(index, f"stream of cuda:{index}", "thread_local") for index in (0, 1, 0)]


def test_too_many_caches_run_without_recordings_and_say_so(caplog):
    program = build(made(Caching), CACHE, sizes=[2], backend="eager", cuda_graphs="full")
    model, kept = made(Caching), []
    Tape.made = 0
    with torch.no_grad():
        for _ in range(20):
            cache, mine = torch.zeros(64, 16), torch.zeros(64, 16)
            kept.append(cache)  # else the next one is at its address
            x, place = torch.randn(2, 16), torch.tensor([3, 5])
            program(x, place, cache)
            model(x, place, mine)
            assert torch.equal(cache, mine)
    assert Tape.made == 16
    assert caplog.text.count("pass the same tensors again") == 1


def test_a_cache_that_is_dropped_is_freed():
    program = build(made(Caching), CACHE, sizes=[2], backend="eager", cuda_graphs="full")
    Tape.forgets = True
    cache = torch.zeros(64, 16)
    gone = weakref.ref(cache)
    with torch.no_grad():
        program(torch.randn(2, 16), torch.tensor([0, 1]), cache)
    del cache
    gc.collect()
    assert gone() is None


class Passing(torch.nn.Module):
    """Writes in one piece to what another piece made."""

    def forward(self, x):
        y = x * 2
        out = torch.empty_like(y)
        torch.ops.serve_tests.attend(y, out)
        out.add_(y)
        return out * 3, y


def test_what_pieces_hand_on_may_be_written_to():
    model = made(Passing)
    program = build(
        *(model, rows()),
        sizes=[4],
        splitting_ops=["serve_tests::attend"],
        backend="eager",
        cuda_graphs="pieces",
    )
    with torch.no_grad():
        for _ in range(20):
            x = torch.randn(4, 16)
            for one, other in zip(program(x), model(x), strict=True):
                torch.testing.assert_close(one, other)
    assert Tape.made == 2  # by the build, which tries the size; none for new addresses


@pytest.mark.parametrize("how", ["full", "pieces"])
def test_the_largest_size_is_recorded_first(how, tmp_path):
    """Smaller recordings find their memory in the pool then."""
    model, sizes = made(Plain), [2, 64, 4]
    build(model, rows(), sizes=sizes, backend="eager", cuda_graphs=how, store=tmp_path)
    assert Tape.sizes == [64, 4, 2]
    Tape.sizes = []
    load(tmp_path, model, rows()).warm_up()
    assert Tape.sizes == [64, 4, 2]
    Tape.sizes = []
    build(model, rows(), shapes="bucket", sizes=[8, 64], backend="eager", cuda_graphs=how)
    assert Tape.sizes == [64, 8]


def test_programs_of_one_process_share_a_pool_take_turns_and_leave_results_alone():
    """Replays write anywhere in the pool: over the results of other programs, too."""
    models = [made(Attending, 2), made(Attending, 1), made(Attending, 2)]
    programs = [
        build(
            *(model, rows()),
            sizes=[2, 4],
            splitting_ops=["serve_tests::attend"],
            backend="eager",
            cuda_graphs=how,
        )
        for model, how in zip(models, ["full", "pieces", "full"], strict=True)
    ]
    assert len(set(map(id, Tape.pools))) == 1
    Tape.scribbles, Tape.pause_s = True, 0.0005
    wrong: list[str] = []

    def serve(seed: int) -> None:
        inputs = [torch.full((n, 16), float(seed + n)) for n in (4, 2, 4, 3)]
        with torch.no_grad():
            held = [(p(x), m(x)) for x in inputs for p, m in zip(programs, models, strict=True)]
        wrong.extend("overwritten" for mine, its in held if not torch.allclose(mine, its))

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(serve, range(3)))
    assert not wrong
    assert Tape.replayed > 30


def test_a_pool_whose_recordings_are_gone_is_not_used_again(monkeypatch):
    """torch frees a pool with its last graph, and fails an assertion where a graph is recorded into it later."""
    numbers = iter(range(9))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(numbers), raising=False)
    pool = Pool(torch.device("cuda:0"))
    one, other = Tape(pool), Tape(pool)
    assert [pool.handle_for(one), pool.handle_for(other)] == [0, 0]
    del one
    assert pool.handle_for(Tape(pool)) == 0
    del other
    assert pool.handle_for(Tape(pool)) == 1


def test_a_warm_up_records_every_size_before_the_first_call():
    program = build(made(Plain), rows(), sizes=[2, 4], backend="eager", cuda_graphs="full")
    program.warm_up()
    assert Tape.made == 2
    with torch.no_grad(), counter.expect(num_recorded=0):
        program(torch.randn(2, 16)), program(torch.randn(4, 16))
    counting = made(Counting)
    build(counting, rows(), sizes=[4], backend="eager", cuda_graphs="full").warm_up()
    assert counting.seen == 0
    caching = build(made(Caching), CACHE, sizes=[2], backend="eager", cuda_graphs="full")
    cache = torch.randn(64, 16)
    before = cache.clone()
    caching.warm_up(cache=cache)
    assert torch.equal(cache, before)
    with torch.no_grad(), counter.expect(num_recorded=0):
        caching(torch.randn(2, 16), torch.tensor([0, 1]), cache)
    with pytest.raises(ContractError, match="'cash' is in no contract"):
        caching.warm_up(cash=cache)


def test_without_a_device_it_is_an_error(monkeypatch):
    monkeypatch.undo()
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    with pytest.raises(CompileError, match="needs a CUDA device"):
        build(made(Plain), rows(), sizes=[4], backend="eager", cuda_graphs="full")


@gpu
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
