"""A comparison of all weights before a graph runs.

Kernels read memory by the dtype, sizes and strides of the trace, and somebody may have replaced a tensor since:
`load_state_dict(assign=True)`, `model.layer.to(dtype)`, `weight.data = ...`. One comparison in C++ covers all of them,
at about 35 ns a tensor, before anything is written.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from torchloom._torch.tensors import same_tensors
from torchloom.errors import ContractError
from torchloom.graph.text import short_dtype

Call = Callable[..., Any]
_CONTAINERS = re.compile(r"_(?:modules|parameters|buffers)_")


class ChangedError(ContractError):
    """The model is no longer what was compiled."""

    def __init__(self, changed: Sequence[str]) -> None:
        said = "; ".join(changed[:4])
        super().__init__(
            f"the model has changed since it was compiled: {said}: build it again, or set it back"
        )


class OtherTensorsError(ChangedError):
    """A program was given tensors that it was not compiled for; nothing of it has run."""


class Look(NamedTuple):
    """What an input of a graph looked like in its trace."""

    place: int
    name: str
    dtype: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    device: str
    is_negated: bool
    is_conjugated: bool

    def differs(self, value: Any) -> str:
        """Say what else a value is, or nothing. Strides count where there are steps to take."""
        if not isinstance(value, Tensor) or value.layout is not torch.strided:
            return f"{self.name} was a tensor, is {type(value).__name__}"
        now = _look(self.place, self.name, value)
        steps = [size > 1 and 0 not in self.sizes for size in self.sizes]
        is_laid_alike = len(now.sizes) == len(steps) and all(
            mine == its or not counts
            for mine, its, counts in zip(self.strides, now.strides, steps, strict=True)
        )
        if is_laid_alike and now._replace(strides=self.strides) == self:
            return ""
        return f"{self.name} was {self._words()}, is {now._words()}"

    def _words(self) -> str:
        sizes, strides = (", ".join(map(str, each)) for each in (self.sizes, self.strides))
        signs = " negated" * self.is_negated + " conjugated" * self.is_conjugated
        dtype = short_dtype(getattr(torch, self.dtype))
        return f"{dtype}[{sizes}] with strides ({strides}) on {self.device}{signs}"


def looks_of(graph_module: fx.GraphModule) -> list[Look]:
    """Return what the inputs of a graph look like whose sizes are numbers: weights, for the most part.

    Args:
        graph_module: a graph of Dynamo.
    """
    found = []
    for place, node in enumerate(graph_module.graph.find_nodes(op="placeholder")):
        value = node.meta["example_value"]
        if (
            isinstance(value, Tensor)
            and value.layout is torch.strided
            and all(type(each) is int for each in (*value.shape, *value.stride()))
        ):
            found.append(_look(place, _readable(node.name), value))
    return found


def looks_from(stored: Sequence[Sequence[Any]]) -> list[Look]:
    """Return what a store kept of `looks_of`."""
    return [
        Look(place, name, dtype, tuple(sizes), tuple(strides), *rest)
        for place, name, dtype, sizes, strides, *rest in stored
    ]


def with_weight_check(call: Call, looks: Sequence[Look]) -> Call:
    """Return a graph's function that looks at its inputs first.

    Args:
        call: takes the graph's inputs.
        looks: what some of them were.
    """
    if not looks:
        return call
    pick = operator.itemgetter(*(look.place for look in looks))
    is_one = len(looks) == 1
    # Made of the tensors themselves: what does not count for kernels (type, whether gradients are required) is
    # then compared as well, and costs one longer look where it changes.
    is_known: Callable[..., bool] = lambda *_: False  # noqa: E731

    def checked(*inputs: Any) -> Any:
        nonlocal is_known
        picked = (pick(inputs),) if is_one else pick(inputs)
        if not is_known(*picked):
            _compare(looks, picked)
            is_known = same_tensors(picked)
        return call(*inputs)

    return checked


def _compare(looks: Sequence[Look], values: Sequence[Any]) -> None:
    differing = [
        text for look, each in zip(looks, values, strict=True) if (text := look.differs(each))
    ]
    if differing:
        raise OtherTensorsError(differing)


def _look(place: int, name: str, value: Tensor) -> Look:
    return Look(
        *(place, name, str(value.dtype).removeprefix("torch."), tuple(value.shape), value.stride()),
        str(value.device),
        value.is_neg(),
        value.is_conj(),
    )


def _readable(placeholder: str) -> str:
    """Return `layers.7.weight` for `l_self_modules_layers_modules_7_parameters_weight_`."""
    text = placeholder.removeprefix("l_").removeprefix("self").rstrip("_")
    return _CONTAINERS.sub(".", text).strip("._")
