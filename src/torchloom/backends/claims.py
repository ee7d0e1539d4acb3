"""Find what claims the name of a backend, and whether it would work on this machine.

Names come from registrations of this process, built-ins and entry points.

The rule: a registration in this process, then a built-in of torch or torchloom, then an entry
point; of several entry points, the distribution whose name sorts first. Entry points of the group
`torch_dynamo_backends` are found lazily, and loaded when they are looked up.
"""

from __future__ import annotations

import difflib
import functools
import importlib.metadata
import importlib.util
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast

import torch

from torchloom import envs
from torchloom._torch.registry import backend_tags, registered_backends
from torchloom.errors import BackendLoadError

CompilerFn = Callable[..., Any]
"""`(gm, example_inputs, **options) -> callable`: what is registered."""

CompiledFn = Callable[..., tuple[Any, ...]]
"""What a backend returns: a function of the graph's inputs that returns its outputs."""

Kind = Literal["built-in", "this process", "entry point"]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a backend comes from."""

    kind: Kind
    where: str
    """"torch", "torchloom", "FILE:LINE" of the function, or "DISTRIBUTION==VERSION (VALUE)"."""

    def __str__(self) -> str:
        return f"{self.kind}, {self.where}"


@dataclass(frozen=True, slots=True)
class Registration:
    """One name that was registered through torchloom in this process."""

    name: str
    fn: CompilerFn
    tags: tuple[str, ...]
    origin: Origin
    published: CompilerFn
    """The function in torch's registry under this name; the same object while the registration lasts."""


def origin_of(fn: CompilerFn) -> Origin:
    """Say where a function registered in this process was written."""
    target: Any = getattr(fn, "func", fn)  # functools.partial
    target = getattr(target, "__func__", target)  # bound methods
    if code := getattr(target, "__code__", None):
        return Origin("this process", f"{code.co_filename}:{code.co_firstlineno}")
    if hasattr(target, "__qualname__"):
        return Origin("this process", f"{target.__module__}.{target.__qualname__}")
    kind = type(target)
    where = getattr(sys.modules.get(kind.__module__), "__file__", None) or kind.__module__
    return Origin("this process", f"a {kind.__qualname__} of {where}")


GROUP = "torch_dynamo_backends"
"""The group in which distributions announce backends to torch."""

_VALUE = re.compile(r"[\w.]+\s*:\s*[\w.]+\s*(\[.*\])?\s*")


def discover() -> dict[str, tuple[EntryPoint, ...]]:
    """Return the entry points by name, the winner of each name first. Loads none of them.

    The answer is kept until a folder of the import path changes, so that a distribution
    installed later is seen.
    """
    # Tests replace the function that reads entry points.
    return _search((importlib.metadata.entry_points, *sys.path, *map(_modified, sys.path)))


@functools.lru_cache(maxsize=1)
def _search(state: tuple[Any, ...]) -> dict[str, tuple[EntryPoint, ...]]:
    by_name: dict[str, dict[tuple[str, str], EntryPoint]] = {}
    for point in _announced():
        # The same distribution may be seen twice, once through each of two import paths.
        by_name.setdefault(point.name, {}).setdefault((_dist(point), point.value), point)
    return {name: tuple(sorted(points.values(), key=_dist)) for name, points in by_name.items()}


def _announced() -> list[EntryPoint]:
    """Return the entry points of the group; of test doubles only `names`, `[name]` and `load` are used, as torch does."""
    group: Any = importlib.metadata.entry_points(group=GROUP)
    listed = {point.name: point for point in group}
    others = {name: group[name] for name in getattr(group, "names", ()) if name not in listed}
    return [*group, *(_as_point(name, each) for name, each in others.items())]


def _as_point(name: str, given: Any) -> EntryPoint:
    if isinstance(given, EntryPoint):
        return given
    point = SimpleNamespace(name=name, value="", group=GROUP, dist=None, load=given.load)
    return cast("EntryPoint", point)


def origin_of_point(point: EntryPoint) -> Origin:
    """Say which distribution announced an entry point."""
    return Origin("entry point", f"{_dist(point)} ({point.value})")


def load_point(point: EntryPoint) -> CompilerFn:
    """Import what an entry point names.

    Raises:
        BackendLoadError: naming backend, distribution and cause.
    """
    try:
        if point.value and not _VALUE.fullmatch(point.value):
            raise ImportError(f"{point.value!r} is not of the form 'package.module:function'")
        fn = point.load()
    except Exception as error:  # importing a package of others runs any code
        raise BackendLoadError(
            f"backend {point.name!r} of {_dist(point)} cannot be loaded: its entry point "
            f"{point.value!r} raised {type(error).__name__}: {error}. Repair or uninstall "
            f"{_dist(point).partition('==')[0]}, or choose another backend"
        ) from error
    if not callable(fn):
        raise BackendLoadError(
            f"backend {point.name!r} of {_dist(point)} cannot be used: its entry point "
            f"{point.value!r} is a {type(fn).__name__}, not a function"
        )
    return fn


