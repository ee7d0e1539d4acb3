"""Compute the norm of gradients over all ranks, clip by it, and find a gradient that is not finite.

The norm sums over the gradients that each rank will step with, by one collective of one number, so a NaN or Inf on one rank
makes it not finite on all. Then all ranks find the first such gradient by one collective of two numbers. Gradients are
averaged already, so one rank's NaN is often on all ranks; the rank whose own loss is not finite is the likely source.

A gradient of a shard has a shard's norm. `torch.nn.utils.clip_grad_norm_` would take it for the norm of the
whole, so each rank would scale by a factor of its own. Frameworks and trainers call that function, and
nothing in it asks a tensor; so once a model is sharded, its norm is the one over all ranks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchloom._torch.autograd import TotalNorm, replace_total_norm
from torchloom._torch.untraced import leave_alone
from torchloom.errors import NonFiniteError, ShardError
from torchloom.runtime import Communicator, lookup
from torchloom.runtime.base import carrier_of
from torchloom.shard import Layout, ParamSpec, known_params, layout_of, owners_of
from torchloom.shard.shards import clear_padding_

_WHAT = "sum for the gradient norm"
_KINDS = ("nan", "inf")
_NONE = torch.iinfo(torch.int64).max


@dataclass
class Gradients:
    """Gradients that one communicator reduces."""

    comm: Communicator
    norm_dtype: torch.dtype
    divided: list[Tensor] = field(default_factory=list)
    """Each rank of the shard group holds another part of these."""
    whole: list[Tensor] = field(default_factory=list)
    """Equal on all ranks; counted once."""

    def __iter__(self) -> Iterator[Tensor]:
        yield from self.divided
        yield from self.whole

    def norm(self, order: float = 2.0, dtype: torch.dtype | None = None) -> Tensor:
        """Return the norm over all ranks' gradients, equal on every rank.

        Args:
            order: positive; inf for the largest absolute value.
            dtype: of the norm; squares of finite gradients above 1e19 overflow float32.
        """
        if order == math.inf:
            largest = self._power([*self], order, dtype)
            return -self.comm.least(-largest.view(1), "largest gradient")[0]
        return self.comm.sum_(self._own_power(order, dtype), _WHAT).pow(1 / order)

    def norm_and_sums(self, losses: Sequence[Tensor], tokens: float) -> tuple[Tensor, Tensor]:
        """Return the norm, and what its collective carries beside it: losses and tokens of all ranks.

        Args:
            losses: this rank's, of one step; may be none.
            tokens: this rank's, of one step; NaN if not known.

        Returns:
            The norm; and the sum of all losses, the number of ranks that have any, and the sum of tokens.
        """
        square = self._own_power(2.0)
        found = [each.reshape(1).to(square) for each in losses]
        loss = [torch.stack(found).sum(0)] if len(found) > 1 else found
        known = math.nan if math.isnan(tokens) else tokens  # one object, for the cache's sake
        numbers = _numbers((1.0, known) if loss else (0.0, 0.0, known), square.device)
        sums = self.comm.sum_(torch.cat([square.view(1), *loss, numbers]), _WHAT)
        return sums[0].sqrt(), sums[1:]

    def scale_(self, factor: Tensor | float) -> None:
        """Multiply all gradients in place."""
        present = [grad for grad in self if grad.numel()]
        if present:
            torch._foreach_mul_(present, factor)

    def clip_(self, norm: Tensor, max_norm: float) -> None:
        """Scale down to a norm of `max_norm`, by the factor of `torch.nn.utils.clip_grad_norm_`."""
        self.scale_((max_norm / (norm + 1e-6)).clamp(max=1.0))

    def _own_power(self, order: float, dtype: torch.dtype | None = None) -> Tensor:
        """Return this rank's part of the norm to the power of its order."""
        counts_whole = self.comm.rank == 0
        own = self._power([*self] if counts_whole else self.divided, order, dtype)
        if self.whole and not counts_whole:
            own = own + 0 * self._power(self.whole, order, dtype)  # NaN and Inf stay
        replicas = self.comm.replicate_group
        return own if replicas is None or replicas.rank == 0 else 0 * own

    def _power(self, grads: Sequence[Tensor], order: float, dtype: torch.dtype | None) -> Tensor:
        dtype = dtype or self.norm_dtype
        present = [grad for grad in grads if grad.numel()]
        if not present:
            return torch.zeros((), dtype=dtype, device=_device_of(grads, self.comm))
        # A norm of 16-bit gradients is taken in 32 bits; float64 is never narrowed.
        wide = torch.float64 if any(g.dtype == torch.float64 for g in present) else dtype
        norms = torch.stack(torch._foreach_norm(present, order, wide)).to(dtype)
        return norms.amax() if order == math.inf else norms.pow(order).sum()


