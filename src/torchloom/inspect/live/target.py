"""Finds the function behind a callable: the code object under which Dynamo keeps its entries."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FunctionType, MappingProxyType, MethodType
from typing import Any, NamedTuple

from torch import nn

from torchloom._torch import dispatch, introspect
from torchloom.errors import InspectError
from torchloom.inspect.live.rewritten import continuations


class Named(NamedTuple):
    """A callable that torch compiles through a wrapper function of its own: a partial, a callable object, a
    module of torch.nn."""

    name: str
    file: str
    line: int


def name_of(fn: Any) -> str:
    """Return a name for a callable that is no plain function.

    Example:
        >>> name_of(functools.partial(name_of, 3))
        'partial(name_of)'
    """
    if isinstance(fn, functools.partial):
        return f"partial({name_of(fn.func)})"
    name = getattr(fn, "__name__" if inspect.isbuiltin(fn) else "__qualname__", None)
    return name if isinstance(name, str) else type(fn).__qualname__


def short_name(name: str) -> str:
    """Return a qualified name without the functions around it.

    Example:
        >>> short_name("partial(build.<locals>.Block.forward)")
        'partial(Block.forward)'
    """
    return re.sub(r"[\w.<>]*<locals>\.", "", name)


def named(fn: Any) -> Named:
    """Return name, file and line of a callable that is no plain function."""
    name, inner = name_of(fn), fn
    while isinstance(inner, functools.partial):
        inner = inner.func
    if isinstance(inner, nn.Module):
        inner, name = type(inner).forward, f"{name}.forward"
    elif not inspect.isroutine(inner):
        inner = type(inner).__call__
    code = getattr(introspect.innermost(getattr(inner, "__func__", inner)), "__code__", None)
    return Named(name, *(("", 0) if code is None else introspect.place_of(code)))


class TargetFunction(NamedTuple):
    """A function that Dynamo may have compiled."""

    name: str
    fn: Callable[..., Any]
    """The plain function."""
    leading: tuple[Any, ...]
    """Arguments that every call gets first: `self` of a method or module."""

    keywords: Mapping[str, Any] = MappingProxyType({})
    """Keyword arguments that every call gets: those of a partial."""
    wrapped: Any = None
    """The callable, where it has no code of its own: `fn` is then torch's wrapper function, which all such share."""

    @property
    def code(self) -> CodeType:
        """The code object that holds the entries."""
        return self.fn.__code__


def target_of(fn: Any) -> TargetFunction:
    """Return the function behind a compiled callable, a module, a method or a partial.

    Raises:
        InspectError: there is no Python function behind it.
    """
    given = fn = dispatch.compiled_behind(fn)
    leading: tuple[Any, ...] = ()
    if isinstance(fn, functools.partial) and dispatch.compilation_of(fn.func) is not None:
        inner = target_of(fn.func)  # what was compiled is inside: a method under torchloom.jit
        keywords = {**inner.keywords, **fn.keywords}
        return inner._replace(leading=(*inner.leading, *fn.args), keywords=keywords)
    compiled = getattr(fn, "__torchloom_compiled__", None)
    if compiled is not None:  # a function under torchloom.jit, a wrapped module
        return target_of(compiled)
    held = dispatch.held_by_class(fn)
    if held is not None:
        held = dispatch.compiled_behind(held)
        fn = MethodType(getattr(held, "__torchloom_compiled__", held), fn)
    elif isinstance(fn, nn.Module):
        given = introspect.original_module(fn)
        fn, leading = _called_of(fn)
    fn = introspect.innermost(fn)
    if inspect.ismethod(fn):
        owner = fn.__self__
        leading, fn = (owner, *leading), introspect.innermost(fn.__func__)
        # Dynamo passes through the frames of nn.Module and keeps its entries at forward.
        if isinstance(owner, nn.Module) and fn.__name__ in ("_call_impl", "_wrapped_call_impl"):
            fn, leading = _forward_of(owner)
    if isinstance(fn, nn.Module):
        return target_of(fn)
    if _is_wrapped_by_torch(fn):
        fn = dispatch.wrapped_inline(fn)
    if not inspect.isfunction(fn):
        raise InspectError(
            f"{getattr(given, '__name__', given)!r} ({type(given).__name__}) is not a Python function "
            "or module: pass what torch.compile returned, or the function that it was given"
        )
    wrapped = _wrapped_in(fn)
    name = getattr(fn, "__qualname__", fn.__name__) if wrapped is None else name_of(wrapped)
    return TargetFunction(name, fn, leading, wrapped=wrapped)


