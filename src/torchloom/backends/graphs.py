"""Reads what a backend is given: its name, tensors, devices, and inputs of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx


def tensors_of(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among the inputs of a graph."""
    return [value for value in values if isinstance(value, Tensor)]


def devices_of(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> set[str]:
    """Return the types of all devices on which a graph has inputs, parameters or buffers."""
    held = [*gm.parameters(), *gm.buffers()]
    return {tensor.device.type for tensor in [*tensors_of(example_inputs), *held]}


def name_of(backend: Any) -> str:
    """Return the name of a backend for messages."""
    if isinstance(backend, str):
        return backend
    named = getattr(backend, "compiler_name", None) or getattr(backend, "__name__", None)
    return named or type(backend).__name__


def clone_inputs(values: Sequence[Any]) -> list[Any]:
    """Return inputs that a graph may change in place, with gradients of their own.

    Inputs that share memory get separate copies.
    """
    found: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            with torch.no_grad():
                twin = value.detach().clone(memory_format=torch.preserve_format)
            value = twin.requires_grad_(value.requires_grad)
        found.append(value)
    return found
