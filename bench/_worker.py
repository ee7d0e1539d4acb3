"""One rank of one arm: a process that obeys JSON lines on stdin and answers on stdout.

    {"do": "build", ...}            build, compile, warm up; answers with times, memory, losses, facts
    {"do": "run", "steps": n, ...}  one settling step, then n recorded ones
    end of input                    leave

Between commands it blocks in a read and uses no CPU. What libraries print goes to stderr, a log file.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from _clock import read_clocks
from _data import batches, read_corpus
from _memory import AllocationLog, StepMemory, read_rollup, trim_heap
from _model import Shape, build_model
from _probe import CoreProbe
from arms.base import Job, Trainee, UnavailableError

Answer = dict[str, Any]


class Worker:
    """Holds the trainee and its place in the data."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self._spec = spec
        self._probe = CoreProbe()
        self._before = read_rollup()
        self._trainee: Trainee | None = None
        self._data: Iterator[tuple[Tensor, Tensor]] = iter(())

    def build(self, *, warmup: int, options: dict[str, Any] | None = None) -> Answer:
        """Build the trainee and take `warmup` steps, then one more if memory is to be logged.

        `options` replaces those of the arm: whoever only asks what fits needs one process.
        """
        spec, shape = self._spec, Shape(**self._spec["shape"])
        self._data = batches(
            read_corpus(),
            batch=spec["batch"] * spec["accumulation"],
            seq_len=shape.seq_len,
            rank=spec["rank"],
        )
        log = AllocationLog(Path(spec["allocator"])) if spec["allocator"] else None
        start = time.perf_counter()
        job = Job(
            model=lambda: build_model(shape),
            rank=spec["rank"],
            world_size=spec["world_size"],
            batch=spec["batch"],
            accumulation=spec["accumulation"],
        )
        self._trainee = import_module(spec["module"]).build(
            job, **(spec["options"] if options is None else options)
        )
        # Some peers import Inductor while they are built, some when they compile: not what is timed.
        import_module("torch._inductor.compile_fx")
        built = time.perf_counter()
        cpu_s = _cpu_s()
        self._trainee.compile()
        losses = [self._step()]
        first = time.perf_counter()
        first_cpu_s = _cpu_s() - cpu_s
        losses += [self._step() for _ in range(warmup - 1)]
        warm = time.perf_counter()
        memory = None
        if log:
            losses.append(self._step(log))
            memory = log.stop()[-1]
        trim_heap()
        return {
            "build_s": built - start,
            "first_step_s": first - built,
            "first_step_cpu_s": first_cpu_s,
            "warm_step_s": (warm - first) / max(1, warmup - 1),
            "losses": losses,
            "said": self._trainee.facts(),
            **self._memory(memory),
        }

    def run(self, *, steps: int) -> Answer:
        """Take one step that settles caches and heap again, then `steps` that count."""
        assert self._trainee is not None, "the driver sends build first"
        losses, samples = [self._step()], []
        before = self._probe.measure()
        for _ in range(steps):
            start = read_clocks()
            losses.append(self._step())
            passed = asdict(read_clocks().since(start))
            after = self._probe.measure()
            probes_s = (before, after)
            samples.append({**passed, "micro_s": self._trainee.micro_s(), "probes_s": probes_s})
            before = after
        trim_heap()
        return {"losses": losses, "samples": samples}

    def _step(self, log: AllocationLog | None = None) -> float:
        """Take a step; with a log, mark where it begins and ends, its batch being alive before."""
        assert self._trainee is not None, "the driver sends build first"
        tokens, targets = next(self._data)
        if log:
            log.mark()
        loss = self._trainee.step(tokens, targets).item()
        if log:
            log.mark()
        return loss

    def _memory(self, step: StepMemory | None) -> Answer:
        now = read_rollup()
        return {
            "live_bytes": step.live_bytes if step else None,
            "peak_bytes": step.peak_bytes if step else None,
            "shared_bytes": now["Pss_Shmem"] - self._before["Pss_Shmem"],
            "anonymous_bytes": now["Pss_Anon"] - self._before["Pss_Anon"],
        }


def main() -> None:
    """Serve commands until stdin ends."""
    spec = json.loads(sys.argv[1])
    answers = _take_stdout()
    torch.set_num_threads(1)
    worker = Worker(spec)
    commands = {"build": worker.build, "run": worker.run}
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = commands[command.pop("do")](**command)
        except UnavailableError as error:
            answer = {"unavailable": str(error)}
        except Exception as error:  # noqa: BLE001 - whatever an arm raises is reported as its result
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {_first_line(str(error))}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    os._exit(0)  # a process group's threads may wait for a peer that has already left


def _take_stdout() -> TextIO:
    """Return the real stdout for answers and send everybody else's prints to stderr."""
    mine = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return mine


def _cpu_s() -> float:
    """CPU seconds of this process and of the compilers that it ran and waited for."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else ""


if __name__ == "__main__":
    main()