def _called_of(module: nn.Module) -> tuple[Any, tuple[Any, ...]]:
    """Return the function that holds the entries of a module, and its leading arguments."""
    in_place, original = introspect.compiled_call_of(module), introspect.original_module(module)
    if in_place is not None:
        return in_place, ()
    if dispatch.is_left_alone(type(original).forward) and "forward" not in vars(original):
        return dispatch.wrapped_inline(original), ()
    return _forward_of(original)


def _forward_of(module: nn.Module) -> tuple[Any, tuple[Any, ...]]:
    """Return a module's forward (one set on the instance first), and its leading arguments."""
    own = vars(module).get("forward")
    if own is None:
        return type(module).forward, (module,)
    own = introspect.innermost(own)
    return (own.__func__, (own.__self__,)) if inspect.ismethod(own) else (own, ())


def entries_of(target: TargetFunction, code: CodeType) -> list[introspect.CacheEntry]:
    """Return Dynamo's entries for a function or a continuation of it, the most recently used first."""
    found = introspect.cache_entries(code)
    if target.wrapped is None or code is not target.code:
        return found
    return [entry for entry in found if dispatch.is_for_wrapped(entry, target.wrapped)]


def _is_wrapped_by_torch(fn: Any) -> bool:
    """Return whether torch.compile wraps a callable in a function of its own: partials, callable objects."""
    if isinstance(fn, functools.partial):
        return True
    if inspect.isroutine(fn) or inspect.isclass(fn) or not callable(fn):
        return False
    called = (vars(each).get("__call__") for each in type(fn).mro())
    return inspect.isfunction(next((each for each in called if each is not None), None))


def _wrapped_in(fn: FunctionType) -> Any:
    """Return the callable inside torch's own wrapper function, None for any other function."""
    if fn.__code__.co_name != "inner" or fn.__code__.co_freevars != ("fn",):
        return None
    if not fn.__code__.co_filename.endswith("external_utils.py"):
        return None
    return (fn.__closure__ or ())[0].cell_contents


def twin_of(fn: Any, code: CodeType | None = None) -> FunctionType:
    """Return a copy of a function that runs other code, or a copy of its own and so has compiled entries of its own.

    What decorators set on the function is not copied.
    """
    own = fn.__code__.replace() if code is None else code
    twin = FunctionType(own, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
    twin.__kwdefaults__, twin.__qualname__ = fn.__kwdefaults__, fn.__qualname__
    twin.__module__ = fn.__module__
    return twin


def frame_locals(
    target: TargetFunction, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return the local variables with which a call would begin.

    Args:
        target: the function.
        args: positional arguments of the call, without those that every call gets.
        kwargs: keyword arguments of the call.

    Raises:
        InspectError: the arguments do not fit the function.
    """
    # Of the function itself __signature__ may say anything.
    signature = inspect.signature(twin_of(target.fn, target.code))
    try:
        bound = signature.bind(*target.leading, *args, **{**target.keywords, **kwargs})
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


def resumed(target: TargetFunction) -> Iterator[tuple[int, CodeType]]:
    """Yield the code of the function and of its resume functions, with their depth."""
    seen: set[int] = set()

    def walk(code: CodeType, depth: int) -> Iterator[tuple[int, CodeType]]:
        if id(code) in seen:
            return
        seen.add(id(code))
        yield depth, code
        for entry in introspect.cache_entries(code):
            for _, rest in continuations(entry.code, target.fn.__globals__):
                yield from walk(rest, depth + 1)

    yield from walk(target.code, 0)
