"""Try whether the content of the padding reaches a result, and find the operator that lets it.

A padded program is compared with the model for each bucket at its ends and between them, with random values and with
ones that hide others (all negative, all positive, all equal), while the padding holds the zeros that calls use, or NaN,
random values, extremes. A model passes if none of this changes a result beyond rounding.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from torchloom.errors import ProofError, ServeError
from torchloom.serve.builder.buckets.rows import mixing_node
from torchloom.serve.builder.compare.compare import LEFT, call_by_name, copied_args, differences_at
from torchloom.serve.builder.trace import Traced, trace
from torchloom.serve.call.padded import Filling, Padded
from torchloom.serve.contract.box import Box
from torchloom.serve.contract.contract import Contract
from torchloom.serve.contract.specs import TensorSpec
from torchloom.serve.model.snapshot import ModelSnapshot
from torchloom.serve.model.target import Target, gradient_mode_of

Values = Callable[[TensorSpec, Tensor], Tensor]


def _zeros(spec: TensorSpec, shape: list[int], like: Tensor) -> Tensor:
    return like.new_zeros(shape)


def _not_numbers(spec: TensorSpec, shape: list[int], like: Tensor) -> Tensor:
    if like.dtype.is_floating_point or like.dtype.is_complex:
        return like.new_full(shape, torch.nan)
    return like.new_full(shape, max(spec.below - 1, 0))


def _random(spec: TensorSpec, shape: list[int], like: Tensor) -> Tensor:
    draw = torch.Generator().manual_seed(len(shape) + shape[0])
    if like.dtype.is_floating_point or like.dtype.is_complex:
        return (3 * torch.randn(shape, generator=draw)).to(like.device, like.dtype)
    return torch.randint(0, max(spec.below, 1), shape, generator=draw).to(like.device, like.dtype)


def _large(spec: TensorSpec, shape: list[int], like: Tensor) -> Tensor:
    return like.new_full(shape, 1e4 if like.dtype.is_floating_point else max(spec.below - 1, 0))


def _small(spec: TensorSpec, shape: list[int], like: Tensor) -> Tensor:
    return like.new_full(shape, -1e4 if like.dtype.is_floating_point else 0)


_FILLINGS: Mapping[str, Filling] = {
    "zeros, as in calls": _zeros,
    "random values": _random,
    "NaN": _not_numbers,
    "large values": _large,
    "large negative values": _small,
}


def _negative(spec: TensorSpec, made: Tensor) -> Tensor:
    return -made.abs() - 1 if made.dtype.is_floating_point else torch.zeros_like(made)


def _positive(spec: TensorSpec, made: Tensor) -> Tensor:
    if made.dtype.is_floating_point:
        return made.abs() + 1
    return torch.full_like(made, max(spec.below - 1, 0))


def _equal(spec: TensorSpec, made: Tensor) -> Tensor:
    return torch.full_like(made, 1)


_VALUES: tuple[Values | None, ...] = (None, _negative, _positive, _equal)


def check_padding(
    target: Target,
    contract: Contract,
    padded: Padded,
    box: Box,
    without: frozenset[str],
    also: Sequence[int] = (),
) -> None:
    """Refuse a padded program whose results depend on what is in the padding.

    Args:
        target: the model.
        contract: what arguments look like.
        padded: a program for a bucket.
        box: the sizes that it serves.
        without: paths of optional tensors that are None.
        also: further sizes to try.

    Raises:
        ProofError: they do; names the operator, where one can be found.
    """
    for sizes, values, (name, filling) in _trials(box, padded.size, also):
        padded.filling = filling
        try:
            with gradient_mode_of(contract):
                found = differences_at(target, contract, padded, sizes, without, values)
        except ServeError:
            if values is None:
                raise
            continue  # values that the model does not take say nothing of padding
        finally:
            padded.filling = None
        if found is None:
            continue
        if found.path.startswith(LEFT):
            raise ProofError(
                f"{target.name} cannot be padded to {padded.size}: {found} at {sizes}. What forward leaves in attributes "
                "and containers is not cut: return it, or use shapes='split'"
            )
        culprit = _culprit(target, contract, padded, sizes, without)
        raise ProofError(
            f"{target.name} cannot be padded to {padded.size}: at {sizes}, with {name} in the padding, {found}. "
            f"{culprit or 'Rows see one another, or padding is read'}: use shapes='split'"
        )


def check_rows(
    target: Target, contract: Contract, box: Box, traced: Traced, without: frozenset[str]
) -> None:
    """Refuse a padded program one of whose operators lets rows see one another.

    Args:
        target: the model.
        contract: what arguments look like.
        box: the sizes that the program serves.
        traced: a trace that stands for all of them.
        without: paths of optional tensors that are None.

    Raises:
        ProofError: one does; names it.
    """
    (dim,) = box.varying
    size = dim.max

    def run(graph: Callable[..., Any]) -> Any:
        args = copied_args(target, contract.example({dim.name: size}, without=without))
        first = () if target.owner is None else (target.owner,)
        before = ModelSnapshot(target)
        try:
            return call_by_name(traced.graph.shell.around(graph, target.call), target, first, args)
        finally:
            before.restore()

    with gradient_mode_of(contract):
        found = mixing_node(traced, dim.sizes, run)
    if found is not None:
        raise ProofError(
            f"{target.name} cannot be padded to {size}: {_sentence(*found)}: use shapes='split'"
        )


def _trials(
    box: Box, size: int, also: Sequence[int]
) -> Iterator[tuple[dict[str, int], Values | None, tuple[str, Filling]]]:
    (dim,) = box.dims
    sizes = dim.sizes
    ends = dict.fromkeys([*sizes[:2], sizes[len(sizes) // 2], *sizes[-2:-1], *also])
    for number in ends:
        if number == size:
            continue
        for values in _VALUES:
            for each in _FILLINGS.items():
                if values is None or each[1] in (_zeros, _random):
                    yield {dim.name: number}, values, each


def _culprit(
    target: Target,
    contract: Contract,
    padded: Padded,
    sizes: Mapping[str, int],
    without: frozenset[str],
) -> str:
    """Return the first operator whose results differ in more places than padding has, as a sentence."""
    (dim,) = (dim for dim in contract.dims.values() if dim.min < dim.max)
    whole = Box.of(contract.dims.values()).cut(dim.name, [padded.size, padded.size + 1])
    exact = next(box for box in whole if padded.size in (d.min for d in box.dims))
    try:
        traced = trace(target, contract, exact, without=without)
        rows: list[list[tuple[fx.Node, Tensor]]] = []
        for filling in (_zeros, _random):
            recorder = _Recorder(traced.graph.graph_module)
            run = traced.graph.shell.around(recorder.run_all, target.call)
            copy = Padded(run, target, contract, dim, padded.size, padded.axes)
            copy.filling = filling
            first = () if target.owner is None else (target.owner,)
            with gradient_mode_of(contract):
                copy(*first, **contract.example(sizes, without=without))
            rows.append(recorder.seen)
        return _first_other(rows, 1 - sizes[dim.name] / padded.size)
    except Exception:  # noqa: BLE001 - the model may raise anything; the message does without the name
        return ""


def _first_other(rows: list[list[tuple[fx.Node, Tensor]]], share: float) -> str:
    """Return the first operator with results that differ in more than a share of places, as a sentence."""
    for (node, one), (_, other) in zip(*rows, strict=False):
        if one.shape != other.shape:
            return _sentence(node)
        same = (
            (one == other) | (one.isnan() & other.isnan())
            if one.is_floating_point()
            else one == other
        )
        if one.numel() and float((~same).sum()) > share * one.numel() + 1e-6:
            return _sentence(node)
    return ""


def _sentence(node: fx.Node, what: str = "lets rows see one another, and so padding") -> str:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    lines = [each for each in (node.meta.get("stack_trace") or "").splitlines() if "File " in each]
    where = ""
    if lines:
        path, number = lines[-1].split('"')[1], lines[-1].split("line ")[1].split(",")[0]
        text = linecache.getline(path, int(number)).strip()
        where = f" ({text})" if text else ""
    return f"{name}{where} {what}"


class _Recorder(fx.Interpreter):
    """Runs a graph and keeps what each operator returned."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.seen: list[tuple[fx.Node, Tensor]] = []

    def run_all(self, *args: Any) -> Any:
        return self.run(*args)

    def run_node(self, n: fx.Node) -> Any:
        """Run one node."""
        found = super().run_node(n)
        each: Any = found
        if n.op.startswith("call"):
            parts = each if isinstance(each, (list, tuple)) else [each]
            self.seen += [(n, part.detach().clone()) for part in parts if isinstance(part, Tensor)]
        return found
