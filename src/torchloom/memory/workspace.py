"""Bytes that no tensor of a graph shows: measured one operator at a time, never in a graph.

Some kernels allocate scratch (matrix products in bf16, attention, convolutions through oneDNN), and
some return a tensor in a larger storage than it needs (`mse_loss` a number in one of the size of
its input). Each distinct call (operator, shapes, strides, dtypes, constants) runs once on fresh
tensors under the profiler. Its workspace is the highest running sum of its allocator events less
the sum when it returned.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from torchloom._torch.modes import is_profiling, without_modes
from torchloom._torch.operators import OpOverload
from torchloom._torch.tensors import layout_hint, size_hint
from torchloom.graph import tensors_in, value_of
from torchloom.log import get_logger
from torchloom.memory.measure import memory_profile, profiler_events
from torchloom.ops.losses import chunked_loss, loss_workspace_bytes

logger = get_logger(__name__)

Signature = str


class Probed(NamedTuple):
    """What one call of an operator was measured to allocate."""

    workspace_bytes: int
    result_bytes: tuple[int, ...]
    """Storage of each result; empty where the call could not be made."""


class WorkspaceTable:
    """Workspaces of operators by what they were called with.

    Example:
        >>> table = WorkspaceTable()
        >>> table.probe(graph.nodes)  # doctest: +SKIP
        >>> graph_memory_of(graph.nodes, outputs, held=(), workspace=table)  # doctest: +SKIP

    Args:
        measures: whether unknown calls are run; False where the graphs are for another device, at sizes that
            this machine may not hold. What such calls allocate besides their results counts as nothing.
    """

    def __init__(self, *, measures: bool = True) -> None:
        self.known: dict[Signature, Probed] = {}
        """What calls allocate."""
        self.measures = measures

    def __call__(self, node: fx.Node) -> Probed | None:
        """Return what a node's call allocates, None where it was not probed."""
        return self.of_call(_call_of(node)) if node.op == "call_function" else None

    def of_call(self, call: Call) -> Probed | None:
        """Return what a call allocates, None where it was not probed."""
        if call.target is chunked_loss:  # running it at its size is what it is there to avoid
            return Probed(loss_workspace_bytes(*call.args), ())
        signature = signature_of_call(call)
        return None if signature is None else self.known.get(signature)

    def probe(self, nodes: Iterable[fx.Node]) -> int:
        """Run each call that is not known yet, once, on fresh tensors; return how many ran."""
        return self.probe_calls(_call_of(node) for node in nodes if node.op == "call_function")

    def probe_calls(self, calls: Iterable[Call]) -> int:
        """Run each call that is not known yet, once, on fresh tensors; return how many ran."""
        waiting: dict[Signature, Call] = {}
        if not self.measures:
            return 0
        for call in calls:
            signature = signature_of_call(call)
            if signature is not None and signature not in self.known:
                waiting.setdefault(signature, call)
        if waiting:
            self.known.update(_measure(waiting))
        return len(waiting)


