"""The training loop: steps, agreement between ranks, evaluation, saving.

    evaluate
    until the last step:  micro-steps -> optimizer step -> all-reduce of loss, stop, save -> record
                          every `eval_every` steps: evaluate;  every `save_every` steps: save, or
                          after `save_after_s` on rank 0: save in place of the last one on the way
    evaluate and save at the end; after a stop signal only save

The engine is an argument, so tests run the loop with a small substitute. One small all-reduce per
step carries the loss and what signals requested, so all ranks save and stop after the same step.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

import torchloom
from torchloom.errors import EngineError, PeerLostError, own_error
from torchloom.recipes.train.failing import failing_in, is_lost_peer
from torchloom.recipes.train.metrics import EvalRow, Sink, StepRow, memory_gib
from torchloom.recipes.train.stop import StopRequest
from torchloom.recipes.train.stream import SampleStream
from torchloom.recipes.train.task import Task

_LOGGER = logging.getLogger(__name__)
_ON_THE_WAY = "on_the_way"
"""The tag of the one checkpoint that is saved by the clock."""


class TrainingEngine(Protocol):
    """The part of an engine that the loop uses."""

    device: Any
    global_steps: int
    should_stop: bool
    stop_reason: str | None
    rank: int
    world_size: int

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
    def backward(self, loss: Tensor) -> Any: ...
    def step(self) -> Any: ...
    def train(self) -> Any: ...
    def eval(self) -> Any: ...
    def get_lr(self) -> list[float]: ...
    def get_global_grad_norm(self) -> float | None: ...
    def comm_stats(self) -> Any: ...
    def was_step_applied(self) -> bool: ...
    def save_checkpoint(
        self, save_dir: Any, tag: Any, /, *, client_state: Any, keep_last: int | None
    ) -> Any:
        """Save; see `torchloom.Engine.save_checkpoint`.

        Args:
            save_dir: the folder of checkpoints.
            tag: the name of this one; None names it by the step.
            client_state: plain values to restore later.
            keep_last: number of newest checkpoints to keep; None keeps all.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class LoopPlan:
    """How long to run, and when to evaluate and save."""

    steps: int
    """Optimizer steps of the whole run."""
    eval_every: int
    """Steps between two evaluations."""
    accumulation_steps: int
    """Micro-steps per optimizer step."""
    checkpoint_dir: Path
    save_every: int | None = None
    """Steps between two checkpoints; None saves none by steps."""
    save_after_s: float = 0.0
    """Seconds after a save at which the checkpoint on the way is replaced; 0 saves none by the clock."""
    keep_last: int | None = None
    """Number of newest checkpoints to keep; None keeps all."""
    seed: int = 0
    peak_tflops: float | None = None
    """Dense bf16 peak of a device in TFLOP/s; None if not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How the run ended."""

    step: int
    checkpoint: str
    stopped_by: str | None
    """The signal that ended it early."""


class _Asked(NamedTuple):
    """What signals requested on any rank, or rank 0's clock."""

    stop: bool
    save: bool
    is_late: bool = False
    """The last save was `save_after_s` ago."""


class _Work(NamedTuple):
    """Results of the micro-steps of one step: mean loss of this rank, seconds spent on data, tokens of all
    ranks."""

    loss: Tensor
    data_time_s: float
    num_tokens: int


