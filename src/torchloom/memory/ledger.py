"""Sums up what operators allocate while code runs on fake tensors.

Python's reference counts say what is alive: a storage counts from the operator that made it until
nothing refers to it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torchloom import ops
from torchloom._torch.modes import DispatchMode
from torchloom.graph import tensors_in
from torchloom.memory.transit import ResidentUse, Transit, Weight
from torchloom.memory.workspace import Call, WorkspaceTable, signature_of_call

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
        signature = signature_of_call(call)
        if signature is None:
            return 0, ()
        found = self._workspaces.known.get(signature)
        if found is None:
            self.calls.append(call)
            return 0, ()
        return found.workspace_bytes, found.result_bytes


def storages_in(values: Sequence[Any]) -> Iterator[torch.UntypedStorage]:
    """Yield the storage of each tensor among values and lists of them."""
    for value in values:
        for tensor in tensors_in(value):
            yield tensor.untyped_storage()
