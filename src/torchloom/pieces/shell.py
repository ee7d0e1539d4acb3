"""The code around a captured graph, and what it needs of Dynamo at run time, which is nearly nothing.

Dynamo's bytecode fetches a graph's inputs from the arguments and the model, calls the graph, and rebuilds the
function's result. It runs in processes that never import Dynamo, which takes a second and a half; the few
helpers that it calls are here, any other is imported when it is asked for.

Its stored form is code: whoever reads one has made sure of who wrote it.
"""

from __future__ import annotations

import inspect
import io
import marshal
import pickle
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import nn

from torchloom._torch.generated import DYNAMO_UTILS
from torchloom._torch.module_calls import runs_forward_alone, traced_function


class _Utils(types.ModuleType):
    """Stands for `torch._dynamo.utils`, whose functions that ask for a size do nothing but that."""

    @staticmethod
    def call_size(tensor: torch.Tensor, dim: int) -> int:
        """Return a size."""
        return tensor.size(dim)

    @staticmethod
    def call_stride(tensor: torch.Tensor, dim: int) -> int:
        """Return a stride."""
        return tensor.stride(dim)

    @staticmethod
    def call_storage_offset(tensor: torch.Tensor) -> Any:
        """Return where a tensor begins in its memory."""
        return tensor.storage_offset()

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(DYNAMO_UTILS), name)


class _Pickler(pickle.Pickler):
    """Knows modules and code, and refuses weights: they are the model's, whatever they were when it was compiled."""

    def reducer_override(self, value: Any) -> Any:
        """Leave everything else as it is."""
        if isinstance(value, (nn.Module, torch.Tensor)):
            raise TypeError(f"a {type(value).__name__} is no part of a program")
        if isinstance(value, types.ModuleType):
            return import_module, (value.__name__,)
        if isinstance(value, types.CodeType):
            return _code, (marshal.dumps(value.replace(co_consts=())), value.co_consts)
        return NotImplemented


def _code(content: bytes, constants: tuple[Any, ...]) -> types.CodeType:
    """Return code with its constants, which Dynamo makes of any object."""
    return marshal.loads(content).replace(co_consts=constants)


class _Scope(dict[str, Any]):
    """Globals of the bytecode: its own names, and behind them the function's, as they are at each call."""

    outer: dict[str, Any]

    def __missing__(self, name: str) -> Any:
        return self.outer[name]


@dataclass
class Shell:
    """The bytecode around a graph."""

    code: types.CodeType
    backend_id: str
    """The name under which the bytecode calls the graph."""
    imports: Mapping[str, str]
    """Modules that it refers to, by the names that it uses."""
    used_globals: Mapping[str, Any] = field(default_factory=dict)
    """Globals that it uses, where the function's own are not enough."""
    made_globals: Mapping[str, Any] = field(default_factory=dict)
    """Globals that Dynamo made for it."""

    def around(
        self, compiled: Callable[..., Any], function: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Return a function that runs the bytecode with a compiled graph in it.

        Args:
            compiled: takes the graph's inputs, returns its outputs.
            function: what was captured, or the same one in another process: globals, closure and
                defaults are its own.
        """
        plain = plain_function(function)[0]
        modules = {
            alias: _Utils(name) if name == DYNAMO_UTILS else import_module(name)
            for alias, name in self.imports.items()
        }
        made_names = {**self.made_globals, self.backend_id: compiled}
        own = {
            name: value
            for name, value in self.used_globals.items()
            if name not in plain.__globals__
        }
        scope = _Scope({**modules, **own, **made_names})
        scope.outer = plain.__globals__
        scope["__builtins__"] = plain.__globals__["__builtins__"]
        made = types.FunctionType(
            self.code, scope, argdefs=plain.__defaults__, closure=plain.__closure__
        )
        made.__kwdefaults__ = plain.__kwdefaults__
        return made

    def to_bytes(self) -> bytes:
        """Return it for another process of the same versions of Python and torch.

        Raises:
            TypeError: it refers to an object that lives in this process alone.
        """
        rest = (self.backend_id, dict(self.imports), self.used_globals, self.made_globals)
        buffer = io.BytesIO()
        try:
            _Pickler(buffer).dump((self.code, *rest))
        except Exception as error:  # pickling an object may raise anything
            raise TypeError(f"the code around the graph cannot be stored: {error}") from error
        return buffer.getvalue()

    @classmethod
    def from_bytes(cls, content: bytes) -> Shell:
        """Return what `to_bytes` stored, which runs code: it has to be of this user's own."""
        return cls(*pickle.loads(content))


def plain_function(function: Callable[..., Any]) -> tuple[types.FunctionType, object | None]:
    """Return the Python function behind a callable, and the object that it is bound to.

    Of a module it is `forward`, or `__call__` where hooks or a `__call__` of its own have to run.

    Raises:
        RuntimeError: it is none of these.
    """
    found: Any = function
    if isinstance(function, nn.Module):
        if not runs_forward_alone(function):
            return traced_function(function)
        found = function.forward
    if hasattr(found, "__self__") and hasattr(found, "__func__"):
        return found.__func__, found.__self__
    if inspect.isfunction(found):
        return found, None
    raise RuntimeError(f"{function!r} is no module, bound method or function")
