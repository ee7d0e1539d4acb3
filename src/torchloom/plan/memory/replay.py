"""The memory of a step that Inductor compiled: its wrapper code, replayed without data.

Inductor fuses operators, lets results take the place of dead inputs, and orders its kernels: the
captured graph does not show what it allocates. The wrapper that it wrote does, line by line. It is
run on fake tensors with kernels that do nothing; a ledger adds what is allocated and subtracts what
Python's reference counts free.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.multiprocessing.reductions import StorageWeakRef

from torchloom import _torch, ops
from torchloom._torch.wrapper import load_wrapper
from torchloom.graph import tensors_in, value_of
from torchloom.plan.memory.micro_step import RESULTS
from torchloom.plan.memory.program import Transit
from torchloom.plan.memory.workspace import Call, WorkspaceTable, signature_of_call

_TANGENT = "tangents"


@dataclass(frozen=True, slots=True)
class Interface:
    """What goes into and comes out of the two graphs of a step, without the graphs.

    Args:
        inputs: values of forward's inputs.
        outputs: names of forward's outputs, None for those that are no values.
        roles: of forward's outputs: the type names of AOTAutograd's descriptors.
        saved: names of backward's inputs.
        tangents: values of those of backward's inputs that forward does not make, by name.
    """

    inputs: tuple[Any, ...]
    outputs: tuple[str | None, ...]
    roles: tuple[str, ...]
    saved: tuple[str, ...]
    tangents: dict[str, Any]


def interface_of(forward: fx.Graph, backward: fx.Graph) -> Interface:
    """Read the interface of split graphs before a compiler rewrites them."""
    output = forward.output_node()
    values: Any = output.args[0]
    described = output.meta.get("desc") or [None] * len(values)
    placeholders = list(backward.find_nodes(op="placeholder"))
    names = [node.name if isinstance(node, fx.Node) else None for node in values]
    known = set(names)
    return Interface(
        inputs=tuple(_like(value_of(n)) for n in forward.find_nodes(op="placeholder")),
        outputs=tuple(names),
        roles=tuple(type(each).__name__ for each in described),
        saved=tuple(node.name for node in placeholders),
        tangents={n.name: _like(value_of(n)) for n in placeholders if n.name not in known},
    )


def replay_peak(
    forward: str,
    backward: str,
    interface: Interface,
    workspaces: WorkspaceTable,
    transit: Transit | None = None,
) -> int | None:
    """Return the highest sum of bytes that a step allocates above what was live before it.

    Args:
        forward: the wrapper's source, see `load_wrapper`.
        backward: likewise.
        interface: of the graphs that they were made of.
        workspaces: what operators allocate for themselves; unknown ones are probed.
        transit: what collectives hold until they are waited for.

    Returns:
        None where a wrapper is of a form that cannot be replayed.
    """
    for _ in range(2):  # the second time with the workspaces of operators met in the first
        ledger = _Ledger(workspaces, transit)
        if not _replay(forward, backward, interface, ledger):
            return None
        if not workspaces.probe_calls(ledger.calls):
            break
    return ledger.peak_bytes


@dataclass(frozen=True, slots=True)
class _Like:
    """Sizes, strides, type and device of a tensor."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def make(self) -> Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)


def _like(value: Any) -> Any:
    if isinstance(value, Tensor):
        sizes, strides, _ = _torch.layout_hint(value)
        return _Like(tuple(sizes), tuple(strides), value.dtype, value.device)
    return _torch.size_hint(value) if isinstance(value, torch.SymInt) else value


def _made(value: Any) -> Any:
    return value.make() if isinstance(value, _Like) else value


def _replay(forward: str, backward: str, interface: Interface, ledger: _Ledger) -> bool:
    run_forward = load_wrapper(forward, ledger.extern)
    run_backward = load_wrapper(backward, ledger.extern)
    if run_forward is None or run_backward is None:
        return False
    with _torch.fake_mode():
        inputs = [_made(each) for each in interface.inputs]
        ledger.ignore(inputs)
        try:
            with ledger:
                made = list(run_forward(list(inputs)))
                results = _with_role(made, interface, RESULTS)
                by_name = dict(zip(interface.outputs, made, strict=True))
                del made
                args, roots = [], []
                for name in interface.saved:
                    value = by_name[name] if name in by_name else _made(interface.tangents[name])
                    if name.startswith(_TANGENT) and isinstance(value, Tensor) and value.ndim == 0:
                        roots.append(value)
                    args.append(value)
                del by_name, value
                gradients = run_backward(args)
                ledger.settle()
                del gradients, results, roots
        except (RuntimeError, TypeError, NameError, AttributeError, ValueError, KeyError):
            return False  # a helper of the wrapper that is not known here
    return True


def _with_role(made: Sequence[Any], interface: Interface, roles: Sequence[str]) -> list[Any]:
    return [value for value, role in zip(made, interface.roles, strict=True) if role in roles]


class _Ledger(_torch.DispatchMode):
    """Adds up the storages that operators make and that are still referred to."""

    def __init__(self, workspaces: WorkspaceTable, transit: Transit | None) -> None:
        super().__init__()
        self.peak_bytes = 0
        self.calls: list[Call] = []
        self._workspaces, self._transit = workspaces, transit
        self._under_way: dict[int, int] = {}
        """Bytes that a collective holds, by the storage of its first result."""
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self._sum = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = Call(func, tuple(args), dict(kwargs or {}))
        workspace, sizes = self._probed(call)
        result = func(*args, **(kwargs or {}))
        self.settle()
        self._add(result, sizes)
        self._carry(call, result)
        self.peak_bytes = max(self.peak_bytes, self._sum + workspace)
        return result

    def extern(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count the workspace of a kernel that writes into buffers that are there."""
        workspace, _ = self._probed(Call(target, args, kwargs))
        self.settle()
        self.peak_bytes = max(self.peak_bytes, self._sum + workspace)

    def ignore(self, values: Sequence[Any]) -> None:
        """Leave out what was there before."""
        for storage in _storages(values):
            self._live[storage._cdata] = (StorageWeakRef(storage), 0)

    def settle(self) -> None:
        """Subtract what is referred to no more."""
        gone = [key for key, (ref, _) in self._live.items() if ref.expired()]
        for key in gone:
            self._sum -= self._live.pop(key)[1]

    def _add(self, result: Any, sizes: Sequence[int]) -> None:
        storages = list(_storages([result]))
        for at, storage in enumerate(storages):
            if storage._cdata not in self._live:
                size = sizes[at] if len(sizes) == len(storages) else int(storage.nbytes())
                self._live[storage._cdata] = (StorageWeakRef(storage), size)
                self._sum += size

    def _carry(self, call: Call, result: Any) -> None:
        """Add what a collective holds when it starts, and subtract it when it was waited for."""
        if call.target is ops.wait_:
            self._sum -= self._under_way.pop(next(_storages([call.args[0]]))._cdata, 0)
        elif self._transit is not None:
            held_bytes = self._transit(call.target, call.args)
            if held_bytes:
                self._under_way[next(_storages([result]))._cdata] = held_bytes
                self._sum += held_bytes

    def _probed(self, call: Call) -> tuple[int, tuple[int, ...]]:
        signature = signature_of_call(call)
        if signature is None:
            return 0, ()
        found = self._workspaces.known.get(signature)
        if found is None:
            self.calls.append(call)
            return 0, ()
        return found.workspace_bytes, found.result_bytes


def _storages(values: Sequence[Any]) -> Iterator[torch.UntypedStorage]:
    for value in values:
        for tensor in tensors_in(value):
            yield tensor.untyped_storage()
