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
    words: str


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
            found.append(Look(place, _readable(node.name), _words(value)))
    return found


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
        f"{look.name} was {look.words}, is {now}"
        for look, each in zip(looks, values, strict=True)
        if (now := _words(each)) != look.words
    ]
    if differing:
        raise OtherTensorsError(differing)


def _words(value: Any) -> str:
    """Return what kernels rely on of a tensor. Strides count where there are steps to take."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return f"a {type(value).__name__}"
    counts = [size > 1 and value.numel() > 0 for size in value.shape]
    steps = [str(by) if its else "any" for by, its in zip(value.stride(), counts, strict=True)]
    signs = " negated" * value.is_neg() + " conjugated" * value.is_conj()
    sizes = ", ".join(map(str, value.shape))
    dtype = short_dtype(value.dtype)
    return f"{dtype}[{sizes}] with strides ({', '.join(steps)}) on {value.device}{signs}"


def _readable(placeholder: str) -> str:
    """Return `layers.7.weight` for `l_self_modules_layers_modules_7_parameters_weight_`."""
    text = placeholder.removeprefix("l_").removeprefix("self").rstrip("_")
    return _CONTAINERS.sub(".", text).strip("._")
