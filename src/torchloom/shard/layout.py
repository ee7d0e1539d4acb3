"""Which parameter is sharded, whole or synced, and how: facts only, the same on every rank.

`plan_layout` looks at a model and decides; `torchloom.shard.apply` acts. A layout holds no tensors:
it can be printed, hashed and compared between ranks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, KeysView, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from torchloom.config.model import UNSHARDED_BELOW
from torchloom.errors import ShardError
from torchloom.shard.admit import check_model
from torchloom.shard.shards import shard_numel_of

_RUNNING = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm,
    nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
)  # fmt: skip
"""Norms that may keep running statistics: buffers, which are not cast."""

Mode = Literal["sharded", "synced", "whole"]
"""sharded: a shard per rank, gathered at use. synced: whole, its gradient averaged at use.
whole: whole, its gradient left local until the accumulation boundary."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """In which dtypes weights are kept, computed with and reduced."""

    master: torch.dtype | Literal["wide"] | None = "wide"
    """Trained floating-point parameters are kept in this dtype; None keeps each one's own, "wide" keeps float64 and
    means float32 for all others. Frozen parameters keep their own always."""
    compute: torch.dtype | None = None
    """Weights are cast to this dtype before they travel; None computes in the dtype that the model had. Those of
    norms with running statistics are not: they are read in the dtype of these."""
    reduce: torch.dtype | None = None
    """Gradients travel in this dtype; None means the dtype of the kept shard."""
    output: torch.dtype | None = None
    """Where inputs are cast, floating-point results of the module are cast to this dtype; None leaves them."""


ByModule = Mapping[nn.Module, Precision]
"""Precisions of a model's modules; each holds for those below it that have none of their own."""


class Owner(NamedTuple):
    """One place where a parameter hangs: tied parameters have several."""

    module: str
    attr: str


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """All facts about one parameter."""

    name: str
    shape: tuple[int, ...]
    mode: Mode
    shard_numel: int
    """Elements of one rank's shard or slice with padding; 0 unless divided."""
    dtype: torch.dtype
    compute_dtype: torch.dtype
    wire_dtype: torch.dtype
    requires_grad: bool
    owners: tuple[Owner, ...]
    is_sliced: bool = False
    """Whole, but each rank's optimizer steps only its own slice (stage 1)."""
    is_ignored: bool = False
    """Left to the caller: neither made equal on all ranks nor sharded, cast or averaged."""

    @property
    def numel(self) -> int:
        """Number of elements of the whole weight."""
        return math.prod(self.shape)

    @property
    def is_divided(self) -> bool:
        """Whether each rank of the shard group steps another part of it: a shard, or a slice."""
        return self.shard_numel > 0

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape of what this rank's optimizer steps: flat and padded, or the whole weight."""
        return (self.shard_numel,) if self.is_divided else self.shape

    @property
    def is_tied(self) -> bool:
        """Whether several modules share this parameter."""
        return len(self.owners) > 1


@dataclass(frozen=True, slots=True)
class Layout:
    """How one model is spread over one communicator."""

    stage: int
    world_size: int
    """Ranks that share one copy of the weights."""
    num_replicas: int
    """Copies of the weights (1 unless sharding is hybrid)."""
    rank: int
    handle: str
    params: tuple[ParamSpec, ...]
    is_divided: bool = field(init=False, repr=False, compare=False)
    """Whether ranks keep other parts of parameters, or get other gradients of whole ones."""
    _by_name: dict[str, ParamSpec] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_name", {spec.name: spec for spec in self.params})
        is_divided = self.num_ranks > 1 and any(spec.mode != "whole" for spec in self.params)
        object.__setattr__(self, "is_divided", is_divided)

    def __iter__(self) -> Iterator[ParamSpec]:
        return iter(self.params)

    def __getitem__(self, name: str) -> ParamSpec:
        return self._by_name[name]

    @property
    def names(self) -> KeysView[str]:
        """The names of all parameters."""
        return self._by_name.keys()

    @property
    def sharded(self) -> tuple[ParamSpec, ...]:
        """The parameters of which this rank holds a shard."""
        return tuple(spec for spec in self.params if spec.mode == "sharded")

    @property
    def norm_dtype(self) -> torch.dtype:
        """In which the norm of all gradients is taken: float64 if a parameter is of it."""
        has_double = any(spec.dtype == torch.float64 for spec in self.params)
        return torch.float64 if has_double else torch.float32

    @property
    def num_ranks(self) -> int:
        """Ranks over which gradients are averaged."""
        return self.world_size * self.num_replicas

    @property
    def local_numel(self) -> int:
        """Elements that this rank holds at rest, padding included."""
        return sum(s.shard_numel if s.mode == "sharded" else s.numel for s in self.params)

    def facts(self) -> dict[str, object]:
        """Return what is equal on ranks that agree on everything but their rank, as plain data."""
        own = {
            "ZeRO stage": self.stage,
            "ranks that share weights": self.world_size,
            "copies of the weights": self.num_replicas,
            "communicator": self.handle,
            "number of parameters": len(self.params),
        }
        named = {f"parameter {index}": repr(spec) for index, spec in enumerate(self.params)}
        return {**own, **named}


