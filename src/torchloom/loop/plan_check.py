"""Compare a plan's prediction with what warm steps need, once for each plan.

    WARM_STEPS     steps in which nothing was captured: allocators and caches have settled
    TIMED_STEPS    steps whose forward and backward passes are timed
    one step       whose peak of memory is measured

On CUDA a timed phase ends by waiting for the device, and the peak is that of what was requested of torch's allocator, whose
statistics are reset once for it: what it allocates is more, as it rounds sizes up and keeps up to 1 MB of a block. On a CPU torch's profiler adds up what the step allocates, which makes this one step slower,
so that is done only while someone listens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchloom._torch.distributed import hushed_store
from torchloom._torch.modes import is_profiling
from torchloom.events import PlanCompared
from torchloom.log import get_logger
from torchloom.memory import distinct_bytes
from torchloom.memory.measure import allocations, memory_profile, profiler_events
from torchloom.pipeline import CompileSession
from torchloom.runtime import Communicator
from torchloom.runtime.host import is_on_host

logger = get_logger(__name__)

WARM_STEPS = 2
TIMED_STEPS = 3


class Foretold(NamedTuple):
    """What the plan of a session says of an optimizer step."""

    peak_bytes: int
    seconds: float | None
    """Of all forward and backward passes as they were woven, without the update; None where one step may not run all
    graphs, or a graph was not timed."""
    digest: str
    """Of the plan."""


def foretold(session: CompileSession, micro_steps: int) -> Foretold | None:
    """Return the prediction of a session's plan; None where nothing is planned, or cannot be measured.

    What CUDA graphs compute in is in no statistics of what was requested.

    Args:
        session: with the graphs captured so far.
        micro_steps: forward and backward passes of an optimizer step.
    """
    plan = session.plan()
    if not plan.graphs or session.recordings is not None:
        return None
    planned = {id(each) for each in plan.graphs}
    running = [each for each in session.report.graphs if id(each.plan) in planned]
    # Graphs of one kind are for batches of other sizes, of which a step runs one.
    is_whole = len({each.kind for each in running}) == len(running)
    times = [each.times.total_us for each in running if each.times is not None]
    is_whole &= len(times) == len(running)
    return Foretold(
        plan.peak_bytes, 1e-6 * micro_steps * sum(times) if is_whole else None, plan.digest
    )


class Meter:
    """Adds up time and memory of the phases of one step."""

    def __init__(self, device: torch.device, *, counts_memory: bool, live_bytes: int) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._profiles = counts_memory and not self._is_cuda
        self.live_bytes = self.peak_bytes = live_bytes
        """What is allocated, by a CPU's profiles so far; and the most so far."""
        self.is_lost = False
        """Whether a profiler of the program began within a phase, and took what was recorded."""
        self.seconds = 0.0
        """Of forward and backward passes."""
        self.peak_before_bytes = 0
        """What the allocator's statistics said before they were reset for this step."""
        if counts_memory and self._is_cuda:
            self.peak_before_bytes = torch.cuda.max_memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure a `with` block."""
        started = time.perf_counter()
        if self._profiles and not is_profiling():
            # c10 prints a warning when memory from before is freed, which is counted in `live_bytes`.
            with hushed_store(), memory_profile() as profile:
                with torch.profiler.record_function("torchloom.measured"):
                    pass  # an event that a whole profile has
                yield
            self._add(profile)
        else:
            yield
        if self._is_cuda:
            torch.cuda.synchronize(self._device)
            self.peak_bytes = requested_peak_bytes(self._device)
        if name != "step":
            self.seconds += time.perf_counter() - started

    def _add(self, profile: torch.profiler.profile) -> None:
        found = profiler_events(profile)
        self.is_lost |= not found
        for num_bytes in allocations(found):
            self.live_bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)


def requested_peak_bytes(device: torch.device) -> int:
    """Return the most that tensors on a GPU held at a time; with CUDA's own allocator, what it allocated for them."""
    requested = torch.cuda.memory_stats(device).get("requested_bytes.all.peak", 0)
    return int(requested or torch.cuda.max_memory_allocated(device))


