"""Registering, finding and listing backends.

All state is behind one lock; a registration either happens completely, here and in torch, or
leaves nothing behind. Nothing is imported under the lock: a module that registers itself while
another thread looks it up would otherwise wait for a thread that waits for it.

torch's registry writes attributes on the functions that it is given and compares them by identity
on every compiled call. It therefore gets a plain function of torchloom's own: one per name, made
once, whatever the backend itself is (a bound method, a builtin, an object with slots).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import EntryPoint
from operator import attrgetter
from typing import Any, TypeVar, overload

from torchloom._torch.registry import (
    forget_backend,
    registered_backends,
    unknown_backend_error,
)
from torchloom._torch.registry import register_backend as register_with_torch
from torchloom.backends.claims import (
    LOCK,
    OURS,
    REGISTERED,
    CompilerFn,
    Origin,
    Registration,
    all_names,
    built_in_origin,
    discover,
    load_point,
    nearest,
    origin_by_name,
    origin_of,
    origin_of_point,
    tags_of,
)
from torchloom.errors import BackendConflictError, BackendError, UnnamedBackendError
from torchloom.log import get_logger


def make_published(name: str, fn: CompilerFn) -> CompilerFn:
    """Return the plain function through which torch calls `fn`.

    Raises:
        BackendError: when the returned function is called: with options that `fn` does not take, or where
            `fn` returns nothing that can be called.
    """
    takes_options = _takes_options(fn)

    def published(gm: Any, example_inputs: Sequence[Any], **options: Any) -> Any:
        """Compile a graph with the backend.

        Raises:
            BackendError: the backend takes no options, or returns nothing that can be called.
        """
        if options and not takes_options:
            raise BackendError(
                f"backend {name!r} takes no options, but torch.compile was given "
                f"{', '.join(sorted(options))}: leave mode= and options= out, or let the backend "
                "accept **options"
            )
        compiled = fn(gm, example_inputs, **options)
        if not callable(compiled):
            raise BackendError(
                f"backend {name!r} returned a {type(compiled).__name__}: a backend returns a "
                "function that computes the graph, e.g. gm.forward"
            )
        return compiled

    published.__name__ = published.__qualname__ = name
    extra: Any = published
    extra.compiler_name = name
    # torch.compile asks backends for these by name.
    for attr in ("reset", "get_compiler_config"):
        if hasattr(fn, attr):
            setattr(extra, attr, getattr(fn, attr))
    return published


def remove_from_torch(name: str, published: CompilerFn) -> None:
    """Remove a published function from torch's registry, unless the name belongs to another one by now."""
    if registered_backends().get(name) is published:
        points = discover().get(name)
        forget_backend(name, points[0] if points else None)


