"""The loop on a stand-in engine: learning, rows, stopping, resuming, refusing."""

from __future__ import annotations

import json
import os
import signal
from types import SimpleNamespace

import pytest
import torch

from torchloom.engine.loader import make_loader
from torchloom.errors import EngineError
from torchloom.files import read_json_lines
from torchloom.loop.step_log import Work
from torchloom.recipes.train.corpus import windows
from torchloom.recipes.train.loop import Loop
from torchloom.recipes.train.metrics import json_lines
from torchloom.recipes.train.options import TrainOptions
from torchloom.recipes.train.task import Task

TOKENS = torch.arange(2000) * 7 % 16


class FakeEngine:
    """One process, no sharding, the same methods."""

    device = torch.device("cpu")
    rank, world_size = 0, 1
    should_stop, stop_reason = False, None

    def __init__(self, module, accumulation_steps=1, lr=0.05):
        self.module = module
        batch = SimpleNamespace(micro_batch_size=4, accumulation_steps=accumulation_steps)
        self.config = SimpleNamespace(batch=batch, seed=None, dataloader_drop_last=False)
        self.work = Work(flops_per_token=1e6, peak_tflops=100.0)
        self.training_dataloader = make_loader(windows(TOKENS, 8), self.config, self, None)
        self.global_steps = 0
        self.saved = []
        self._accumulation_steps = accumulation_steps
        self._micro_steps = 0
        self._optimizer = torch.optim.AdamW(module.parameters(), lr=lr)

    def __call__(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def backward(self, loss):
        (loss / self._accumulation_steps).backward()

    def step(self):
        self._micro_steps += 1
        if self._micro_steps % self._accumulation_steps == 0:
            self._optimizer.step()
            self._optimizer.zero_grad()
            self.global_steps += 1

    def train(self):
        self.module.train()

    def eval(self):
        self.module.eval()

    def get_lr(self):
        return [0.05]

    def get_global_grad_norm(self):
        return 1.5

    def comm_stats(self):
        return SimpleNamespace(num_collectives=3 * self._micro_steps, num_bytes=0)

    def was_step_applied(self):
        return True

    def save_checkpoint(self, save_dir, tag=None, /, *, client_state, keep_last=None):
        state = {**client_state, "loader": self.training_dataloader.state_dict()}
        self.saved.append((save_dir, json.loads(json.dumps(state))))
        return f"{save_dir}/{tag or f'global_step{self.global_steps}'}"

    def load_checkpoint(self, save_dir):
        state = self.saved[-1][1]
        self.training_dataloader.load_state_dict(state["loader"])
        return save_dir, state


class Bigram(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(16, 16)
        self.dropout = torch.nn.Dropout(0.1)

    def forward(self, input_ids, labels):
        logits = self.dropout(self.table(input_ids))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Rows(list):
    def __init__(self, on_step=lambda row: None):
        self.on_step = on_step

    def log(self, row):
        self.append(SimpleNamespace(**row))
        if row["kind"] == "step":
            self.on_step(self[-1])


def make_loop(tmp_path, *logs, steps=12, engine=None, loss=None, **options):
    torch.manual_seed(0)
    module = Bigram()
    accumulation_steps = options.pop("accumulation_steps", 1)
    engine = engine or FakeEngine(module, accumulation_steps)
    task = Task(
        name="bigram",
        module=module,
        loss=loss or (lambda engine, batch: engine(batch[:, :-1], labels=batch[:, 1:])),
    )
    options = TrainOptions(steps=steps, **{"eval_every": 5, "save_minutes": 0, **options})
    loop = Loop(engine, task, options, windows(TOKENS, 8), tmp_path)
    loop.logs += logs
    return loop, engine


def steps_of(rows):
    return [row for row in rows if row.kind == "step"]


def evals_of(rows):
    return [row for row in rows if row.kind == "eval"]


def test_it_learns_records_and_saves(tmp_path):
    rows = Rows()
    loop, engine = make_loop(tmp_path, rows.log, accumulation_steps=2)
    outcome = loop.run()
    assert (outcome.steps, outcome.stopped_by) == (12, None)
    assert outcome.checkpoint.endswith("checkpoints/global_step12")
    assert [row.step for row in steps_of(rows)] == list(range(1, 13))
    assert [row.step for row in evals_of(rows)] == [0, 5, 10, 12]
    assert evals_of(rows)[-1].heldout_loss < evals_of(rows)[0].heldout_loss - 0.3
    last = rows[-2]
    assert last.tokens == 12 * 2 * 4 * 8
    assert (last.grad_norm, last.lr, last.collectives) == (1.5, 0.05, 6)
    assert last.tokens_per_s == pytest.approx(64 / last.step_time_s)
    assert last.mfu == pytest.approx(last.tflops_per_s / 100.0)
    assert 0 < last.memory_gib <= last.peak_memory_gib
    assert 0 <= last.data_time_s <= last.step_time_s
    ((folder, state),) = engine.saved
    assert (folder, state["tokens"]) == (str(tmp_path / "checkpoints"), 768)
    assert state["loader"]["samples"] == 12 * 2 * 4


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_stops_after_the_step(tmp_path, number):
    before = signal.getsignal(number)
    rows = Rows(lambda row: row.step == 3 and os.kill(os.getpid(), number))
    loop, engine = make_loop(tmp_path, rows.log)
    outcome = loop.run()
    assert (outcome.steps, outcome.stopped_by) == (4, signal.Signals(number).name)
    assert len(engine.saved) == 1
    assert signal.getsignal(number) is before


def test_a_signal_that_breaks_a_step_is_named(tmp_path):
    loop, engine = make_loop(tmp_path)

    def broken(loss):
        os.kill(os.getpid(), signal.SIGINT)
        raise RuntimeError("the compiler was killed")

    engine.backward = broken
    with pytest.raises(EngineError, match="SIGINT broke off the step after step 0"):
        loop.run()


def test_a_lost_rank_is_told_in_one_line(tmp_path):
    loop, engine = make_loop(tmp_path)

    def lost(loss):
        raise RuntimeError("[pair.cc:537] Read error: Connection reset by peer.")

    engine.backward = lost
    with pytest.raises(EngineError, match="another rank was lost in the step after step 0"):
        loop.run()


def test_a_run_in_two_parts_equals_one(tmp_path):
    whole, first, second = Rows(), Rows(), Rows()
    make_loop(tmp_path, whole.log, steps=80)[0].run()  # more than an epoch
    loop, engine = make_loop(tmp_path, first.log, steps=7)
    loop.run()
    fresh = FakeEngine(engine.module)
    fresh._optimizer, fresh.saved, fresh.global_steps = engine._optimizer, engine.saved, 7
    loop, _ = make_loop(tmp_path, second.log, steps=80, engine=fresh)
    loop.resume()
    loop.run()
    numbers = [(row.step, row.loss, row.tokens) for row in steps_of(first) + steps_of(second)]
    assert numbers == [(row.step, row.loss, row.tokens) for row in steps_of(whole)]


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path):
    loop, engine = make_loop(tmp_path)
    with torch.no_grad():
        engine.module.table.weight.fill_(float("nan"))
    with pytest.raises(EngineError, match="loss is nan at step 1"):
        loop.run()


def test_a_resumed_file_keeps_earlier_rows_and_drops_later_ones(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with json_lines(path) as log:
        for step in (1, 2, 3):
            log({"kind": "eval", "step": step, "heldout_loss": 1.0})
    with path.open("a") as file:
        file.write('{"kind": "ev')
    with json_lines(path, done=2) as log:
        log({"kind": "eval", "step": 3, "heldout_loss": 0.5})
    assert [(r["step"], r["heldout_loss"]) for r in read_json_lines(path)] == [
        (1, 1),
        (2, 1),
        (3, 0.5),
    ]
    with json_lines(path):
        pass
    assert read_json_lines(path) == []
