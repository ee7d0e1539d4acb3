"""Building runs the model; afterwards it, and the process's generators, are as they were before."""

from __future__ import annotations

import collections
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_OF_TORCH = frozenset({"_parameters", "_buffers", "_modules"})
_CONTAINERS = (list, dict, set, collections.deque)
_DEEPEST = 4
"""Attributes of attributes that are looked into for tensors."""


@contextmanager
def generators_kept() -> Iterator[None]:
    """Give torch's, Python's and NumPy's generators back the state that they had."""
    cpu, python = torch.get_rng_state(), random.getstate()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    numpy = sys.modules.get("numpy")
    of_numpy = None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(cpu)
        random.setstate(python)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
        if numpy is not None:
            numpy.random.set_state(of_numpy)


class State:
    """What a forward pass may change of a model besides its weights.

    Args:
        module: the model, None for a plain function.
    """

    def __init__(self, module: nn.Module | None) -> None:
        self._module = module
        held = dict(_held(module))
        self._names = held.keys()
        self._tensors = [(tensor, tensor.detach().clone()) for tensor in held.values()]
        modules = [] if module is None else list(module.modules())
        self._attributes = [(each, dict(each.__dict__)) for each in modules]
        self._containers = [
            (value, type(value)(value) if type(value) is not dict else dict(value))
            for each in modules
            for name, value in each.__dict__.items()
            if type(value) in _CONTAINERS and name not in _OF_TORCH
        ]
        self._buffers = [(each, dict(each._buffers)) for each in modules]

    def tensors_now(self) -> dict[str, Tensor]:
        """Return copies of buffers, and of tensors in attributes, by the names that were there before."""
        held = _held(self._module)
        return {name: each.detach().clone() for name, each in held if name in self._names}

    def restore(self) -> None:
        """Put everything back."""
        for module, attributes in self._attributes:
            own = module.__dict__
            for name in own.keys() - attributes.keys():
                del own[name]
            own.update(
                {name: value for name, value in attributes.items() if own.get(name) is not value}
            )
        for module, buffers in self._buffers:
            if any(module._buffers.get(name) is not value for name, value in buffers.items()):
                module._buffers.update(buffers)
        for container, content in self._containers:
            if not _same(container, content):
                container.clear()
                container.extend(content) if hasattr(container, "extend") else container.update(
                    content
                )
        with torch.no_grad():
            for tensor, before in self._tensors:
                if not torch.equal(tensor, before):
                    tensor.copy_(before)


def _same(container: Any, content: Any) -> bool:
    """Return whether a container holds the same objects; asking tensors for equality would be another thing."""
    if len(container) != len(content):
        return False
    if isinstance(container, dict):
        return all(container.get(key, container) is value for key, value in content.items())
    return all(one is other for one, other in zip(container, content, strict=True))


def _held(module: nn.Module | None) -> Iterator[tuple[str, Tensor]]:
    """Yield buffers, and tensors that attributes hold, each once."""
    seen: set[int] = set()
    for path, each in () if module is None else module.named_modules():
        start = f"{path}." if path else ""
        for name, tensor in each._buffers.items():
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield f"buffer {start}{name}", tensor
        for name, value in list(each.__dict__.items()):
            if name not in _OF_TORCH:
                yield from _within(f"{start}{name}", value, seen, 0)


def _within(path: str, value: Any, seen: set[int], depth: int) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, (nn.Module, nn.Parameter, type)) or id(value) in seen or depth > _DEEPEST:
        return
    if isinstance(value, Tensor):
        seen.add(id(value))
        yield f"tensor {path}", value
        return
    items: Mapping[Any, Any] = {}
    if isinstance(value, Mapping):
        items = dict(value)
    elif isinstance(value, (list, tuple, collections.deque)):
        items = dict(enumerate(value))
    elif hasattr(value, "__dict__") and not callable(value):
        items = vars(value)
    if items:
        seen.add(id(value))
    for key, each in list(items.items()):
        yield from _within(f"{path}.{key}", each, seen, depth + 1)