def _takes_options(fn: CompilerFn) -> bool:
    """Return whether `fn` accepts keywords besides its two arguments; True if that is not known."""
    try:
        params = inspect.signature(fn).parameters.values()
    except ValueError:  # of builtins
        return True
    if any(param.kind is param.VAR_KEYWORD for param in params):
        return True
    named = [p for p in params if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    num_positional_only = sum(p.kind is p.POSITIONAL_ONLY for p in params)
    return len(named) + num_positional_only > 2


logger = get_logger(__name__)

F = TypeVar("F", bound=CompilerFn)


@overload
def register_backend(compiler_fn: F, name: str | None = None, tags: Sequence[str] = ()) -> F: ...


@overload
def register_backend(
    compiler_fn: None = None, name: str | None = None, tags: Sequence[str] = ()
) -> Callable[[F], F]: ...


def register_backend(
    compiler_fn: Any = None, name: str | None = None, tags: Sequence[str] = ()
) -> Any:
    """Register a backend by name, here and with `torch.compile`.

    Works as a plain decorator, as a decorator with arguments, and as a call.

    Args:
        compiler_fn: any callable `(gm, example_inputs, **options) -> callable`.
        name: default, also for an empty one: the function's own name.
        tags: e.g. "debug" or "experimental", which `list_backends` leaves out. They belong to the
            name: one function may stand under two names with different tags.

    Returns:
        `compiler_fn` itself.

    Raises:
        BackendError: `compiler_fn` is not callable.
        UnnamedBackendError: it has no name of its own, such as a partial, and none is given.
        BackendConflictError: the name is taken by a built-in or by another registration. Nothing
            is changed. (A name that only an entry point claims may be taken; a warning says so.)

    Example:
        >>> @register_backend(name="printing", tags=("debug",))
        ... def print_and_run(gm, example_inputs):
        ...     gm.graph.print_tabular()
        ...     return gm.forward
    """
    if compiler_fn is None:
        return lambda fn: register_backend(fn, name, tags)
    _register(compiler_fn, name, tags)
    return compiler_fn


def register_debug_backend(compiler_fn: Any = None, name: str | None = None) -> Any:
    """Register a backend under the tag "debug"; see `register_backend`."""
    return register_backend(compiler_fn, name, ("debug",))


def register_experimental_backend(compiler_fn: Any = None, name: str | None = None) -> Any:
    """Register a backend under the tag "experimental"; see `register_backend`."""
    return register_backend(compiler_fn, name, ("experimental",))


def unregister_backend(name: str) -> CompilerFn:
    """Remove a registration of this process and return its function.

    Functions compiled before keep working. An entry point that the name had hidden is found again.

    Raises:
        BackendError: no backend was registered under this name through torchloom.
    """
    with LOCK:
        entry = REGISTERED.pop(name, None)
        if entry is None:
            known = origin_by_name(name)
            what = f"is {known}" if known else "is not known at all"
            raise BackendError(
                f"backend {name!r} {what}: only what torchloom.backends.register_backend registered in this "
                f"process can be taken back{nearest(name, REGISTERED)}"
            )
        remove_from_torch(name, entry.published)
        return entry.fn


@contextmanager
def temporary_backend(
    compiler_fn: CompilerFn,
    name: str | None = None,
    tags: Sequence[str] = (),
    *,
    override: bool = False,
) -> Iterator[str]:
    """Register a backend for the length of a `with` block; yields its name.

    Args:
        compiler_fn: as for `register_backend`.
        name: as for `register_backend`.
        tags: as for `register_backend`.
        override: stand in for a registration of this process that has the same name, which comes
            back at the end. Built-ins cannot be overridden.

    Raises:
        BackendError: as for `register_backend`.
        BackendConflictError: as for `register_backend`.
    """
    chosen = _checked_name(compiler_fn, name)
    with LOCK:
        hidden = REGISTERED.get(chosen) if override else None
        if hidden is not None:
            unregister_backend(chosen)
        try:
            entry = _register(compiler_fn, chosen, tags)
        except BackendError:
            _restore(hidden)
            raise
    try:
        yield chosen
    finally:
        with LOCK:
            # The block may have taken the name back itself, or given it to another function.
            if REGISTERED.get(chosen) is entry:
                unregister_backend(chosen)
            if chosen not in REGISTERED:
                _restore(hidden)


def lookup_backend(compiler_fn: str | CompilerFn) -> CompilerFn:
    """Return the function of a backend.

    Args:
        compiler_fn: a name, or a callable, which is returned as it is.

    Raises:
        BackendError: neither a name nor a callable; or no backend has this name (the error then
            is torch's `InvalidBackend` as well).
        BackendLoadError: an entry point has this name and cannot be loaded.
    """
    if not isinstance(compiler_fn, str):
        if not callable(compiler_fn):
            raise BackendError(
                f"a backend is a name or a callable, not a {type(compiler_fn).__name__} "
                f"({compiler_fn!r})"
            )
        return compiler_fn
    name = str(compiler_fn)
    found = _loaded(name)
    if found is not None:
        return found
    points = discover().get(name, ())
    if name in OURS:
        module, _, attribute = OURS[name].partition(":")
        return _adopt(name, attrgetter(attribute)(import_module(module)))
    if points:
        _say_who_wins(points)
        return _adopt(name, load_point(points[0]))
    raise unknown_backend_error(BackendError)(
        f"no backend is named {name!r}{nearest(name, all_names())}. `torchloom backends` lists all"
    )


def list_backends(exclude_tags: Iterable[str] | None = ("debug", "experimental")) -> list[str]:
    """Return the names that `torch.compile(backend=...)` takes, sorted.

    Entry points that nobody has looked up yet are listed without loading them; their tags are
    unknown until then. See `describe_backends` for which of them would work.

    Args:
        exclude_tags: leave out backends with any of these tags; None or () lists everything.
    """
    excluded = set(exclude_tags or ())
    registered_backends()
    with LOCK:
        return sorted(name for name in all_names() if not excluded & set(tags_of(name) or ()))


def _register(fn: Any, name: str | None, tags: Sequence[str]) -> Registration:
    chosen = _checked_name(fn, name)
    registered_backends()  # a clash with one of torch's must show now, not later
    if isinstance(tags, str):
        raise BackendError(f"tags of backend {chosen!r}: write ({tags!r},), not a single string")
    with LOCK:
        known = REGISTERED.get(chosen)
        if known is not None:
            if known.fn is fn and known.tags == tuple(tags):
                return known
            raise _conflict(chosen, known.origin, fn)
        found = registered_backends().get(chosen)
        points = discover().get(chosen, ())
        if found is not None and not (points and built_in_origin(chosen, found) is None):
            raise _conflict(chosen, built_in_origin(chosen, found) or origin_of(found), fn)
        if chosen in OURS:
            raise _conflict(chosen, Origin("built-in", "torchloom"), fn)
        entry = Registration(chosen, fn, tuple(tags), origin_of(fn), make_published(chosen, fn))
        if found is not None:
            remove_from_torch(chosen, found)  # an entry point that was loaded before
        register_with_torch(entry.published, name=chosen, tags=entry.tags)
        REGISTERED[chosen] = entry
        if points:
            logger.warning(
                "backend %r now is %s; it hides the %s",
                chosen,
                entry.origin,
                " and the ".join(str(origin_of_point(point)) for point in points),
            )
        return entry


def _restore(hidden: Registration | None) -> None:
    if hidden is not None:
        register_with_torch(hidden.published, name=hidden.name, tags=hidden.tags)
        REGISTERED[hidden.name] = hidden


def _loaded(name: str) -> CompilerFn | None:
    torchs = registered_backends()
    with LOCK:
        return REGISTERED[name].fn if name in REGISTERED else torchs.get(name)


def _adopt(name: str, fn: CompilerFn) -> CompilerFn:
    """Register with torch a backend that was found outside of it."""
    with LOCK:
        # Importing its module may have registered the name already, here or in torch.
        found = _loaded(name)
        if found is not None:
            return found
        published = make_published(name, fn)
        register_with_torch(published, name=name, tags=getattr(fn, "_tags", ()))
        return published


def _say_who_wins(points: Sequence[EntryPoint]) -> None:
    chosen, *hidden = points
    if hidden:
        logger.warning(
            "backend %r is announced by %d distributions: the %s is used; hidden: %s",
            chosen.name,
            len(points),
            origin_of_point(chosen),
            ", ".join(str(origin_of_point(point)) for point in hidden),
        )


def _checked_name(fn: Any, name: str | None) -> str:
    if not callable(fn):
        raise BackendError(
            f"a backend must be callable as fn(gm, example_inputs), not a {type(fn).__name__} "
            f"({fn!r})"
        )
    if name is not None and not isinstance(name, str):
        raise BackendError(f"the name of a backend is a string, not a {type(name).__name__}")
    # An empty name is none, and a lambda's is "<lambda>", as in torch's registry.
    chosen = name or getattr(fn, "__name__", None)
    if not isinstance(chosen, str) or not chosen:
        raise UnnamedBackendError(
            f"a {type(fn).__name__} has no name to be found by: register_backend(fn, name=...)"
        )
    return chosen


def _conflict(name: str, taken_by: Origin, fn: CompilerFn) -> BackendConflictError:
    cure = (
        f"call unregister_backend({name!r}) first"
        if taken_by.kind == "this process"
        else "choose another name"
    )
    return BackendConflictError(
        f"backend {name!r} is taken by {taken_by}; {origin_of(fn).where} cannot have it: {cure}"
    )
