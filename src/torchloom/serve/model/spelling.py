"""Values as text. The text of a value is equal in each process, so facts can be compared across processes.

`exact` returns a text that no other value has, or raises. `words_for` never fails: of an object without an exact
spelling it says the type.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import hashlib
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchloom.bytecode import code_digest

_MOST_SHOWN = 64
"""Items of a container that a text shows; a digest stands for all of them beside these."""
_LITERALS = (bool, int, float, complex, str, bytes, type(None), type(...), range)
_OF_TORCH = (
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, torch.finfo),
    *(torch.iinfo, torch.qscheme),
)
_SEQUENCES = (
    list,
    tuple,
    collections.deque,
    *(type(view()) for view in ({}.keys, {}.values, {}.items)),
)
_NATIVE = (
    *(types.BuiltinFunctionType, types.BuiltinMethodType, types.MethodDescriptorType),
    *(types.WrapperDescriptorType, types.MethodWrapperType, types.ClassMethodDescriptorType),
)
_KINDS = {Tensor: "", nn.Parameter: ", a parameter"}
"""What is said of the class of a tensor; of any other its name."""


class NotExactError(ValueError):
    """No text stands for a value."""


def exact(value: Any) -> str:
    """Return a text that stands for a value: another one has another text.

    Code of functions and classes is not part of it, their names are.

    Raises:
        NotExactError: it is, or holds, an object of a kind of its own.
    """
    return _spelled(value, _refused, ())


def words_for(value: Any) -> str:
    """Return what can be said of any value; of objects that have no spelling, their type."""
    return _spelled(value, lambda other: f"a {name_of(type(other))}", ())


def type_words(kind: type) -> str:
    """Return what another process calls a type."""
    return f"a {name_of(kind)}"


def name_of(value: Any) -> str:
    """Return the qualified name of a type or function."""
    module = getattr(value, "__module__", None) or ""
    return f"{module}.{getattr(value, '__qualname__', value)}".removeprefix("builtins.").lstrip(".")


def _refused(value: Any) -> str:
    raise NotExactError(f"a {name_of(type(value))} has no spelling")


def _spelled(value: Any, other: Callable[[Any], str], within: tuple[int, ...]) -> str:  # noqa: PLR0911, PLR0912, C901
    if id(value) in within:
        return "itself"
    inner = functools.partial(_spelled, other=other, within=(*within, id(value)))
    kind = type(value)
    if kind in _LITERALS or isinstance(value, _OF_TORCH):
        return repr(value)
    if isinstance(value, enum.Enum):
        return f"{name_of(kind)}.{value.name} = {inner(value.value)}"
    if isinstance(value, Tensor):
        return _tensor_words(value)
    if isinstance(value, nn.Module):
        return f"module {name_of(kind)}, {'training' if value.training else 'evaluating'}"
    if isinstance(value, types.ModuleType):
        return f"module {value.__name__}"
    if isinstance(value, type):
        return f"class {name_of(value)}"
    if isinstance(value, types.FunctionType):
        return f"function {name_of(value)}"
    if isinstance(value, types.CodeType):
        return f"code {value.co_name} {code_digest(value)}"
    if isinstance(value, types.MethodType):
        return f"method {name_of(value.__func__)} of {words_for(value.__self__)}"
    if isinstance(value, _NATIVE):
        return f"function {name_of(value)}"
    if isinstance(value, functools.partial):
        return f"partial of {inner(value.func)}: {inner(value.args)}, {inner(value.keywords)}"
    if isinstance(value, slice):
        return f"slice({inner(value.start)}, {inner(value.stop)}, {inner(value.step)})"
    if isinstance(value, Mapping):
        return _container(kind, [f"{inner(key)}: {inner(each)}" for key, each in value.items()])
    if isinstance(value, (set, frozenset)):
        return _container(kind, sorted(map(inner, value)))
    if isinstance(value, _SEQUENCES):
        return _container(kind, list(map(inner, value)))
    bases: tuple[Any, ...] = (int, float, complex, str, bytes)
    for base in bases:
        if isinstance(value, base):
            return f"{name_of(kind)} {base.__repr__(value)}"
    if hasattr(value, "dtype") and hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        return f"{name_of(kind)} {value!r}"  # NumPy's scalars
    if dataclasses.is_dataclass(value):
        pairs = [f"{f.name}={inner(getattr(value, f.name))}" for f in dataclasses.fields(value)]
        return f"{name_of(kind)}({', '.join(pairs)})"
    if callable(value) and hasattr(value, "__qualname__"):
        return f"function {name_of(value)}"
    if (
        kind.__module__.partition(".")[0] == "torch"
        and callable(value)
        and " at 0x" not in (text := str(value))
    ):
        return f"{name_of(kind)} {text}"  # operators; an address is another one in each process
    return other(value)


def _container(kind: type, texts: list[str]) -> str:
    shown = ", ".join(texts[:_MOST_SHOWN])
    if len(texts) > _MOST_SHOWN:
        digest = hashlib.blake2b("\0".join(texts).encode(), digest_size=8).hexdigest()
        shown = f"{shown}, ... ({digest})"
    return f"{name_of(kind)} of {len(texts)}: {shown}"


def _tensor_words(value: Tensor) -> str:
    is_strided = value.layout == torch.strided
    layout = f"strides {list(value.stride())}" if is_strided else str(value.layout)
    grad = ", requires grad" if value.requires_grad else ""
    kind = _KINDS.get(type(value), f", a {name_of(type(value))}")
    return f"tensor {value.dtype}{list(value.shape)} {layout} on {value.device}{grad}{kind}"
