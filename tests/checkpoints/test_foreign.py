"""State that others' code keeps in places of its own: it comes back, or the save refuses it by name."""

from __future__ import annotations

from collections import defaultdict, deque

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import torchloom
from support.checkpoints import names_in, outcome, state_of
from support.models import tricky
from support.ranks import run_ranks
from support.runs import make_engine, settings, train


def own_engine(optimizer, scheduler=None, seed=0, model=None, **rest):
    config = settings(3, **rest)
    config.pop("optimizer")
    model = model or tricky(seed)
    return torchloom.initialize(
        model=model, config=config, optimizer=optimizer, lr_scheduler=scheduler
    )[0]


class Lookahead(torch.optim.Optimizer):
    """Wraps an optimizer whose state is its own."""

    def __init__(self, inner):
        self.inner = inner
        super().__init__(inner.param_groups, {})

    def step(self, closure=None):
        self.inner.step()


class Telling(torch.optim.SGD):
    """Adds what is no plain data to its state dict."""

    def state_dict(self):
        return {**super().state_dict(), "lookahead": object()}


class OtherClass(torch.Tensor):
    pass


class Boxed(torch.optim.SGD):
    """Keeps a state in a class of tensors of its own, as quantized optimizers do."""

    elementwise = True

    def step(self, closure=None):
        super().step()
        for param in self.param_groups[0]["params"]:
            self.state[param]["boxed"] = torch.zeros_like(param.detach()).as_subclass(OtherClass)


class Writing(nn.Module):
    """Writes a value of its own into state dicts."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.scale = 1.0

    def forward(self, x):
        return self.layer(x).sum() * self.scale

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "scale"] = self.scale


REFUSED = {
    "a wrapper": (lambda p: Lookahead(torch.optim.SGD(p, lr=0.1)), None, "Lookahead holds another"),
    "a key": (
        lambda p: Telling(p, lr=0.1),
        None,
        "beside states[0]['lookahead'] is a builtins.object",
    ),
    "a class": (lambda p: Boxed(p, lr=0.1), None, "test_foreign.OtherClass"),
    "a module": (lambda p: torch.optim.SGD(p, lr=0.1), Writing, "(Writing) writes scale"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_would_be_lost_is_refused(kind, tmp_path) -> None:
    make, model, words = REFUSED[kind]

    def fn(rank):
        engine = own_engine(make, model=model() if model else None)
        if model is None:
            train(engine, rank, 1)
        return [
            outcome(lambda each=each: engine.save_checkpoint(tmp_path, async_save=each))
            for each in (False, True)
        ]

    for text in (text for found in run_ranks(2, fn) for text in found):
        assert text.startswith("CheckpointError"), text
        assert words in text
    assert names_in(tmp_path) == []


def test_a_group_of_parameters_that_were_not_handed_over(tmp_path) -> None:
    def fn(rank):
        engine, _ = make_engine(3)
        engine.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(7))]})
        return outcome(lambda: engine.save_checkpoint(tmp_path))

    for text in run_ranks(2, fn):
        assert "group 1 holds a tensor of shape [7] that is no trainable parameter" in text


ADAMW = (
    lambda p: torch.optim.AdamW(p, lr=1e-3),
    lambda o: lr_scheduler.LambdaLR(o, lambda s: 0.9**s),
)
SGD = (lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9), lambda o: lr_scheduler.StepLR(o, 10))
MIXED = (ADAMW[0], SGD[1])


@pytest.mark.parametrize(
    ("saved", "loaded", "words", "way_out"),
    [
        (ADAMW, SGD, "the states of AdamW, this run's optimizer is SGD", "load_optimizer_states"),
        (ADAMW, MIXED, "LambdaLR, this run's scheduler is StepLR", "load_lr_scheduler_states"),
    ],
)
def test_states_of_another_algorithm(saved, loaded, words, way_out, tmp_path) -> None:
    def fn(rank):
        engine = own_engine(*saved)
        train(engine, rank, 2)
        engine.save_checkpoint(tmp_path)
        engine = own_engine(*loaded, seed=1)
        before = state_of(engine)
        text = outcome(lambda: engine.load_checkpoint(tmp_path))
        assert state_of(engine) == before
        options = {"load_lr_scheduler_states": False, way_out: False}
        return text, outcome(lambda: engine.load_checkpoint(tmp_path, **options))

    for text, again in run_ranks(2, fn):
        assert words in text
        assert way_out in text
        assert again == "done"


@pytest.mark.parametrize(("scale", "expected"), [(0, 65536.0), (1024, 1024.0)])
def test_the_loss_scale_of_a_run_without_one_is_not_taken(scale, expected, tmp_path) -> None:
    def fn(rank):
        engine, _ = make_engine(3)
        train(engine, rank, 1)
        engine.save_checkpoint(tmp_path)
        engine, _ = make_engine(3, fp16={"enabled": True, "loss_scale": scale})
        assert engine.loss_scale == expected
        engine.load_checkpoint(tmp_path)
        return engine.loss_scale

    assert run_ranks(2, fn) == [expected] * 2


class Live(nn.Module):
    """Hands its live dict out as extra state; keeps an expanded buffer, and one that forward makes."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.layer, self.stats = nn.Linear(5, 3), {"calls": 0}
        self.register_buffer("mask", torch.full((1, 5), 1.0 + seed).expand(4, 5))
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x):
        self.stats["calls"] += 1
        self.mean = self.mean + x.mean()
        return self.layer(x * self.mask[0]).square().mean()

    def get_extra_state(self):
        return self.stats

    def set_extra_state(self, state):
        self.stats.update(state)


