"""Collect what each optimizer step did, in numbers, for recorders and trackers.

    begin      notes when the first forward of a step begins
    forward    counts the tokens of a batch
    backward   these tokens belong to the step
    updating   notes the rates that the optimizer steps with
    ended      makes one `StepEnded` of it

Nothing here communicates: sums over ranks come with the collective of the gradient norm. With nobody listening
a step costs three looks at a clock; the loss and the norm, which the device has to be waited for, are read for
listeners alone.
"""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from torchloom import events
from torchloom._torch.untraced import leave_alone
from torchloom.costs.hardware import peak_tflops
from torchloom.loop.plan_check import PlanCheck, log_compared
from torchloom.loop.trackers import Tracker
from torchloom.memory import distinct_bytes
from torchloom.pipeline import CompileSession
from torchloom.runtime import Communicator
from torchloom.shard import Layout

_INTEGERS = (torch.int64, torch.int32)
TokensOf = Callable[..., int | None]


@dataclass
class Work:
    """What tokens per second and MFU rest on; assign a field to replace what torchloom assumes.

    Example:
        >>> engine.work.flops_per_token = 6 * 2.4e9  # doctest: +SKIP
        >>> engine.work.tokens_of = lambda batch: int(batch.mask.sum())  # doctest: +SKIP
    """

    flops_per_token: float | None
    """FLOPs of forward and backward per token; None: not known, so there is no MFU."""
    peak_tflops: float | None
    """Dense bf16 peak of the device in TFLOP/s; None: not known, so there is no MFU."""
    tokens_of: TokensOf = field(default_factory=lambda: _tokens_of)
    """Gets the arguments of a forward call, returns the number of its tokens, or None."""

    def mfu(self, tokens_per_second: float | None) -> float | None:
        """Return the utilization by a rank's tokens per second, from 0 to 1; None where it is not known."""
        if tokens_per_second is None or self.flops_per_token is None or self.peak_tflops is None:
            return None
        return tokens_per_second * self.flops_per_token / (1e12 * self.peak_tflops)


