"""Process groups end when their owner ends them, whoever still holds a model over them."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from support.commands import python
from support.ranks import run_ranks
from support.runs import make_engine, train
from torchloom.errors import ShardError
from torchloom.runtime import get_communicator

THREADS = Path("/proc/self/task")

pytestmark = pytest.mark.skipif(not THREADS.exists(), reason="reads the kernel's list of threads")


def gloo_threads() -> list[str]:
    names = []
    for task in THREADS.iterdir():
        with suppress(FileNotFoundError):  # a thread that ends
            names.append((task / "comm").read_text().strip())
    return [name for name in names if "gloo" in name]


def test_destroying_the_group_stops_its_threads_while_an_engine_lives(tmp_path) -> None:
    def fn(rank):
        engine, model = make_engine(3)
        engine.compile(backend="aot_eager")
        train(engine, rank, 2)
        engine.save_checkpoint(tmp_path)
        before = gloo_threads()
        dist.destroy_process_group()
        after = gloo_threads()
        with pytest.raises(ShardError, match="has been destroyed"):
            model.state_dict()
        return bool(before), after

    assert run_ranks(2, fn) == [(True, []), (True, [])]


def test_a_script_that_destroys_nothing_exits_without_threads(tmp_path) -> None:
    script = tmp_path / "forgetful.py"
    script.write_text(
        "import atexit, pathlib, torch\n"
        # Handlers run last in, first out: this one runs after those of torchloom.
        "def show():\n"
        "    tasks = pathlib.Path('/proc/self/task').iterdir()\n"
        "    print('left', [n for t in tasks if 'gloo' in (n := (t / 'comm').read_text())])\n"
        "atexit.register(show)\n"
        "import torchloom\n"
        "model = torch.nn.Linear(8, 8)\n"
        "engine, *_ = torchloom.initialize(model=model, config={'optimizer': {'type': 'AdamW'},\n"
        "    'train_micro_batch_size_per_gpu': 1, 'zero_optimization': {'stage': 3}})\n"
        "engine.backward(engine(torch.ones(2, 8)).mean())\n"
        "engine.step()\n"
    )
    done = python(script)
    assert "left []" in done.stdout, done.stdout


def test_a_group_of_one_replica_is_the_plain_communicator() -> None:
    def fn(rank):
        world = dist.group.WORLD
        alone = [dist.new_group([r]) for r in range(2)][rank]
        plain = get_communicator(world)
        return get_communicator(world, alone) is plain, get_communicator(world) is plain

    assert run_ranks(2, fn) == [(True, True)] * 2


def test_a_new_default_group_gets_a_new_communicator() -> None:
    def fn(rank):
        store = dist.PrefixStore("again", dist.distributed_c10d._get_default_store())
        old = get_communicator(dist.group.WORLD)
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        new = get_communicator(dist.group.WORLD)
        full = torch.zeros(2)
        new.gather_into([torch.ones(1) + rank], [full], ["w"])
        return old is new, old.handle == new.handle, full.tolist()

    assert run_ranks(2, fn) == [(False, False, [1.0, 2.0])] * 2