class Loop:
    """One run over one engine.

    Args:
        engine: does the steps.
        task: the model's loss and its cost per token.
        stream: this rank's training batches.
        heldout: this rank's evaluation batches, equally many on every rank.
        plan: how long to run.
        sinks: where rows go; only rank 0 has any.
    """

    def __init__(
        self,
        engine: TrainingEngine,
        task: Task,
        *,
        stream: SampleStream,
        heldout: Sequence[Tensor],
        plan: LoopPlan,
        sinks: Sequence[Sink] = (),
    ) -> None:
        self._engine = engine
        self._task = task
        self._stream = stream
        self._heldout = heldout
        self._plan = plan
        self._sinks = sinks
        self._tokens = 0
        self._saved_at = time.monotonic()

    def run(self) -> Outcome:
        """Train until the last step or until a signal requests a stop; save in both cases.

        Raises:
            EngineError: the loss is not finite, a signal interrupted a step, or a rank was lost.
            NoMemoryError: host or device memory ran out.
        """
        engine, plan = self._engine, self._plan
        asked = _Asked(stop=False, save=False)
        engine.train()
        with StopRequest() as request, _explaining_failures(request, engine):
            self._evaluate()
            while engine.global_steps < plan.steps and not asked.stop:
                asked = self._step(request)
                step = engine.global_steps
                is_last = step >= plan.steps
                if not asked.stop and (is_last or step % plan.eval_every == 0):
                    self._evaluate()
                is_due = plan.save_every is not None and step % plan.save_every == 0
                if (is_due or any(asked)) and not is_last and not asked.stop:
                    tag = None if is_due or asked.save else _ON_THE_WAY
                    _LOGGER.info("saved %s", self.save(tag))
            checkpoint = self.save()
        return Outcome(
            step=engine.global_steps,
            checkpoint=checkpoint,
            stopped_by=self._why_stopped(request) if asked.stop else None,
        )

    def save(self, tag: str | None = None) -> str:
        """Write a checkpoint from which `--resume` continues with the same samples and losses.

        Args:
            tag: its name; None names it by the step.
        """
        state = {"stream": self._stream.state_dict(), "tokens": self._tokens}
        folder = self._plan.checkpoint_dir
        engine = self._engine
        with failing_in(f"while saving after step {engine.global_steps}", rank=engine.rank):
            path = engine.save_checkpoint(
                str(folder), tag, client_state=state, keep_last=self._plan.keep_last
            )
        self._saved_at = time.monotonic()
        return str(path)

    def _why_stopped(self, request: StopRequest) -> str:
        return self._engine.stop_reason or request.signal_name or "another rank"

    def restore(self, client_state: dict[str, Any]) -> None:
        """Continue the data where the checkpoint left it."""
        self._stream.load_state_dict(client_state["stream"])
        self._tokens = client_state["tokens"]

    def _step(self, request: StopRequest) -> _Asked:
        """Run one optimizer step and record it; return what signals requested on any rank."""
        engine, plan = self._engine, self._plan
        # A seed per step and rank makes dropout the same after a resume, with no state to save.
        torch.manual_seed(((plan.seed << 32) + engine.global_steps) * 65_537 + engine.rank)
        lr, comm_before = engine.get_lr()[0], engine.comm_stats()
        started = time.perf_counter()
        work = self._micro_steps()
        is_late = 0 < plan.save_after_s <= time.monotonic() - self._saved_at
        own = _Asked(request.is_set, request.take_save(), engine.rank == 0 and is_late)
        loss, asked = self._agree(work.loss, own)
        step_time_s = time.perf_counter() - started
        comm = engine.comm_stats()
        self._tokens += work.num_tokens
        tokens_per_s = work.num_tokens / step_time_s
        tflops = tokens_per_s / engine.world_size * self._task.flops_per_token / 1e12
        in_use_gib, peak_gib = memory_gib(engine.device)
        row = StepRow(
            step=engine.global_steps,
            loss=loss,
            lr=lr,
            grad_norm=_finite_or_none(engine.get_global_grad_norm()),
            tokens=self._tokens,
            step_time_s=step_time_s,
            data_time_s=work.data_time_s,
            tokens_per_s=tokens_per_s,
            tflops_per_s=tflops,
            mfu=tflops / plan.peak_tflops if plan.peak_tflops else None,
            memory_gib=in_use_gib,
            peak_memory_gib=peak_gib,
            collectives=comm.num_collectives - comm_before.num_collectives,
            collective_bytes=comm.num_bytes - comm_before.num_bytes,
        )
        self._record(row)
        return asked

    def _micro_steps(self) -> _Work:
        engine = self._engine
        data_time_s, num_tokens = 0.0, 0
        loss_sum = torch.zeros((), device=engine.device)
        for _ in range(self._plan.accumulation_steps):
            waited = time.perf_counter()
            batch = next(self._stream).to(engine.device)
            data_time_s += time.perf_counter() - waited
            loss = self._task.loss(engine, batch)
            engine.backward(loss)
            engine.step()
            loss_sum += loss.detach()
            num_tokens += batch[:, 1:].numel() * engine.world_size
        return _Work(loss_sum / self._plan.accumulation_steps, data_time_s, num_tokens)

    def _agree(self, loss: Tensor, own: _Asked) -> tuple[float, _Asked]:
        """Return the mean loss over ranks, and what signals requested on any of them."""
        mine = torch.tensor([float(each) for each in own], device=loss.device)
        both = torch.cat((loss.float().reshape(1), mine))
        mean_loss, stops, saves, lates = torchloom.all_reduce(
            both, name="loss, and who was asked to stop or save"
        ).tolist()
        # The engine's policy (`non_finite`) handles steps that it skipped for this reason.
        if not math.isfinite(mean_loss) and self._engine.was_step_applied():
            raise EngineError(
                f"the loss is {mean_loss} at step {self._engine.global_steps}: training cannot go "
                "on; lower the learning rate, or resume from an earlier checkpoint"
            )
        stops_itself = self._engine.should_stop  # equal on all ranks
        return mean_loss, _Asked(stops > 0 or stops_itself, saves > 0, lates > 0)

    def _evaluate(self) -> None:
        """Record the mean loss over the held-out batches of all ranks."""
        engine = self._engine
        total = torch.zeros((), device=engine.device)
        engine.eval()
        with torch.no_grad(), _eagerly():
            for batch in self._heldout:
                total += self._task.loss(engine, batch.to(engine.device)).float()
        engine.train()
        mean = torchloom.all_reduce(total / len(self._heldout), name="held-out loss")
        self._record(EvalRow(step=engine.global_steps, heldout_loss=float(mean)))

    def _record(self, row: StepRow | EvalRow) -> None:
        for sink in self._sinks:
            sink.log(row)


@contextmanager
def _eagerly() -> Iterator[None]:
    """Run eagerly: compiling the evaluation would take longer than it saves."""
    with torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def _explaining_failures(request: StopRequest, engine: TrainingEngine) -> Iterator[None]:
    """Report in one sentence that a signal interrupted the step, a rank was lost, or memory is full."""
    try:
        with failing_in(lambda: f"in the step after step {engine.global_steps}", rank=engine.rank):
            yield
    except (RuntimeError, MemoryError) as err:
        step, own = engine.global_steps, own_error(err)
        is_lost = is_lost_peer(err) or (err.__cause__ is not None and is_lost_peer(err.__cause__))
        if request.is_set and (own is None or is_lost or isinstance(own, PeerLostError)):
            raise EngineError(
                f"{request.signal_name} broke off the step after step {step}, which is therefore "
                f"not saved ({type(err).__name__}): resume from the last checkpoint, if there is one"
            ) from err
        raise


def _finite_or_none(value: float | None) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None