def work_of(model: nn.Module, layout: Layout, device: torch.device) -> Work:
    """Return what is known of a sharded model's work on a device."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return Work(flops_per_token=_flops_per_token(model, layout), peak_tflops=peak_tflops(name))


def _flops_per_token(model: nn.Module, layout: Layout) -> float | None:
    """Return 6 FLOPs for each trained element of a matrix, 4 for each frozen one; None where this does not hold.

    Forward takes 2 FLOPs per element, the gradients of inputs and of weights 2 each (Kaplan et al., arXiv 2001.08361,
    section 2.1); MFU is this rate over the device's dense bf16 peak, whatever the dtype of the run (Chowdhery et al., arXiv
    2204.02311, appendix B). It leaves out products of activations with each other (attention) and what backward computes
    again. Matrices that are only looked up (embeddings that no other module shares) do not count. Convolutions use each element many times per sample, and of a mixture of experts a token uses few.
    """
    flops = 0
    for spec in layout:
        if len(spec.shape) > 2 or "expert" in spec.name:
            return None
        owners = [model.get_submodule(owner.module) for owner in spec.owners]
        is_lookup = all(isinstance(owner, nn.Embedding | nn.EmbeddingBag) for owner in owners)
        if len(spec.shape) == 2 and not is_lookup:
            flops += (6 if spec.requires_grad else 4) * spec.numel
    return float(flops) if flops else None


def _tokens_of(*args: Any, **kwargs: Any) -> int | None:
    """Return the elements of `input_ids`, or of a first argument that holds integers."""
    first = args[0] if args else None
    given = first if isinstance(first, Mapping) else kwargs
    ids = given.get("input_ids", first)
    if isinstance(ids, Tensor) and ids.dtype in _INTEGERS:
        return ids.numel()
    return None


@dataclass
class StepLog:
    """Collects the numbers of one engine's steps."""

    device: torch.device
    comm: Communicator
    work: Work
    check: PlanCheck
    standing_bytes: Callable[[], int]
    """Returns the bytes on the device that stay between steps."""
    trackers: list[Tracker] = field(default_factory=list)
    tokens: float = 0.0
    """Of the step so far, on this rank; NaN where a batch holds none that can be counted."""
    _pending: float = 0.0
    """Tokens of forward passes that no backward has followed yet."""
    _ended_s: float | None = None
    """When the last step ended."""
    _began_s: float | None = None
    """When the first forward of this step began."""
    _lr: float | None = None
    _scale: float | None = None
    _num_collectives: int = 0
    _num_bytes: int = 0
    _num_graphs: int = 0

    def __post_init__(self) -> None:
        self._num_collectives, self._num_bytes = self.comm.stats()

    def is_heard(self, step: int) -> bool:
        """Say whether anyone wants the numbers of a step."""
        return events.is_heard() or any(each.is_due(step) for each in self.trackers)

    def begin(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note that a forward call begins; those without gradients, such as evaluations, do not count."""
        if self._began_s is not None or not torch.is_grad_enabled():
            return

        def live_bytes() -> int:
            batch = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
            return self.standing_bytes() + distinct_bytes(batch)

        is_heard = events.is_heard() or bool(self.trackers)
        self.check.begin(live_bytes, is_heard=is_heard)
        self._began_s = time.perf_counter()

    def forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Count the tokens of a forward call that has succeeded."""
        if torch.is_grad_enabled():
            found = self.work.tokens_of(*args, **kwargs)
            self._pending += math.nan if found is None else found

    def backward(self) -> bool:
        """Note that the forward passes before belong to the step; say whether there were any."""
        pending, self._pending = self._pending, 0.0
        self.tokens += pending
        return pending != 0.0

    def updating(self, optimizer: Optimizer, scale: float | None, step: int) -> None:
        """Note what the optimizer is about to step with; a schedule moves on before the step has ended.

        Args:
            optimizer: the engine's.
            scale: of the loss; None if it is not scaled.
            step: the number of the step.
        """
        if self.is_heard(step):
            groups = optimizer.param_groups
            lr = groups[0].get("lr") if groups else None
            self._lr, self._scale = (None if lr is None else float(lr)), scale

    def ended(
        self,
        session: CompileSession | None,
        *,
        step: int,
        norm: Tensor | None,
        loss_sums: Tensor | None = None,
        losses: Sequence[Tensor] = (),
        samples: int | None = None,
        skipped: bool = False,
        num_skipped: int | None = None,
    ) -> None:
        """Tell recorders and trackers of a step, and begin the next.

        Args:
            session: of the compiled graphs; None if nothing is compiled.
            step: steps done, this one included.
            norm: of the gradients; None if not known.
            loss_sums: losses, ranks and tokens summed over all ranks, see `Gradients.norm_and_sums`.
            losses: this rank's.
            samples: since the run began; None if not known.
            skipped: whether the step was skipped.
            num_skipped: steps skipped since the run began; None if not known.
        """
        now_s = time.perf_counter()
        num_graphs = 0 if session is None else len(session.report.graphs)
        compared = self.check.end(session, step, skipped=skipped)
        if compared is not None:
            log_compared(compared)
            events.emit(compared)
        foretold = self.check.foretold
        num_collectives, num_bytes = self.comm.stats()
        if self.is_heard(step):
            self._tell(
                events.StepEnded(
                    step=step,
                    rank=dist.get_rank(),
                    skipped=skipped,
                    samples=samples,
                    num_skipped=num_skipped,
                    lr=self._lr,
                    loss_scale=self._scale,
                    peak_bytes=max(self.check.peak_before_bytes, peak_bytes(self.device)),
                    graphs=num_graphs,
                    recompiles=num_graphs - self._num_graphs if self._num_graphs else 0,
                    predicted_peak_bytes=None if foretold is None else foretold.peak_bytes,
                    measured_peak_bytes=self.check.measured_peak_bytes,
                    predicted_seconds=None if foretold is None else foretold.seconds,
                    grad_norm=None if norm is None else float(norm),
                    collectives=num_collectives - self._num_collectives,
                    collective_bytes=num_bytes - self._num_bytes,
                    **self._of_batch(loss_sums, losses, now_s),
                )
            )
        self._num_graphs = num_graphs
        self._num_collectives, self._num_bytes = num_collectives, num_bytes
        self.restart(now_s)

    def drop(self) -> None:
        """Forget the batches of the step so far."""
        self.tokens = self._pending = 0.0

    def restart(self, now_s: float | None = None) -> None:
        """Begin a step anew; without a time, the next step is timed from its forward on."""
        self._ended_s, self._began_s = now_s, None
        self.drop()

    def end(self, step: int) -> None:
        """Let trackers write what they hold back, and forget them."""
        for each in self.trackers:
            each.end(step)
        self.trackers.clear()

    def _tell(self, ended: events.StepEnded) -> None:
        events.emit(ended)
        for each in self.trackers:
            if each.is_due(ended.step):
                each.take(ended)

    def _of_batch(
        self, loss_sums: Tensor | None, losses: Sequence[Tensor], now_s: float
    ) -> dict[str, Any]:
        """Return times, losses and tokens."""
        began_s = now_s if self._began_s is None else self._began_s
        since_s = began_s if self._ended_s is None else self._ended_s
        seconds = now_s - since_s
        loss, tokens = _means(loss_sums)
        own = [each.reshape(()).float() for each in losses]
        rank_tokens = _counted(self.tokens)
        per_rank = (
            rank_tokens
            if tokens is None
            else tokens / (self.comm.world_size * self.comm.num_replicas)
        )
        return {
            "seconds": seconds,
            "wait_seconds": None if self._began_s is None else began_s - since_s,
            "loss": loss,
            "rank_loss": float(torch.stack(own).sum()) if own else None,
            "tokens": tokens,
            "rank_tokens": rank_tokens,
            "tokens_per_second": None if tokens is None else tokens / seconds,
            "mfu": self.work.mfu(None if per_rank is None else per_rank / seconds),
        }


# a compiled model may call another model's engine
for _each in (StepLog.begin, StepLog.forward):
    leave_alone(_each, "it looks at a clock and counts tokens")


def _means(loss_sums: Tensor | None) -> tuple[float | None, int | None]:
    """Return the mean loss and the sum of tokens over ranks, from what the norm's collective carried."""
    if loss_sums is None:
        return None, None
    loss, num_ranks, tokens = loss_sums.tolist()
    return (loss / num_ranks if num_ranks else None), _counted(tokens)


def _counted(tokens: float) -> int | None:
    return int(tokens) if math.isfinite(tokens) and tokens > 0 else None


def peak_bytes(device: torch.device) -> int:
    """Return the most memory allocated on a device so far; on a CPU, resident memory of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
