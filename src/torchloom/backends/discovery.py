"""Entry points of the group `torch_dynamo_backends`: found lazily, loaded when looked up."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from torchloom.backends.records import CompilerFn, Origin
from torchloom.errors import BackendLoadError

GROUP = "torch_dynamo_backends"
"""The group in which distributions announce backends to torch."""

_VALUE = re.compile(r"[\w.]+\s*:\s*[\w.]+\s*(\[.*\])?\s*")


@dataclass
class _Found:
    """The result of the last search of the import path."""

    by_name: dict[str, tuple[EntryPoint, ...]] = field(default_factory=dict)
    state: object = None
    """`sys.path`, the times at which its folders were modified, and the function that reads entry points, which tests
    replace."""


_FOUND = _Found()
"""One per process, as the import path itself."""


def discover() -> dict[str, tuple[EntryPoint, ...]]:
    """Return the entry points by name, the winner of each name first. Loads none of them.

    The answer is kept until a folder of the import path changes, so that a distribution
    installed later is seen.
    """
    state = (importlib.metadata.entry_points, *sys.path, *map(_modified, sys.path))
    if state != _FOUND.state:
        by_name: dict[str, dict[tuple[str, str], EntryPoint]] = {}
        for point in _announced():
            # The same distribution may be seen twice, once through each of two import paths.
            by_name.setdefault(point.name, {}).setdefault((_dist(point), point.value), point)
        _FOUND.by_name = {
            name: tuple(sorted(points.values(), key=_dist)) for name, points in by_name.items()
        }
        _FOUND.state = state
    return _FOUND.by_name


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


def load(point: EntryPoint) -> CompilerFn:
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


def why_not(point: EntryPoint) -> str | None:
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