@functools.lru_cache(maxsize=8)
def _numbers(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Return numbers as a tensor; those of a step are mostly those of the step before."""
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=torch.float32, device=device)


def _device_of(tensors: Sequence[Tensor], comm: Communicator) -> torch.device:
    """Return the device of a rank's tensors; without any, a device that the process group can use."""
    if tensors:
        return tensors[0].device
    if comm.world_size > 1 and "nccl" in carrier_of(comm.shard_group()):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


class Source(NamedTuple):
    """Where a value that is not finite was found."""

    place: int
    """Of the parameter in the model's order."""
    rank: int
    """Global."""
    kind: str
    """"nan" or "inf"."""


@dataclass(frozen=True)
class NonFinite:
    """What all ranks know of gradients that are not finite."""

    param: str
    """The first parameter, in the model's order."""
    rank: int
    kind: str
    loss: Source | None
    """The first rank whose own loss was not finite."""

    def __str__(self) -> str:
        """Return the finding in words."""
        text = f"gradients are not finite, first that of {self.param!r} ({self.kind}, rank {self.rank})"
        if self.loss is not None:
            text += f"; the loss of rank {self.loss.rank} was {self.loss.kind}"
        return text


def find_non_finite(
    names: Sequence[str],
    grads: Sequence[Tensor | None],
    losses: Collection[Tensor],
    comm: Communicator,
) -> NonFinite | None:
    """Return the first gradient that is not finite on any rank. All ranks must call.

    Args:
        names: the trainable parameters in the model's order, the same on all ranks.
        grads: what this rank would step each with, or None.
        losses: this rank's own since the last step.
        comm: the communicator of the gradients.

    Returns:
        The same on every rank; None where all gradients are finite and only their norm overflows.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()

    def first_key(tensors: Sequence[Tensor | None]) -> int:
        for place, tensor in enumerate(tensors):
            if tensor is not None and not bool(torch.isfinite(tensor).all()):
                return 2 * (place * num_ranks + rank) + (not bool(torch.isnan(tensor).any()))
        return _NONE

    def source(key: int) -> Source | None:
        place_and_rank, kind = divmod(key, 2)
        return None if key == _NONE else Source(*divmod(place_and_rank, num_ranks), _KINDS[kind])

    loss_key = min((first_key([loss]) for loss in losses), default=_NONE)
    device = _device_of([grad for grad in grads if grad is not None], comm)
    keys = torch.tensor([first_key(grads), loss_key], device=device)
    keys = comm.least(keys, "search for a gradient that is not finite")
    first, loss = map(source, keys.tolist())
    return None if first is None else NonFinite(names[first.place], first.rank, first.kind, loss)


_LAST_NORMS: dict[str, Tensor] = {}
"""The last norm that was computed over gradients of a model, by its communicator; steps take it away."""

_ByHandle = dict[str, Gradients]


def take_norm(handle: str) -> Tensor | None:
    """Return the norm that was computed since the last call, None if none was."""
    return _LAST_NORMS.pop(handle, None)


def clip_grad_norm_(
    model: nn.Module | Iterable[nn.Module],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Clip the gradients of sharded models by their global norm, with one collective.

    Args:
        model: a sharded model after backward, or several whose gradients have one norm together; all
            ranks must call.
        max_norm: the largest norm.
        norm_type: the order of the norm: any positive number, or inf for the largest absolute value.
        error_if_nonfinite: raise on all ranks, before any gradient changes, when one is NaN or Inf
            on any rank; reads the norm on the host. Otherwise clipping scales all gradients by such
            a norm, as torch's function of this name does: NaN makes them NaN, Inf makes finite ones 0.

    Returns:
        The norm before clipping, equal on every rank.

    Raises:
        ShardError: a model is not sharded, none was given, or the order is not positive.
        NonFiniteError: a gradient is not finite; names the rank and the first parameter.

    Example:
        >>> torchloom.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)  # doctest: +SKIP
    """
    models = [model] if isinstance(model, nn.Module) else list(model)
    if not models:
        raise ShardError("clip_grad_norm_ was given no model: pass those that shard_model sharded")
    by_handle: _ByHandle = {}
    for each in models:
        layout = layout_of(each)
        _of(by_handle, layout)  # also without a gradient: the other ranks may have some
        for name, param in owners_of(each).items():
            if param.grad is not None:
                _add(by_handle, param.grad, layout, layout[name])
    norm = _norm(by_handle, norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        _raise_first_non_finite(models)
        norm = _norm(by_handle, norm_type, torch.float64)
    for gradients in by_handle.values():
        gradients.clip_(norm, max_norm)
    return norm


leave_alone(clip_grad_norm_, "it communicates")


@functools.cache
def follow_torch_norms() -> None:
    """Let `torch.nn.utils.clip_grad_norm_` and `get_total_norm` count the shards of other ranks."""
    replace_total_norm(_norm_over_ranks)


def _norm_over_ranks(original: TotalNorm) -> TotalNorm:
    def total_norm(
        tensors: Tensor | Iterable[Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        by_handle, others = _sorted(given)
        if not any(found.divided for found in by_handle.values()):
            whole = original(given, norm_type, error_if_nonfinite, foreach)
            if float(norm_type) == 2.0 and not others:
                _LAST_NORMS.update(dict.fromkeys(by_handle, whole))
            return whole
        norm = _norm(by_handle, norm_type)
        if others:
            rest = original(others, norm_type, False, foreach).to(norm.device)
            norm = torch.linalg.vector_norm(torch.stack([norm, rest]), norm_type)
        if error_if_nonfinite and not bool(torch.isfinite(norm)):
            raise NonFiniteError(
                "the norm of the gradients over all ranks is not finite, so no gradient was changed: drop "
                "them (optimizer.zero_grad()) to leave this step out; "
                "torchloom.clip_grad_norm_(model, max_norm, error_if_nonfinite=True) names the parameter"
            )
        return norm

    return total_norm


def _sorted(given: Sequence[Tensor]) -> tuple[_ByHandle, list[Tensor]]:
    """Sort tensors by the communicator of the parameter whose gradient they are; return others beside."""
    missing = {id(tensor): tensor for tensor in given}
    by_handle: _ByHandle = {}
    for param, layout, spec in known_params():
        if param.grad is not None and missing.pop(id(param.grad), None) is not None:
            _add(by_handle, param.grad, layout, spec)
    return by_handle, list(missing.values())


def _of(by_handle: _ByHandle, layout: Layout) -> Gradients:
    empty = Gradients(lookup(layout.handle), layout.norm_dtype)
    return by_handle.setdefault(layout.handle, empty)


def _add(by_handle: _ByHandle, grad: Tensor, layout: Layout, spec: ParamSpec) -> None:
    found = _of(by_handle, layout)
    if spec.mode == "sharded":
        clear_padding_(grad, spec.numel, layout.rank)
    (found.divided if spec.mode == "sharded" else found.whole).append(grad)


def _norm(by_handle: _ByHandle, norm_type: float, dtype: torch.dtype | None = None) -> Tensor:
    order = float(norm_type)
    if not order > 0:
        raise ShardError(
            f"a norm of type {norm_type} over gradients of sharded parameters is not supported: clip by a positive "
            "one, such as norm_type=2.0 or float('inf')"
        )
    norms = [found.norm(order, dtype) for found in by_handle.values()]
    norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), order)
    if order == 2.0:
        _LAST_NORMS.update(dict.fromkeys(by_handle, norm))
    return norm


def _raise_first_non_finite(models: Sequence[nn.Module]) -> None:
    for model in models:
        layout, params = layout_of(model), owners_of(model)
        names = [spec.name for spec in layout if spec.requires_grad]
        grads = [params[name].grad for name in names]
        found = find_non_finite(names, grads, (), lookup(layout.handle))
        if found is not None:
            raise NonFiniteError(
                f"{found}. No gradient was changed: drop them (optimizer.zero_grad()) to leave this "
                "step out, or pass error_if_nonfinite=False"
            )
