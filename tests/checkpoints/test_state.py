"""Nothing of the state is lost, and what cannot be kept is refused when it is saved."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, deque
from itertools import product

import numpy as np
import pytest
import torch
from torch import nn

import torchloom
from support.checkpoints import outcome, state_of
from support.models import tricky
from support.pool import run_ranks
from support.runs import assert_equal, make_engine, settings, train, weights

numpy = np.random.mtrand  # the generator that programs share


class Counting(torch.optim.SGD):
    """Keeps all kinds of plain states."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state["count"] = state.get("count", 0) + 1
                state["seen"] = {"name": None, "rates": [(group["lr"], 1)], 3: float("inf")}
                if param.numel() % 2:
                    state["own"] = torch.full((), 0.5 * state["count"])
                    state["order"] = np.float64(2.5)
        self.state["global"] = {"mean": torch.ones(2)}


def counting(seed, elementwise=True):
    model = tricky(seed)
    config = {**settings(3), "optimizer": None}
    config.pop("optimizer")
    kind = type("Counting", (Counting,), {"elementwise": elementwise})
    engine, *_ = torchloom.initialize(
        model=model, config=config, optimizer=lambda params: kind(params, lr=0.1, momentum=0.9)
    )
    return engine


@pytest.mark.parametrize("elementwise", [True, False])  # False: on the ranks that own parameters
def test_states_that_are_no_tensors(tmp_path, elementwise: bool) -> None:
    def fn(rank):
        engine = counting(0, elementwise)
        train(engine, rank, 2)
        engine.save_checkpoint(tmp_path)
        saved = state_of(engine), repr(engine.optimizer.state["global"])
        engine = counting(3, elementwise)
        train(engine, rank, 1)
        engine.load_checkpoint(tmp_path)
        return saved, (state_of(engine), repr(engine.optimizer.state["global"]))

    for saved, loaded in run_ranks(2, fn):
        assert saved == loaded