class Call(NamedTuple):
    """An operator and what it is called with: fake tensors, numbers, lists of them."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def signature_of_call(call: Call) -> Signature | None:
    """Return a text for everything that a call's allocations depend on, None if not probed.

    Only functional operators of ATen are probed: they have no effect but their result.
    """
    target = call.target
    if str(target) in _DRAWING:
        return f"{target}({', '.join(_text(each) for each in call.args)})"
    if not isinstance(target, OpOverload):
        return None
    if target.namespace not in ("aten", "prims") or target._schema.is_mutable:
        return None
    if any(arg.alias_info is not None for arg in target._schema.arguments):
        return None  # views allocate nothing
    parts = [_text(each) for each in (*call.args, *sorted(call.kwargs.items()))]
    return f"{target}({', '.join(parts)})"


_DRAWING = ("run_and_save_rng_state", "run_with_rng_state", "graphsafe_run_with_rng_state")
"""Calls of an operator that draws random numbers, and again with the state it had then."""


def _text(value: Any) -> str:
    if isinstance(value, Tensor):
        sizes, strides, _ = layout_hint(value)
        return f"{value.dtype}{sizes}{strides}{value.device.type}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_text(each) for each in value)}]"
    return str(size_hint(value)) if isinstance(value, torch.SymInt) else repr(value)


def _measure(waiting: dict[Signature, Call]) -> dict[Signature, Probed]:
    results: dict[Signature, tuple[int, ...]] = {}
    if is_profiling():  # of torch's profilers there is one in a process
        logger.warning(
            "a profiler runs while operators' memory is measured for a plan, by that same profiler: what it has "
            "recorded so far is lost, and torch 2.11 raises at its end. Begin to profile behind the first step"
        )
    with (
        without_modes(),  # compilers plan under fake tensors, which allocate nothing
        torch.random.fork_rng(devices=_cuda_devices(waiting.values())),
        torch.no_grad(),
        memory_profile() as profile,
    ):
        for signature, call in waiting.items():
            results[signature] = _try(call, f"{_MARK}{len(results)}")
    workspaces = _workspaces(profiler_events(profile), list(results))
    return {each: Probed(workspaces[each], results[each]) for each in results}


_MARK = "torchloom.workspace#"


def _workspaces(events: list[Any], ranges: list[Signature]) -> dict[Signature, int]:
    marks = [event for event in events if event.name().startswith(_MARK)]
    spans = {int(e.name()[len(_MARK) :]): (e.start_ns(), e.duration_ns()) for e in marks}
    memory = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    memory.sort(key=lambda each: each[0])  # of one moment in the order of events
    found: dict[Signature, int] = {}
    for index, signature in enumerate(ranges):
        begin, length = spans.get(index, (0, -1))
        inside = (num_bytes for at, num_bytes in memory if 0 <= at - begin <= length)
        sums = [0, *itertools.accumulate(inside)]
        found[signature] = max(sums) - sums[-1]
    return found


def _cuda_devices(calls: Iterable[Call]) -> list[torch.device]:
    """Return the GPUs that calls compute on, whose random generators planning must leave as they are.

    Calls that make random tensors have no operand there, and name the device.
    """
    found: set[torch.device] = set()
    for call in calls:
        values = (*call.args, *call.kwargs.values())
        found |= {each.device for each in tensors_in(values)}
        found |= {each for each in values if isinstance(each, torch.device)}
    return [each for each in found if each.type == "cuda"]


def _try(call: Call, mark: str) -> tuple[int, ...]:
    """Return the bytes of each result."""
    try:
        inputs = fx.node.map_aggregate(call.args, real_like)
        named: Any = fx.node.map_aggregate(call.kwargs, real_like)
        with torch.profiler.record_function(mark):
            result = call.target(*inputs, **named)
    except (RuntimeError, IndexError, NotImplementedError):
        # Made-up data does not suit it, or the device has no memory for a second set of operands: no workspace counts.
        return ()
    return tuple(t.untyped_storage().nbytes() for t in tensors_in(result))


def _call_of(node: fx.Node) -> Call:
    args: Any = fx.node.map_arg(node.args, value_of)
    kwargs: Any = fx.node.map_arg(dict(node.kwargs), value_of)
    return Call(node.target, args, kwargs)


def real_like(value: Any) -> Any:
    """Return a real tensor in place of a fake one: small numbers, and zeros where they may index.

    Args:
        value: what a graph recorded of a node; what is no tensor and no symbol is returned.
    """
    if isinstance(value, torch.SymInt):
        return size_hint(value)
    if not isinstance(value, Tensor):
        return value
    sizes, strides, length = layout_hint(value)
    # Strides may overlap (expanded tensors), so the memory below is filled first.
    flat = torch.zeros(length, dtype=value.dtype, device=value.device)
    if flat.is_floating_point() or flat.is_complex():
        flat.fill_(0.5)
    elif value.dtype == torch.uint8 and sizes == list(torch.get_rng_state().shape):
        return torch.get_rng_state()
    return flat.as_strided(sizes, strides)
