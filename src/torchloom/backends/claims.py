"""Who claims a name: registrations of this process, built-ins of torch and torchloom, entry points."""

from __future__ import annotations

import difflib
import threading
from collections.abc import Iterable
from importlib.metadata import EntryPoint

from torchloom._torch.registry import backend_tags, registered_backends
from torchloom.backends import discovery
from torchloom.backends.records import CompilerFn, Origin, Registration, origin_of

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
        return {*REGISTERED, *registered_backends(), *OURS, *discovery.discover()}


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
        points = discovery.discover().get(name, ())
        if found is not None and name not in REGISTERED:
            own = built_in_origin(name, found)
            if own is not None:
                claims.append(own)
            elif not points:
                claims.append(origin_of(found))
        elif name in OURS and name not in REGISTERED:
            claims.append(Origin("built-in", "torchloom"))
        return [*claims, *(discovery.origin_of_point(p) for p in points if not _is_ours(p))]


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
