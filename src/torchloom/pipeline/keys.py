"""The keys under which woven graphs are cached: hashes of all that shapes them, equal on all ranks."""

from __future__ import annotations

import dataclasses
import hashlib
from functools import cache
from pathlib import Path

import torchloom.passes
from torchloom._torch.inductor import hash_files
from torchloom.backends.graphs import name_of
from torchloom.graph import GraphPass, PassContext
from torchloom.pipeline.identity import identity_of
from torchloom.pipeline.setup import Setup

_PER_GRAPH = ("choices", "params", "bound_options")
"""Fields of the context that are not facts of the session."""


def key_of(setup: Setup, context: PassContext, planned: str) -> str:
    """Return a hash of all that woven graphs depend on besides the captured graph.

    Args:
        setup: the session.
        context: what passes may know.
        planned: what plans depend on.
    """
    parts = [
        f"{each.name}/{each.memory_budget_bytes}/{each.options}"
        if is_built_in(each)
        else identity_of(each).text
        for each in setup.passes
    ]
    text = f"{_sources_digest()}|{parts}|{context.key()}|{planned}|{setup.regions}"
    return hashlib.blake2b(text.encode(), digest_size=32).hexdigest()


def common_key_of(setup: Setup, context: PassContext) -> str:
    """Return a hash of all facts of the session that woven graphs depend on."""
    return key_of(setup, context, "" if setup.planner is None else setup.planner.common_key)


def facts_of(setup: Setup, context: PassContext) -> dict[str, object]:
    """Return the facts that `common_key_of` hashes, by name, so that ranks can name those that differ."""
    foreign = [each for each in setup.passes if not is_built_in(each)]
    settings = [f.name for f in dataclasses.fields(context) if f.name not in _PER_GRAPH]
    return {
        "passes": [each.name for each in setup.passes],
        "backend": name_of(setup.backend),
        "strict": setup.strict,
        "regions": setup.regions,
        **{f"pass {each.name}": identity_of(each).text for each in foreign},
        **{f"setting {name}": str(getattr(context, name)) for name in settings},
        **{
            f"option {name} of pass {each.name}": repr(value)
            for each in setup.passes
            for name, value in each.options
        },
        "everything else": common_key_of(setup, context),
    }


def is_built_in(each: GraphPass) -> bool:
    """Say whether a pass is one of torchloom's: its source is part of the key."""
    known = torchloom.passes.PASSES.get(each.name)
    return known is not None and known.fn is each.fn


_SHAPING = (
    *("_torch", "backends", "capture", "costs", "deepcompile", "graph", "memory", "ops", "passes"),
    *("pieces", "pipeline", "plan", "races", "regions"),
)
"""Rooms whose code shapes woven graphs: they choose what backward computes again, split, rewrite, and plan."""


@cache
def _sources_digest() -> str:
    """Computed once, because the process runs the source that it imported."""
    return hash_files(_sources()).hex()


def _sources() -> tuple[str, ...]:
    """Source files of everything that shapes a woven graph: whole rooms, so that no new file is forgotten."""
    house = Path(torchloom.__path__[0])
    folders = [house / room for room in _SHAPING]
    return tuple(sorted(str(path) for folder in folders for path in folder.rglob("*.py")))
