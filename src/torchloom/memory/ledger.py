"""Sums up what operators allocate while code runs on fake tensors.

Python's reference counts say what is alive: a storage counts from the operator that made it until
nothing refers to it.

`step_memory` runs an optimizer's own code so. Fused kernels need next to nothing; `foreach` and plain loops make temporary tensors of the size of
parameters, and some optimizers several.
"""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer

from torchloom import ops
from torchloom._torch.modes import DispatchMode
from torchloom._torch.tensors import fake_mode, layout_hint, tree_map_only
from torchloom.graph import tensors_in
from torchloom.log import get_logger
from torchloom.memory.storages import ResidentUse, Transit, Weight, distinct_bytes
from torchloom.memory.workspace import Call, WorkspaceTable, signature_of_call

logger = get_logger(__name__)

_COUNTED_ELSEWHERE = (ops.offload, ops.offload_start, ops.resident, ops.symmetric_start)
"""Their results are host memory, or weights that stay between runs and are counted apart."""


class Ledger(DispatchMode):
    """Adds up the storages that operators make and that are still referred to.

    Args:
        workspaces: what operators allocate for themselves; what is not known is noted in `calls`.
        transit: what the transport holds besides results.
        fetched: parameters whose shards wait on the host.
        refreshes: what gathering anew holds, by the weight whose first use begins it.
    """

    supports_higher_order_operators = True  # those that draw numbers again in backward

    def __init__(
        self,
        workspaces: WorkspaceTable,
        transit: Transit | None = None,
        *,
        fetched: Collection[str] = (),
        refreshes: Mapping[Weight, int] | None = None,
    ) -> None:
        super().__init__()
        self.peak_bytes = 0
        self.calls: list[Call] = []
        self.uses: dict[Weight, ResidentUse] = {}
        """The first of each weight that stays gathered, in order."""
        self._workspaces, self._transit = workspaces, transit
        self._fetched, self._refreshes = fetched, refreshes or {}
        self._under_way: dict[int, int] = {}
        """Bytes that a collective holds, by the storage of its first result."""
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self._ignored: dict[int, StorageWeakRef] = {}
        """What does not count. A weak reference keeps the key from being another storage's."""
        self._sum = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = Call(func, tuple(args), dict(kwargs or {}))
        workspace, sizes = self._probed(call)
        if func is ops.resident:
            workspace += self._refreshed(*args)
        result = func(*args, **(kwargs or {}))
        if func in _COUNTED_ELSEWHERE:
            self.ignore([result])
        self._add(result, sizes)
        self._carry(call, result)
        self._reach(workspace)
        return result

    def extern(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count the workspace of a kernel that writes into buffers that are there.

        Args:
            target: the operator.
            args: fake tensors among them.
            kwargs: likewise.
        """
        workspace, _ = self._probed(Call(target, args, kwargs))
        self._reach(workspace)

    def ignore(self, values: Sequence[Any]) -> None:
        """Leave out what was there before."""
        for storage in storages_in(values):
            self._ignored[storage._cdata] = StorageWeakRef(storage)

    def _reach(self, workspace: int) -> None:
        """Note a peak. What is gone is subtracted only where that decides: looking at all that lives takes long."""
        if self._sum + workspace > self.peak_bytes:
            self.settle()
            self.peak_bytes = max(self.peak_bytes, self._sum + workspace)

    def settle(self) -> None:
        """Subtract what is referred to no more."""
        gone = [key for key, (ref, _) in self._live.items() if ref.expired()]
        for key in gone:
            self._sum -= self._live.pop(key)[1]

    def _add(self, result: Any, sizes: Sequence[int]) -> None:
        storages = list(storages_in([result]))
        for at, storage in enumerate(storages):
            if storage._cdata not in self._live and storage._cdata not in self._ignored:
                size = sizes[at] if len(sizes) == len(storages) else int(storage.nbytes())
                self._live[storage._cdata] = (StorageWeakRef(storage), size)
                self._sum += size

    def _carry(self, call: Call, result: Any) -> None:
        """Add what a collective holds when it starts, and subtract it when it was waited for."""
        if call.target is ops.wait_:
            self._sum -= self._under_way.pop(next(storages_in([call.args[0]]))._cdata, 0)
        elif self._transit is not None:
            held_bytes = self._transit.started_bytes(call.target, call.args)
            if held_bytes:
                self._under_way[next(storages_in([result]))._cdata] = held_bytes
                self._sum += held_bytes

    def _refreshed(self, shard: Any, dtype: Any, world_size: int, handle: str, param: str) -> int:
        """Return what gathering a weight anew holds: at the first use in a step, nothing later."""
        weight = param, dtype
        if weight in self.uses:
            return 0
        self.uses[weight] = ResidentUse(shard, dtype, handle, param in self._fetched)
        return self._refreshes.get(weight, 0)

    def _probed(self, call: Call) -> tuple[int, tuple[int, ...]]:
        found = self._workspaces.of_call(call)
        if found is not None:
            return found.workspace_bytes, found.result_bytes
        if self._workspaces.measures and signature_of_call(call) is not None:
            self.calls.append(call)  # and so its tensors, which live on then
        return 0, ()


def storages_in(values: Sequence[Any]) -> Iterator[torch.UntypedStorage]:
    """Yield the storage of each tensor among values and lists of them."""
    for value in values:
        for tensor in tensors_in(value):
            yield tensor.untyped_storage()


class StepMemory(NamedTuple):
    """What an optimizer allocates, by its own code run on tensors without data."""

    peak_bytes: int
    """In a step, above parameters, gradients and states."""
    state_bytes: dict[int, int]
    """Of the states that a parameter has after a step, by its id."""


Twin = tuple[Optimizer, Mapping[int, nn.Parameter]]
"""A copy of an optimizer over parameters without data, and these by the ids of what they stand for."""


def step_memory(
    optimizer: Optimizer,
    workspaces: WorkspaceTable | None = None,
    step_of: Callable[[Twin], Callable[[], Any]] = lambda twin: twin[0].step,
) -> StepMemory | None:
    """Return what an optimizer allocates in a step and keeps after it.

    Args:
        optimizer: any of torch's protocol; neither it nor its parameters change. Step hooks are
            left out.
        workspaces: what operators allocate for themselves; unknown ones are probed.
        step_of: returns the function that makes a step of a twin; all that this allocates counts.

    Returns:
        None where the step needs values that are not known without data, or sizes that depend on them.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(1000))
        >>> found = step_memory(torch.optim.Adam([weight], fused=False, foreach=False))
        >>> 4000 <= found.peak_bytes < 9000
        True
    """
    if not isinstance(optimizer, Optimizer):
        return None  # no twin can be made of it
    workspaces = workspaces or WorkspaceTable()
    found = None
    for _ in range(2):  # the second time with the workspaces of operators met in the first
        ledger = Ledger(workspaces)
        try:
            found = _step_twice(optimizer, ledger, step_of)
        except (RuntimeError, TypeError, ValueError, AttributeError, KeyError) as error:
            logger.info("%s cannot step without data: %s", type(optimizer).__name__, error)
            return None
        if not workspaces.probe_calls(ledger.calls):
            break
    return found


def _step_twice(
    optimizer: Optimizer, ledger: Ledger, step_of: Callable[[Twin], Callable[[], Any]]
) -> StepMemory:
    """Step a twin of the optimizer: the first step makes its states, the second is counted."""
    twin = _twin_of(optimizer)
    numbers = {  # steps taken, say: read here, as tensors without data cannot be
        (param, name): value.item()
        for param, state in optimizer.state.items()
        for name, value in state.items()
        if isinstance(value, Tensor) and value.dim() == 0
    }
    stand_ins: dict[int, nn.Parameter] = {}
    with fake_mode(), _MadeUpNumbers():
        twin.param_groups = [{**group, "params": []} for group in optimizer.param_groups]
        for group, like in zip(optimizer.param_groups, twin.param_groups, strict=True):
            for param in group["params"]:
                made = stand_ins[id(param)] = nn.Parameter(maker_of(param)())
                made.grad = maker_of(param)()
                like["params"].append(made)
                for name, value in optimizer.state.get(param, {}).items():
                    if (param, name) in numbers:
                        value = torch.tensor(numbers[param, name], dtype=value.dtype)
                    else:
                        value = tree_map_only(Tensor, lambda each: maker_of(each)(), value)
                    twin.state[made][name] = value
        if callable(getattr(twin, "train", None)):  # schedule-free ones refuse to step before
            twin.train()
        step = step_of((twin, stand_ins))
        step()
        params = [param for group in twin.param_groups for param in group["params"]]
        states = [value for state in twin.state.values() for value in state.values()]
        ledger.ignore([*params, *(param.grad for param in params), *states])
        with ledger:
            step()
    return StepMemory(
        ledger.peak_bytes,
        {
            known: distinct_bytes(twin.state.get(made, {}).values())
            for known, made in stand_ins.items()
        },
    )


def _twin_of(value: Any) -> Any:
    """Return a copy of an optimizer without states and hooks, and of those inside of it; `copy.copy` drops attributes."""
    if isinstance(value, list):
        return list(map(_twin_of, value))
    if not isinstance(value, Optimizer):
        return copy.copy(value) if isinstance(value, dict) else value
    twin = object.__new__(type(value))
    # Schedules put a `step` on the object that steps this very optimizer.
    vars(twin).update({k: _twin_of(each) for k, each in vars(value).items() if k != "step"})
    twin.state = defaultdict(dict)
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        setattr(twin, hooks, OrderedDict())
    return twin


class _MadeUpNumbers(DispatchMode):
    """Answers 1 where a step reads a number of a tensor without data: what it allocates depends on shapes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except RuntimeError:
            if func.name() != "aten::_local_scalar_dense":
                raise
            return 1.0 if args[0].dtype.is_floating_point else 1


def maker_of(tensor: Tensor) -> functools.partial[Tensor]:
    """Return what makes tensors with the layout, dtype and device of one, and keeps nothing of it."""
    sizes, strides, _ = layout_hint(tensor)
    return functools.partial(
        torch.empty_strided, sizes, strides, dtype=tensor.dtype, device=tensor.device
    )