class Counted(nn.Module):
    """Has buffers that differ by rank, ones that do not, and ones that are not kept."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.extra = 0

    def forward(self, x):
        self.calls += 1
        return self.norm(self.linear(x)).square().mean()

    def get_extra_state(self):
        return {"extra": self.extra, "at": (1, "a")}

    def set_extra_state(self, state):
        self.extra = state["extra"]


def counted(seed):
    torch.manual_seed(seed)
    engine, *_ = torchloom.initialize(model=Counted(), config=settings(3))
    return engine


def drive(engine, rank, times):
    for step in range(times):
        generator = torch.Generator().manual_seed(10 * step + rank)
        engine.backward(engine(torch.randn(6, 4, generator=generator)))
        engine.step()


def test_buffers_that_differ_by_rank(tmp_path) -> None:
    def save(rank):
        engine = counted(0)
        drive(engine, rank, 3)
        engine.module.calls += 5 * rank
        engine.module.extra = 7
        engine.module.scratch += 1
        engine.save_checkpoint(tmp_path)
        return {k: v.clone() for k, v in engine.module.named_buffers()}

    def load(rank):
        messages = []
        from torchloom.checkpoints import restore as module

        module.logger.warning = lambda text, *args: messages.append(text % args)
        engine = counted(1)
        engine.load_checkpoint(tmp_path)
        assert engine.module.extra == 7
        assert not engine.module.scratch.any()
        found = {k: v.clone() for k, v in engine.module.named_buffers()}
        return found, messages

    saved = run_ranks(2, save)
    assert not torch.equal(saved[0]["norm.running_mean"], saved[1]["norm.running_mean"])
    for rank, (loaded, messages) in enumerate(run_ranks(2, load)):
        saved[rank].pop("scratch")
        loaded.pop("scratch")
        assert_equal(saved[rank], loaded)
        assert messages == []
    others = run_ranks(3, load)
    for loaded, _ in others:
        loaded.pop("scratch")
        assert_equal(saved[0], loaded)
    assert any("buffer/calls" in each and "rank 0" in each for each in others[0][1])


def test_generators(tmp_path) -> None:
    def draw():
        return (
            torch.rand(2).tolist(),
            random.random(),
            numpy.rand(),
            random.gauss(0, 1),
            numpy.randn(),
        )

    def fn(rank):
        random.seed(rank)
        numpy.seed(rank)
        engine, _ = make_engine(3)
        torch.manual_seed(rank)
        draw()
        engine.save_checkpoint(tmp_path)
        through = draw()
        draw()
        engine.load_checkpoint(tmp_path)
        return through, draw()

    found = run_ranks(2, fn)
    for through, resumed in found:
        assert through == resumed
    assert found[0][0] != found[1][0]


def test_client_state_of_all_kinds(tmp_path) -> None:
    kinds = {
        "tuple": (1, (2.5, None)), 5: "a number as a key", "nan": float("inf"), "bytes": b"\0\1",
        "set": {1, 2}, "counter": Counter({3: 2}), "ordered": OrderedDict(b=1, a=2),
        "deque": deque([1, 2]), "tensor": torch.arange(3), "nested": {"$dict": {"$tensor": "x"}},
        "array": np.arange(6, dtype=np.int16).reshape(2, 3), "scalar": np.float32(1.5),
        "size": torch.Size([2]), "dtype": torch.bfloat16, "device": torch.device("cpu"),
        "big": 2**90, "true": True, "empty": {}, "list": [[], [{}]],
    }  # fmt: skip

    def fn(rank):
        engine, _ = make_engine(3)
        engine.save_checkpoint(tmp_path, client_state={**kinds, "rank": rank})
        _, client = engine.load_checkpoint(tmp_path)
        return (
            repr(client),
            repr({**kinds, "rank": rank}),
            [type(v).__name__ for v in client.values()],
        )

    for loaded, saved, types in run_ranks(2, fn):
        assert loaded == saved
        assert types == [type(value).__name__ for value in kinds.values()] + ["int"]


class Stateful:
    """Stands for a schedule."""

    def __init__(self, state):
        self.state, self.last_epoch = state, 0

    def step(self):
        self.last_epoch += 1

    def state_dict(self):
        return {"last_epoch": self.last_epoch, "kept": self.state}

    def load_state_dict(self, state):
        if state["kept"] == "bad":
            raise ValueError("cannot take it")
        self.last_epoch, self.state = state["last_epoch"], state["kept"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda e: e.optimizer.param_groups[0].update(hook=lambda: 1), "groups[0]['hook']"),
        (lambda e: setattr(e, "lr_scheduler", Stateful(object())), "scheduler['kept']"),
        (lambda e: setattr(e, "training_dataloader", Stateful({"a": [print]})), "['kept']['a'][0]"),
        (lambda e: e.optimizer.state[next(iter(e.local)).param].update(odd=object()), "odd"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(change, named, tmp_path) -> None:
    def fn(rank):
        engine, _ = make_engine(3)
        train(engine, rank, 1)
        if rank == 1:  # on one rank, and all of them say so
            change(engine)
        return outcome(lambda: engine.save_checkpoint(tmp_path / "a")), (tmp_path / "a").exists()

    for text, exists in run_ranks(2, fn):
        assert text.startswith("CheckpointError")
        assert "rank 1" in text
        assert named in text
        assert not exists


def test_a_state_that_is_not_taken_back_changes_nothing(tmp_path) -> None:
    def fn(rank):
        engine, _ = make_engine(3)
        engine.lr_scheduler = Stateful("bad" if rank else "good")
        train(engine, rank, 1)
        engine.save_checkpoint(tmp_path)
        engine.lr_scheduler = Stateful("before")
        train(engine, rank, 1)
        before = state_of(engine)
        text = outcome(lambda: engine.load_checkpoint(tmp_path))
        return text, state_of(engine) == before

    for text, stayed in run_ranks(2, fn):
        assert "rank 1" in text
        assert "cannot take it" in text
        assert stayed


SCHEDULES = {
    "sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [
            torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=2),
            torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
        ],
        [2],
    ),
    "steps": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [1, 3, 3]),
    "cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
}


def test_schedules_go_on(tmp_path) -> None:
    def make(seed, kind, tensor_rate):
        config = settings(3)
        config.pop("optimizer")
        rate = torch.tensor(1e-2) if tensor_rate else 1e-2
        engine, *_ = torchloom.initialize(
            model=tricky(seed),
            config=config,
            optimizer=lambda p: torch.optim.AdamW(p, lr=rate),
            lr_scheduler=SCHEDULES[kind],
        )
        return engine

    def fn(rank):
        for case in product(SCHEDULES, (False, True)):
            engine = make(0, *case)
            train(engine, rank, 3)
            engine.save_checkpoint(tmp_path)
            train(engine, rank, 3, first=3)
            through = state_of(engine)
            engine = make(1, *case)
            engine.load_checkpoint(tmp_path)
            train(engine, rank, 3, first=3)
            assert state_of(engine) == through, case

    run_ranks(2, fn)


def test_fp16_scale_and_skips(tmp_path) -> None:
    def fn(rank):
        engine, _ = make_engine(3, fp16={"enabled": True, "initial_scale_power": 4})
        train(engine, rank, 1)
        engine.scaler._skips_in_a_row = 3
        engine.save_checkpoint(tmp_path)
        saved = state_of(engine)
        engine, _ = make_engine(3, seed=2, fp16={"enabled": True})
        engine.load_checkpoint(tmp_path)
        assert state_of(engine) == saved
        engine, _ = make_engine(3, seed=2)
        engine.load_checkpoint(tmp_path)
        return engine.loss_scale

    assert run_ranks(2, fn) == [1.0, 1.0]


def test_weights_alone(tmp_path) -> None:
    def fn(rank):
        engine, model = make_engine(3)
        train(engine, rank, 2)
        engine.save_checkpoint(tmp_path, client_state={"epoch": 3})
        saved = weights(model)
        engine, model = make_engine(3, seed=2)
        train(engine, rank, 1)
        before = {k: v for k, v in state_of(engine).items() if not k.startswith("model")}
        _, client = engine.load_checkpoint(tmp_path, load_module_only=True)
        after = {k: v for k, v in state_of(engine).items() if not k.startswith("model")}
        assert_equal(saved, weights(model))
        assert client == {"epoch": 3}
        return before == after

    assert run_ranks(2, fn) == [True, True]


@pytest.mark.parametrize("stage", [0, 3])
def test_a_function_of_the_callers_loads_the_weights(stage, tmp_path) -> None:
    def half(src, dst):
        for name, param in dst.named_parameters():
            param.copy_(src[name] / 2)

    def bad(src, dst):
        dst.up.weight.zero_()
        dst.shift.zero_()
        raise ValueError("no")

    def fn(rank):
        engine, model = make_engine(stage)
        train(engine, rank, 1)
        engine.save_checkpoint(tmp_path)
        saved = weights(model)
        before = state_of(engine)
        text = outcome(lambda: engine.load_checkpoint(tmp_path, custom_load_fn=bad))
        assert state_of(engine) == before
        assert "ValueError: no" in text
        engine.load_checkpoint(tmp_path, custom_load_fn=half)
        return saved, weights(model)

    for saved, loaded in run_ranks(2, fn):
        for name, value in saved.items():
            assert torch.equal(loaded[name], value if name == "shift" else value / 2), name


def test_frozen_parameters_left_out(tmp_path) -> None:
    def fn(rank):
        engine, model = make_engine(3)
        engine.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
        saved = weights(model)
        engine, model = make_engine(3, seed=2)
        frozen = weights(model)["frozen.weight"]
        engine.load_checkpoint(tmp_path)
        found = weights(model)
        assert torch.equal(found.pop("frozen.weight"), frozen)
        saved.pop("frozen.weight")
        assert_equal(saved, found)

    run_ranks(2, fn)


def test_groups_of_other_parameters(tmp_path) -> None:
    def make(order):
        model = tricky(0)
        params = [p for p in model.parameters() if p.requires_grad]
        groups = [{"params": params[:2], "lr": 1e-2}, {"params": params[2:], "lr": 1e-3}]
        engine, *_ = torchloom.initialize(
            model=model, config=settings(3), model_parameters=groups[::order]
        )
        return engine

    def fn(rank):
        engine = make(1)
        train(engine, rank, 1)
        engine.save_checkpoint(tmp_path)
        other = make(-1)
        before = state_of(other)
        return outcome(lambda: other.load_checkpoint(tmp_path)), state_of(other) == before

    for text, stayed in run_ranks(2, fn):
        assert "group 0 holds other parameters" in text
        assert stayed


@pytest.mark.parametrize("offload", [True, False])
def test_states_on_the_host(offload, tmp_path) -> None:
    def make(seed, on):
        extra = {"offload_optimizer": {"device": "cpu"}} if on else {}
        zero = {"stage": 3, "stage3_param_persistence_threshold": 20, **extra}
        return make_engine(seed=seed, zero_optimization=zero)[0]

    def fn(rank):
        engine = make(0, offload)
        train(engine, rank, 2)
        engine.save_checkpoint(tmp_path)
        train(engine, rank, 2, first=2)
        through = state_of(engine)
        engine = make(4, not offload)
        engine.load_checkpoint(tmp_path)
        if not offload:
            from torchloom.runtime import mover_of

            arena = mover_of(engine.device).arena
            moments = [
                s["exp_avg"] for s in engine.optimizer.state.values() if s["exp_avg"].numel()
            ]
            assert all(arena.owns(each) for each in moments)
        train(engine, rank, 2, first=2)
        return through, state_of(engine)

    for through, resumed in run_ranks(2, fn):
        assert through == resumed