class Refusing:
    def step(self):
        pass

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        raise ValueError("not today")


def test_extra_state_that_is_live_is_undone(tmp_path) -> None:
    def fn(rank):
        engine = own_engine(lambda p: torch.optim.SGD(p, lr=0.1), model=Live(0))
        engine(torch.ones(2, 5))
        engine.lr_scheduler = Refusing()
        engine.save_checkpoint(tmp_path)
        for _ in range(3):
            engine(torch.ones(2, 5))
        return outcome(lambda: engine.load_checkpoint(tmp_path)), engine.module.stats

    for text, stats in run_ranks(2, fn):
        assert "not today" in text
        assert stats == {"calls": 4}


@pytest.mark.parametrize("by_function", [False, True])
def test_buffers_that_cannot_be_written_in_place(by_function, tmp_path) -> None:
    def fn(rank):
        sgd = lambda p: torch.optim.SGD(p, lr=0.1)  # noqa: E731
        engine = own_engine(sgd, model=Live(0))
        engine(torch.ones(2, 5))
        engine.save_checkpoint(tmp_path)
        engine = own_engine(sgd, model=Live(3))
        with torch.inference_mode():
            engine(torch.ones(2, 5))  # its buffer is an inference tensor now

        def load(src, dst):
            dst.mask = src["mask"] * 1

        rest = {"custom_load_fn": load} if by_function else {}
        text = outcome(lambda: engine.load_checkpoint(tmp_path, **rest))
        engine(torch.ones(2, 5))
        return text, engine.module.mask[3].tolist(), float(engine.module.mean)

    for text, mask, mean in run_ranks(2, fn):
        assert (text, mask) == ("done", [1.0] * 5)
        assert mean == 2.0


def test_saved_and_loaded_in_inference_mode(tmp_path) -> None:
    def fn(rank):
        engine, _ = make_engine(3)
        found = []
        for step in range(3):
            train(engine, rank, 1, first=step)
            with torch.inference_mode(step == 0):
                engine.save_checkpoint(tmp_path, async_save=True)
                engine.wait_for_checkpoint()
        with torch.inference_mode():
            engine.load_checkpoint(tmp_path, "global_step1")
        found.append(train(engine, rank, 2, first=1))
        engine.load_checkpoint(tmp_path, "global_step1")
        found.append(train(engine, rank, 2, first=1))
        return found

    for first, again in run_ranks(2, fn):
        assert first == again


def test_a_function_of_the_callers_where_one_rank_cannot_read(tmp_path) -> None:
    def fn(rank):
        from torchloom.checkpoints.contents import Contents

        engine, _ = make_engine(3)
        engine.save_checkpoint(tmp_path)
        whole = Contents.whole

        def fails(self, key):
            if key.startswith("model/"):
                raise OSError(5, "Input/output error", "/some/path")
            return whole(self, key)

        if rank == 1:
            Contents.whole = fails
        before = state_of(engine)
        text = outcome(
            lambda: engine.load_checkpoint(tmp_path, custom_load_fn=lambda src, dst: None)
        )
        assert state_of(engine) == before
        return text

    for text in run_ranks(2, fn):
        assert "rank 1" in text
        assert "Input/output error" in text


def test_containers_come_back_as_they_were(tmp_path) -> None:
    def fn(rank):
        engine, _ = make_engine(0)
        frozen = np.arange(3.0)
        frozen.flags.writeable = False
        conj = torch.tensor([1 + 2j]).conj()
        state = {
            "losses": deque([1, 2], maxlen=2),
            "frozen": frozen,
            "conj": conj,
            "neg": conj.imag,
        }
        engine.save_checkpoint(tmp_path, client_state=state)
        _, loaded = engine.load_checkpoint(tmp_path)
        loaded["losses"].append(3)
        return loaded, [
            outcome(lambda value=value: engine.save_checkpoint(tmp_path, client_state={"v": value}))
            for value in (
                defaultdict(int),
                1 - 2j,
                np.ma.masked_array([1.0, 2.0], [0, 1]),
                torch.ones(2).as_subclass(OtherClass),
                torch.eye(2).to_sparse(),
                torch.ones(2, device="meta"),
            )
        ]

    for loaded, refused in run_ranks(1, fn):
        assert loaded["losses"] == deque([2, 3], maxlen=2)
        assert loaded["frozen"].tolist() == [0.0, 1.0, 2.0]
        assert loaded["conj"].tolist() == [1 - 2j]
        assert loaded["neg"].tolist() == [-2.0]
        for text in refused:
            assert "client_state['v'] is a" in text, text
            assert "which a checkpoint cannot keep" in text