def standing_bytes(model: nn.Module, optimizer: Optimizer | None, comm: Communicator) -> int:
    """Return the bytes on the device before a step: weights, gradients, buffers, optimizer states."""
    tensors: list[Tensor] = [*model.parameters(), *model.buffers()]
    tensors += [param.grad for param in model.parameters() if param.grad is not None]
    if optimizer is not None:
        values = [value for state in optimizer.state.values() for value in state.values()]
        tensors += [value for value in values if isinstance(value, Tensor)]
    kept = distinct_bytes(tensor for tensor in tensors if not is_on_host(tensor))
    return kept + comm.residents.num_bytes


@dataclass
class PlanCheck:
    """Chooses the steps to measure, and compares."""

    device: torch.device
    micro_steps: int
    times: bool = True
    """Whether steps tell where their forward and backward passes begin and end, so that these can be timed."""
    foretold: Foretold | None = None
    """By the plan of the graphs captured so far."""
    meter: Meter | None = None
    """Of the step that runs, where it is measured."""
    measured_peak_bytes: int | None = None
    """Of the step that was compared with `foretold`."""
    peak_before_bytes: int = 0
    """The peak of all steps before the one for which statistics were reset."""
    _num_graphs: int = 0
    _num_steps: int = 0
    """Steps since a graph was captured."""
    _seconds: list[float] = field(default_factory=list)
    _compared: set[str] = field(default_factory=set)
    """Digests of plans."""

    def begin(self, live_bytes: Callable[[], int], *, is_heard: bool) -> None:
        """Begin to measure the next step, if its turn has come.

        Args:
            live_bytes: returns what is allocated before the step.
            is_heard: whether someone listens.
        """
        self.meter = None
        if self.foretold is None or self.foretold.digest in self._compared:
            return
        is_cpu = self.device.type != "cuda"
        if self._num_steps < WARM_STEPS or (is_cpu and (is_profiling() or not is_heard)):
            return
        is_last = self._are_timed()
        self.meter = Meter(
            self.device,
            counts_memory=is_last,
            live_bytes=live_bytes() if is_last and is_cpu else 0,
        )

    def end(
        self, session: CompileSession | None, step: int, *, skipped: bool
    ) -> PlanCompared | None:
        """Take in a step that ended; return the comparison, once.

        Args:
            session: of the graphs, None if nothing is compiled.
            step: steps done.
            skipped: whether the optimizer did not step: such a step needs less.
        """
        meter, self.meter = self.meter, None
        if meter is not None:
            self.peak_before_bytes = max(self.peak_before_bytes, meter.peak_before_bytes)
        num_graphs = 0 if session is None else len(session.report.graphs)
        if session is None or num_graphs != self._num_graphs:
            self._num_graphs, self._num_steps = num_graphs, 0
            self._seconds.clear()
            self.measured_peak_bytes = None
            self.foretold = None if session is None else foretold(session, self.micro_steps)
            return None
        self._num_steps += 1
        if meter is None or self.foretold is None or skipped:
            return None
        if not self._are_timed():
            self._seconds.append(meter.seconds)
            return None
        self._compared.add(self.foretold.digest)
        if meter.is_lost:
            return None
        self.measured_peak_bytes = meter.peak_bytes
        return PlanCompared(
            step=step,
            predicted_peak_bytes=self.foretold.peak_bytes,
            measured_peak_bytes=meter.peak_bytes,
            predicted_seconds=self.foretold.seconds,
            measured_seconds=min(self._seconds, default=None),
        )

    def _are_timed(self) -> bool:
        return not self.times or len(self._seconds) == TIMED_STEPS


def log_compared(compared: PlanCompared) -> None:
    """Tell a comparison in the log."""
    times = ""
    if compared.measured_seconds is not None:
        predicted_s = compared.predicted_seconds
        predicted = "-" if predicted_s is None else f"{1e3 * predicted_s:.1f} ms"
        measured = f"{1e3 * compared.measured_seconds:.1f} ms"
        times = f"; forward and backward predicted {predicted}, measured {measured}"
    logger.info(
        "step %d: peak memory predicted %.1f MiB, measured %.1f MiB%s",
        compared.step,
        compared.predicted_peak_bytes / 2**20,
        compared.measured_peak_bytes / 2**20,
        times,
    )