def param_of(modules: Mapping[str, nn.Module], spec: ParamSpec) -> nn.Parameter:
    """Return the parameter that a model's modules, by path, hold."""
    first = spec.owners[0]
    param = modules[first.module]._parameters[first.attr]
    assert param is not None, spec.name
    return param


def plan_layout(  # noqa: PLR0913  one record of facts, built in one place
    model: nn.Module,
    *,
    stage: int,
    world_size: int,
    rank: int,
    handle: str,
    num_replicas: int = 1,
    persistence_threshold: int | None = 0,
    precision: Precision | ByModule | None = None,
    sync_in_backward: bool = True,
    ignored: Collection[nn.Parameter] = (),
) -> Layout:
    """Decide for each parameter of `model` how it is kept.

    Args:
        model: the model, on any device, not sharded yet.
        stage: ZeRO stage; stages 2 and 3 shard parameters, 0 and 1 keep them whole.
        world_size: number of ranks that share one copy of the weights.
        rank: this rank among them.
        handle: name of the communicator that the graphs will use.
        num_replicas: number of copies of the weights (hybrid sharding).
        persistence_threshold: parameters with fewer elements stay whole at every stage, as do those
            that would leave a rank with padding alone. None: `default_threshold`.
        precision: dtypes to keep, compute and reduce in, of the model or by module.
        sync_in_backward: average gradients of whole parameters inside the backward pass; otherwise
            they stay local until the accumulation boundary.
        ignored: parameters that are left to the caller.

    Raises:
        ShardError: the stage does not exist, a parameter cannot be sharded (see `check_model`), one that is to be
            ignored is not the model's, nor is a module with a precision, or a tied parameter has two precisions.
    """
    if stage not in (0, 1, 2, 3):
        raise ShardError(f"ZeRO stage {stage!r} does not exist: use 0, 1, 2 or 3")
    check_model(model)
    owners: dict[nn.Parameter, list[Owner]] = {}
    modules = dict(model.named_modules())
    for path, module in modules.items():
        for attr, param in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(param, []).append(Owner(path, attr))
    precisions = _precisions(modules, precision)
    if persistence_threshold is None:
        persistence_threshold = default_threshold(param.numel() for param in owners)
    left = set(ignored)
    for param in left - owners.keys():
        raise ShardError(
            f"ignored_params= holds a tensor of shape {tuple(param.shape)} that is no parameter of the model: pass "
            "its parameters themselves, such as model.head.parameters()"
        )
    specs: list[ParamSpec] = []
    for param, places in owners.items():
        name = ".".join(filter(None, places[0]))
        is_ignored = param in left
        is_divisible = (
            world_size > 1
            and not is_ignored
            and not is_small(param, persistence_threshold, world_size)
        )
        is_sharded = stage >= 2 and is_divisible
        is_sliced = stage == 1 and is_divisible
        is_divided = is_sharded or is_sliced
        running = (_running_statistics(modules[place.module]) for place in places)
        kept, compute, wire = (
            (param.dtype,) * 3
            if is_ignored
            else _dtypes(
                param, _one_precision(places, precisions), next(filter(None, running), None)
            )
        )
        specs.append(
            ParamSpec(
                name=name,
                shape=tuple(param.shape),
                mode="whole"
                if is_ignored
                else _mode(is_sharded, world_size * num_replicas, stage, sync_in_backward),
                shard_numel=shard_numel_of(param.numel(), world_size) if is_divided else 0,
                dtype=kept,
                compute_dtype=compute,
                wire_dtype=wire,
                requires_grad=param.requires_grad,
                owners=tuple(places),
                is_sliced=is_sliced,
                is_ignored=is_ignored,
            )
        )
    return Layout(stage, world_size, num_replicas, rank, handle, tuple(specs))


