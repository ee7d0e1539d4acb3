"""A program of a fixed size that serves smaller calls too: arguments are padded, results are cut.

    buckets 8, 16    a call of 11 rows:   x[11] ──pad──▶ x[16] ──program──▶ y[16] ──cut──▶ y[11]

Right only for models whose rows do not depend on one another, which the build tries (`builder.buckets`).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from torchloom.serve.call.entry import Run
from torchloom.serve.contract.conditions import argument_at
from torchloom.serve.contract.contract import Contract
from torchloom.serve.contract.dims import Dim
from torchloom.serve.contract.specs import TensorSpec
from torchloom.serve.model.target import Target

Axes = dict[str, tuple[int, int]]
"""For each tensor in a result, which size varies, and how many of it there are for one row."""
Filling = Callable[[TensorSpec, list[int], Tensor], Tensor]
"""Makes padding of a shape for a tensor: `(what the contract says of it, shape, the tensor)`."""


class Padded:
    """A program of a fixed size that runs for smaller ones.

    Args:
        run: the program; it takes the model first.
        target: says how arguments are called.
        contract: says where the dim is in them.
        dim: which varies.
        size: what `run` is for.
        axes: where the dim is in the result.
    """

    def __init__(
        self, run: Run, target: Target, contract: Contract, dim: Dim, size: int, axes: Axes
    ) -> None:
        self.run, self.size, self.axes = run, size, axes
        self.filling: Filling | None = None
        """Makes what is in the padding, where that is not zeros."""
        self._names = [parameter.name for parameter in target.parameters]
        self._first = 0 if target.owner is None else 1
        self._places = {
            path: (spec, spec.shape.index(dim))
            for path, spec in contract.tensors()
            if dim in spec.shape
        }

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Pad, run, cut."""
        owner, given = args[: self._first], args[self._first :]
        values = {**dict(zip(self._names, given, strict=False)), **kwargs}
        num = next(
            tensor.shape[place]
            for path, (_, place) in self._places.items()
            if (tensor := argument_at(values, path)) is not None
        )
        if num == self.size and self.filling is None:
            return self.run(*args, **kwargs)
        padded = {name: self._padded(name, value) for name, value in values.items()}
        first = [padded.pop(name) for name in self._names[: len(given)]]
        found = self.run(*owner, *first, **padded)
        return map_tensors(found, lambda path, tensor: self._cut(path, tensor, num))

    def _padded(self, name: str, value: Any) -> Any:
        return map_tensors(value, self._pad, name)

    def _pad(self, path: str, tensor: Tensor) -> Tensor:
        path = re.sub(r"\['?([^'\]]+)'?\]", r".\1", path)
        if path not in self._places:
            return tensor
        spec, place = self._places[path]
        shape = list(tensor.shape)
        missing = self.size - shape[place]
        if not missing:
            return tensor
        shape[place] = missing
        if self.filling is None:
            return torch.cat([tensor, tensor.new_zeros(shape)], place)
        return torch.cat([tensor, self.filling(spec, shape, tensor)], place)

    def _cut(self, path: str, tensor: Tensor, num: int) -> Tensor:
        if path not in self.axes:
            return tensor
        place, each = self.axes[path]
        # A copy: nothing of the padding stays alive, or reachable, behind the result.
        return tensor.narrow(place, 0, num * each).clone()


def map_tensors(value: Any, fn: Callable[[str, Tensor], Tensor], path: str = "") -> Any:
    """Return a nested value with each tensor replaced; paths read like `['logits'][0].first`.

    Args:
        value: of tuples, lists, dicts and dataclasses.
        fn: takes path and tensor, and returns what replaces it.
        path: to the value.
    """
    if isinstance(value, Tensor):
        return fn(path, value)
    if isinstance(value, Mapping):
        made = {key: map_tensors(each, fn, f"{path}[{key!r}]") for key, each in value.items()}
        return made if type(value) is dict else type(value)(**made)
    if isinstance(value, (list, tuple)):
        items = [map_tensors(each, fn, f"{path}[{place}]") for place, each in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {
            each.name: map_tensors(getattr(value, each.name), fn, f"{path}.{each.name}")
            for each in dataclasses.fields(value)
        }
        return dataclasses.replace(value, **parts)
    return value