def why_not_loadable(point: EntryPoint) -> str | None:
    """Return why an entry point cannot be loaded, as far as that is known without loading it, or None."""
    if not point.value:
        return None
    if not _VALUE.fullmatch(point.value):
        return f"its value {point.value!r} is not of the form 'package.module:function'"
    top = point.value.partition(":")[0].strip().partition(".")[0]
    try:
        found = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        found = None
    return None if found else f"module {top!r} is not installed"


def _dist(point: EntryPoint) -> str:
    dist = point.dist
    if dist is None:
        return "an unnamed distribution"
    return f"{dist.metadata['Name']}=={dist.version}"


def _modified(path: str) -> int:
    try:
        return Path(path or ".").stat().st_mtime_ns
    except OSError:
        return 0


LOCK = threading.RLock()
"""Held for every read and write of the registrations, here and in torch."""
REGISTERED: dict[str, Registration] = {}
"""The registrations of this process by name."""


OURS = {"torchloom": "torchloom.pipeline.backend:weave"}
"""torchloom's own backends, by name; the package declares the same entry points to torch. They need rooms above
this one, so they are imported when looked up."""


def all_names() -> set[str]:
    """Return every name, of whatever origin."""
    with LOCK:
        return {*REGISTERED, *registered_backends(), *OURS, *discover()}


def tags_of(name: str) -> tuple[str, ...] | None:
    """Return a backend's tags; None for an entry point that has not been loaded."""
    with LOCK:
        if name in REGISTERED:
            return REGISTERED[name].tags
        found = backend_tags(name)
        return () if found is None and name in OURS else found


def origin_by_name(name: str) -> Origin | None:
    """Return where the backend that a name stands for comes from."""
    claims = claims_of(name)
    return claims[0] if claims else None


def claims_of(name: str) -> list[Origin]:
    """Return everything that claims a name, the winner first."""
    with LOCK:
        claims: list[Origin] = []
        if name in REGISTERED:
            claims.append(REGISTERED[name].origin)
        found = registered_backends().get(name)
        points = discover().get(name, ())
        if found is not None and name not in REGISTERED:
            own = built_in_origin(name, found)
            if own is not None:
                claims.append(own)
            elif not points:
                claims.append(origin_of(found))
        elif name in OURS and name not in REGISTERED:
            claims.append(Origin("built-in", "torchloom"))
        return [*claims, *(origin_of_point(p) for p in points if not _is_ours(p))]


def built_in_origin(name: str, found: CompilerFn) -> Origin | None:
    """Return the origin of a built-in of torchloom or torch, None for any other function."""
    if name in OURS:
        return Origin("built-in", "torchloom")
    if str(getattr(found, "__module__", "")).split(".")[0] in ("torch", "functorch"):
        return Origin("built-in", "torch")
    return None


def _is_ours(point: EntryPoint) -> bool:
    """Return whether an entry point is torchloom's own declaration of a built-in."""
    return OURS.get(point.name) == point.value


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint with the known name that is most like an unknown one, or an empty text."""
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """What is known about one name."""

    name: str
    tags: tuple[str, ...] | None
    """None for an entry point that nobody has loaded: its tags are unknown until then."""
    origin: Origin
    hidden: tuple[Origin, ...]
    """Others that claim the name and lost: see `torchloom.backends.claims` for the rule."""
    why_not: str | None
    """The reason why it would not work here, or None."""

    @property
    def is_available(self) -> bool:
        """Whether no reason is known why it would not work here."""
        return self.why_not is None


def describe_backends() -> list[BackendInfo]:
    """Return one row for each name that `torch.compile(backend=...)` takes, sorted by name.

    Loads and runs nothing: availability is judged by installed modules, devices and tools.

    Example:
        >>> [row.name for row in describe_backends() if not row.is_available]  # doctest: +SKIP
        ['cudagraphs', 'openxla', 'tvm']
    """
    points = discover()
    rows = []
    for name in sorted(all_names()):
        origin, *hidden = claims_of(name)
        why_not = None
        if origin.kind == "entry point":
            why_not = why_not_loadable(points[name][0])
        elif origin.kind == "built-in" and name in _NEEDS:
            why_not = _NEEDS[name]()
        rows.append(BackendInfo(name, tags_of(name), origin, tuple(hidden), why_not))
    return rows


def _module(name: str) -> Callable[[], str | None]:
    def check() -> str | None:
        return None if importlib.util.find_spec(name) else f"module {name!r} is not installed"

    return check


def _cuda() -> str | None:
    return None if torch.cuda.is_available() else "it needs a CUDA device"


def cpp_compiler() -> str | None:
    """Return the C++ compiler that Inductor would call on CPU, or None."""
    for name in (envs.get_str("CXX", ""), "g++", "clang++", "cl"):
        if name and shutil.which(name):
            return shutil.which(name)
    return None


def _inductor() -> str | None:
    if torch.cuda.is_available():
        return _module("triton")()
    return None if cpp_compiler() else "no C++ compiler is found: install g++ or set CXX"


_NEEDS: dict[str, Callable[[], str | None]] = {
    "cudagraphs": _cuda,
    "inductor": _inductor,
    "openxla": _module("torch_xla"),
    "openxla_eval": _module("torch_xla"),
    "tvm": _module("tvm"),
}
