"""One of two ranks that answer what bench/trust.py asks: torchloom beside FSDP2 with DCP.

_trust_worker.py '{"job": "steps" | "saves" | "damage" | "killed", ...}'    rank 0 writes JSON to `out`
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torchloom
from _data import batches, read_corpus
from _model import Decoder, Shape, build_model
from arms.base import LEARNING_RATE, WEIGHT_DECAY, join_group, make_optimizer
from torchloom.position import POSITION, Wait
from torchloom.runtime.channel import CHANNELS, Channel, label
from torchloom.shard import local_shard

Job = dict[str, Any]
_TIMED_CALLS = 2000


class Loom:
    """A torchloom engine of stage 3, and how it saves and loads."""

    name = "torchloom"

    def __init__(self, job: Job, *, compiled: bool = False) -> None:
        shape, batch = Shape(**job["shape"]), job.get("batch", 1)
        config = {
            "train_micro_batch_size_per_gpu": batch,
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY},
            },
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
            "steps_per_print": float("inf"),
        }
        self.engine, *_ = torchloom.initialize(model=build_model(shape), config=config)
        if compiled:
            self.engine.compile()
        self._data = batches(
            read_corpus(), batch=batch, seq_len=shape.seq_len, rank=self.engine.rank
        )

    def step(self) -> None:
        self.engine.backward(self.engine(*next(self._data)))
        self.engine.step()

    def save(self, path: Path) -> None:
        self.engine.save_checkpoint(path.parent, path.name, async_save=False)

    def save_async(self, path: Path) -> Callable[[], object]:
        self.engine.save_checkpoint(path.parent, path.name, async_save=True)
        return self.engine.wait_for_checkpoint

    def load(self, path: Path) -> None:
        self.engine.load_checkpoint(path.parent, path.name)

    def tensors(self) -> list[Tensor]:
        state = self.engine.optimizer.state_dict()["state"]
        moments = [torch.as_tensor(v) for held in state.values() for v in held.values()]
        return [*map(local_shard, self.engine.module.parameters()), *moments]


class Fsdp:
    """FSDP2 with AdamW, saved and loaded by torch.distributed.checkpoint."""

    name = "fsdp2-dcp"

    def __init__(self, job: Job) -> None:
        shape = Shape(**job["shape"])
        mesh = init_device_mesh("cpu", (2,))
        self.model: Decoder = build_model(shape)
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = make_optimizer(self.model)
        self._data = batches(read_corpus(), batch=1, seq_len=shape.seq_len, rank=dist.get_rank())

    def step(self) -> None:
        self.model(*next(self._data)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def save(self, path: Path) -> None:
        dcp.save(self._state(), checkpoint_id=path)

    def save_async(self, path: Path) -> Callable[[], object]:
        return dcp.async_save(self._state(), checkpoint_id=path).result

    def load(self, path: Path) -> None:
        state = self._state()
        dcp.load(state, checkpoint_id=path)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
        )

    def tensors(self) -> list[Tensor]:
        state = self.optimizer.state_dict()["state"]
        moments = [torch.as_tensor(v) for held in state.values() for v in held.values()]
        every = [*self.model.parameters(), *moments]
        return [each.to_local() if hasattr(each, "to_local") else each for each in every]


def steps(job: Job) -> dict[str, Any]:
    """Time steps of the compiled engine and, by the labels that a step begins, their bookkeeping."""
    loom = Loom(job, compiled=True)
    for _ in range(3):
        loom.step()
    channel = max(CHANNELS.values(), key=lambda each: each.num_begun)
    before = dict(channel._numbers)
    loom.step()
    begun = [
        each for each, num in channel._numbers.items() for _ in range(num - before.get(each, 0))
    ]
    walls, books, lines = [], [], _line_clocks()
    started = time.perf_counter()
    for _ in range(job["rounds"]):
        for _ in range(2):
            dist.barrier()
            at = time.perf_counter()
            loom.step()
            walls.append(time.perf_counter() - at)
        books.append(_bookkeeping_s(begun))
    spent = [after - at for after, at in zip(_line_clocks(), lines, strict=True)]
    return {
        "batch": job["batch"],
        "collectives": len(begun),
        "steps_s": walls,
        "bookkeeping_s": books,
        "line_threads_cpu_share": sum(spent) / (time.perf_counter() - started),
        "line_threads": len(lines),
    }


def _bookkeeping_s(begun: list[Any]) -> float:
    """Return the processor's time for labelling, beginning and waiting of one step's collectives.

    Each collective: its label is looked up from names and size, an entry begins, a wait is set and
    taken back. What the thread did meanwhile is on its own clock, so a busy machine does not count.
    """
    scratch = Channel("bench", (0, 1))
    repeats = max(1, _TIMED_CALLS // len(begun))
    started = time.thread_time()
    for _ in range(repeats):
        for each in begun:
            what = label(each.op, each.names, each.dtype, each.num_bytes)
            entry = scratch.begin(what)
            POSITION.waiting = Wait(entry, time.monotonic())
            _ = entry.tag
            POSITION.waiting = None
    spent = time.thread_time() - started
    del CHANNELS["bench"]
    return spent / repeats


def _line_clocks() -> list[float]:
    """Return the CPU seconds of the threads that wait on lines, of this process."""
    found = []
    for thread in threading.enumerate():
        if thread.name in ("torchloom-line", "torchloom-hub"):
            stat = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text()
            found.append(int(stat.split()[0]) * 1e-9)
    return found


def saves(job: Job) -> dict[str, Any]:
    """Time saves, taking turns."""
    arms = [Loom(job), Fsdp(job)]
    folder = Path(job["folder"])
    found: dict[str, list[dict[str, float]]] = {}
    for arm in arms:
        arm.step()
        arm.save(folder / arm.name / "warm")
        arm.save_async(folder / arm.name / "warm-async")()
    for index in range(job["rounds"]):
        for arm in arms if index % 2 else arms[::-1]:
            for way in ("sync", "async"):
                found.setdefault(f"{arm.name} {way}", []).append(
                    _time_save(arm, way, folder / arm.name / f"{way}{index}")
                )
    size = sum(f.stat().st_size for f in (folder / "torchloom" / "warm").iterdir())
    return {"saves": found, "bytes": size}


def _time_save(arm: Any, way: str, path: Path) -> dict[str, float]:
    dist.barrier()
    started = time.perf_counter()
    wait = arm.save_async(path) if way == "async" else arm.save(path)
    stalled = time.perf_counter() - started
    if wait is not None:
        wait()
    both = torch.tensor([stalled, time.perf_counter() - started], dtype=torch.float64)
    dist.all_reduce(both, dist.ReduceOp.MAX)  # the slower rank holds the step up
    if dist.get_rank() == 0:
        shutil.rmtree(path)
    dist.barrier()
    return {"stall_s": both[0].item(), "done_s": both[1].item()}


def damage(job: Job) -> dict[str, Any]:
    """Load a damaged checkpoint for each case; say what came of it on this rank."""
    from _trust_damage import DAMAGE

    folder, found = Path(job["folder"]), dict(job["known"])
    arm = {"torchloom": Loom, "fsdp2-dcp": Fsdp}[job["arm"]](job)
    arm.step()
    arm.save(folder / "older")
    arm.step()
    arm.save(folder / "newer")
    truth = [each.detach().clone() for each in arm.tensors()]
    for name, change in DAMAGE.items():
        if name in found:
            continue
        path = folder / "damaged"
        if dist.get_rank() == 0:
            shutil.rmtree(path, ignore_errors=True)
            shutil.copytree(folder / "newer", path)
            change(path, folder / "older")
        dist.barrier()
        arm.step()  # weights are others before the load
        found[name] = _outcome(arm, path, truth)
        _keep(job, found)  # what is known, should the next case end this process
    return found


def _outcome(arm: Any, path: Path, truth: list[Tensor]) -> str:
    try:
        arm.load(path)
    except BaseException as error:  # noqa: BLE001  a load's result; DCP's errors are no Exceptions
        mine = f"raises {type(error).__name__}"
    else:
        same = all(torch.equal(a, b) for a, b in zip(arm.tensors(), truth, strict=True))
        mine = "loads right data" if same else "loads wrong data silently"
    told = _all(mine)
    silent = [each for each in told if "silently" in each]  # on one rank is enough
    return silent[0] if silent else " / ".join(dict.fromkeys(told))


def _all(mine: str) -> list[str]:
    told: list[Any] = [None, None]
    dist.all_gather_object(told, mine)
    return sorted(told)


def killed(job: Job) -> dict[str, Any]:
    """Save into a name that exists, and let a kill end rank 1 in the middle; or load what is left."""
    folder = Path(job["folder"])
    arm = {"torchloom": Loom, "fsdp2-dcp": Fsdp}[job["arm"]](job)
    older, newer = folder / "truth-older", folder / "truth-newer"
    mine = f"{dist.get_rank()}.pt"
    if job["phase"] == "load":
        arm.step()
        truths = [torch.load(path / mine) for path in (older, newer)]
        found = [_outcome(arm, folder / "again", truth) for truth in truths]
        right = [each for each in found if each == "loads right data"]
        return {"outcome": right[0] if right else found[0]}
    for truth in (older, newer):
        arm.step()
        truth.mkdir(exist_ok=True)
        torch.save([each.detach().clone() for each in arm.tensors()], truth / mine)
        dist.barrier()
        if truth is newer and dist.get_rank() == 1:
            _die_at(job["moment"])
        arm.save(folder / "again")
    return {"outcome": "was not killed"}


def _die_at(moment: str) -> None:
    def die() -> None:
        time.sleep(2.0)  # the other rank has written its part
        os.kill(os.getpid(), signal.SIGKILL)

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[0]).endswith(".distcp") and arguments[2] & os.O_WRONLY:
            die()

    if moment == "open":
        sys.addaudithook(watch)
    else:
        os.fsync = lambda fd: die()


def _keep(job: Job, found: dict[str, Any]) -> None:
    if dist.get_rank() == 0:
        Path(job["out"]).write_text(json.dumps(found))


def main() -> None:
    """Do the job."""
    job = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    join_group()
    found = {"steps": steps, "saves": saves, "damage": damage, "killed": killed}[job["job"]](job)
    _keep(job, found)
    dist.barrier()
    os._exit(0)  # threads of process groups may wait for a peer that has left


if __name__ == "__main__":
    main()
