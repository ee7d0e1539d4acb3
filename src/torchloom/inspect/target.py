"""From whatever a user calls to the code object under which Dynamo keeps its entries."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from torch import nn

from torchloom._torch import introspect
from torchloom.errors import InspectError


class Target(NamedTuple):
    """A function that Dynamo may have compiled."""

    name: str
    fn: Callable[..., Any]
    """The plain function."""
    leading: tuple[Any, ...]
    """Arguments that every call gets first: `self` of a method or module."""

    @property
    def code(self) -> CodeType:
        """The code object that holds the entries."""
        return self.fn.__code__


def target_of(fn: Any) -> Target:
    """Return the function behind a compiled callable, a module, a method or a partial.

    Raises:
        InspectError: there is no Python function behind it.
    """
    given = fn
    leading: tuple[Any, ...] = ()
    compiled = getattr(fn, "__torchloom_compiled__", None)
    if compiled is not None:  # a function under torchloom.jit, a wrapped module
        return target_of(compiled)
    if isinstance(fn, nn.Module):
        in_place = introspect.compiled_call_of(fn)
        fn = given = introspect.original_module(fn)
        if in_place is not None:
            fn = in_place
        else:
            fn = type(fn).forward
            leading = (given,)
    fn = introspect.innermost(fn)
    if isinstance(fn, functools.partial):
        leading, fn = (*leading, *fn.args), fn.func
    if inspect.ismethod(fn):
        owner = fn.__self__
        leading, fn = (owner, *leading), fn.__func__
        # Dynamo passes through the frames of nn.Module and keeps its entries at forward.
        if isinstance(owner, nn.Module) and fn.__name__ in ("_call_impl", "_wrapped_call_impl"):
            fn = type(owner).forward
    if isinstance(fn, nn.Module):
        return target_of(fn)
    if not inspect.isfunction(fn):
        raise InspectError(
            f"{getattr(given, '__name__', given)!r} ({type(given).__name__}) is not a Python function "
            "or module: pass what torch.compile returned, or the function that it was given"
        )
    return Target(getattr(fn, "__qualname__", fn.__name__), fn, leading)


def twin_of(fn: Any) -> FunctionType:
    """Return a copy of a function with a code object, and so with compiled entries, of its own."""
    twin = FunctionType(
        fn.__code__.replace(), fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__
    )
    twin.__kwdefaults__, twin.__qualname__ = fn.__kwdefaults__, fn.__qualname__
    twin.__module__ = fn.__module__
    return twin


def frame_locals(target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the local variables with which a call would begin.

    Raises:
        InspectError: the arguments do not fit the function.
    """
    try:
        bound = inspect.signature(target.fn, follow_wrapped=False).bind(
            *target.leading, *args, **kwargs
        )
    except TypeError as error:
        raise InspectError(f"{target.name}() cannot be called so: {error}") from None
    bound.apply_defaults()
    found = dict(bound.arguments)
    for name, cell in zip(target.code.co_freevars, target.fn.__closure__ or (), strict=False):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not assigned yet  # noqa: PERF203
            continue
    return found


def resumed(target: Target) -> Iterator[tuple[int, CodeType]]:
    """Yield the code of the function and of its resume functions, with their depth."""
    seen: set[int] = set()

    def walk(code: CodeType, depth: int) -> Iterator[tuple[int, CodeType]]:
        if id(code) in seen:
            return
        seen.add(id(code))
        yield depth, code
        names = {
            name
            for entry in introspect.cache_entries(code)
            for name in entry.code.co_names
            if name.startswith("__resume_at")
        }
        for name in sorted(names):
            resume = target.fn.__globals__.get(name)
            if resume is not None:
                yield from walk(resume.__code__, depth + 1)

    yield from walk(target.code, 0)