def _precisions(
    modules: Mapping[str, nn.Module], asked: Precision | ByModule | None
) -> dict[str, Precision]:
    """Return the precision of each module by its path."""
    asked = asked if isinstance(asked, Mapping) else {modules[""]: asked or Precision()}
    for module in asked.keys() - set(modules.values()):
        raise ShardError(
            f"precision= names a {type(module).__name__} that is no module of the model: pass its modules "
            "themselves, such as {model: ..., model.head: ...}"
        )
    found: dict[str, Precision] = {}
    for path, module in modules.items():  # parents first
        above = found.get(path.rpartition(".")[0], Precision()) if path else Precision()
        found[path] = asked.get(module, above)
    return found


def _one_precision(places: Collection[Owner], precisions: Mapping[str, Precision]) -> Precision:
    first, *others = dict.fromkeys(precisions[place.module] for place in places)
    if others:
        names = " and ".join(".".join(filter(None, place)) for place in places)
        raise ShardError(
            f"{names} are one tied parameter with two precisions: give their modules the same one"
        )
    return first


def default_threshold(numels: Iterable[int]) -> int:
    """Return the elements from which on a parameter is sharded unless a configuration says it.

    It is DeepSpeed's default, 100 000, as long as the parameters below it hold at most a hundredth of the model. In a
    model of width 256 they are the projections of attention: kept whole, they alone put the peak of 12 layers on two
    ranks above that of FSDP2 (186 MB instead of 170; FSDP2 179).

    Args:
        numels: elements of each parameter of the model, as a whole.
    """
    sizes = sorted(numels)
    room = sum(sizes) // 100
    for size, held in zip(sizes, itertools.accumulate(sizes), strict=True):
        if held > room:
            return min(size, UNSHARDED_BELOW)
    return UNSHARDED_BELOW


def is_small(param: nn.Parameter, persistence_threshold: int, world_size: int) -> bool:
    """Say whether a parameter stays whole because of its size alone.

    Shards are equally long, so that few elements among many ranks leave the last ones with padding
    alone: such a parameter stays whole, too, and every shard holds elements.

    Args:
        param: not sharded yet.
        persistence_threshold: elements; parameters with fewer stay whole.
        world_size: ranks that would share it.
    """
    numel = param.numel()
    has_empty_shard = shard_numel_of(numel, world_size) * (world_size - 1) >= numel
    return numel == 0 or numel < persistence_threshold or has_empty_shard


def _mode(is_sharded: bool, num_ranks: int, stage: int, sync_in_backward: bool) -> Mode:
    if is_sharded:
        return "sharded"
    if num_ranks == 1:
        return "whole"
    # A whole parameter of stages 2 and 3 is averaged with its sharded neighbours, every micro-step.
    return "synced" if stage >= 2 or sync_in_backward else "whole"


def _running_statistics(module: nn.Module) -> torch.dtype | None:
    """Return the dtype of a module's running statistics, of which its weights must be; None without any.

    Its kernels take inputs in a lower type beside both, and compute in the higher one.
    """
    mean = module.running_mean if isinstance(module, _RUNNING) else None
    return mean.dtype if isinstance(mean, Tensor) else None


def _dtypes(
    param: nn.Parameter, precision: Precision, running: torch.dtype | None
) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    if not param.is_floating_point():
        return param.dtype, param.dtype, param.dtype
    kept = precision.master if param.requires_grad else None
    if kept == "wide":
        kept = torch.promote_types(param.dtype, torch.float32)
    kept = kept or param.dtype
    return kept, running or precision.compute or param.dtype, precision.reduce or kept
