"""The lists of passes that a ZeRO stage runs, as literals, and how a user's list becomes one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence

from torchloom.errors import PassOrderError
from torchloom.graph import GraphPass
from torchloom.passes import PASSES

PRESETS: dict[int, tuple[str, ...]] = {
    0: ("dedupe_gathers", "elide_copies", "place", "bucket", "prefetch"),
    1: ("dedupe_gathers", "elide_copies", "zero1", "place", "bucket", "prefetch"),
    2: ("dedupe_gathers", "elide_copies", "zero2", "place", "bucket", "prefetch"),
    3: ("dedupe_gathers", "elide_copies", "zero3", "place", "bucket", "prefetch"),
}

# Names that DeepSpeed's schedules and config files use for what these passes do.
ALIASES: dict[str, str] = {
    "z1": "zero1",
    "z2": "zero2",
    "z3": "zero3",
    "zero1_compile": "zero1",
    "zero2_compile": "zero2",
    "zero3_compile": "zero3",
}


# Passes that a setting adds to a preset, each with the pass that it stands before; None is the end.
EXTRAS: tuple[tuple[str, str | None], ...] = (
    ("offload_parameters", "place"),
    ("offload_activation", "place"),
    ("free_activation", "place"),
    ("overlap_copies", None),
    ("free_saved", None),
)


def preset(stage: int, extras: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the names of a stage's passes, with those that settings ask for in their places."""
    names, wanted = list(PRESETS[stage]), set(extras)
    for name, before in EXTRAS:
        if name in wanted:
            names.insert(len(names) if before is None else names.index(before), name)
    return tuple(names)


def resolve_passes(
    stage: int,
    asked: Sequence[str | GraphPass] | None = None,
    disabled: Iterable[str] = (),
    known: Mapping[str, GraphPass] = PASSES,
    extras: Iterable[str] = (),
) -> tuple[GraphPass, ...]:
    """Turn a user's choice into a checked list of passes.

    Args:
        stage: ZeRO stage, which chooses the preset.
        asked: names or passes to run instead of the preset.
        disabled: names to leave out.
        known: passes by name.
        extras: names that settings add to the preset, see `EXTRAS`; a list of one's own is complete.

    Raises:
        PassOrderError: an unknown name, a missing requirement, or a conflict.
    """
    chosen = [
        each if isinstance(each, GraphPass) else _lookup(each, known)
        for each in (preset(stage, extras) if asked is None else asked)
    ]
    without = {_lookup(name, known).name for name in disabled}
    passes = tuple(each for each in chosen if each.name not in without)
    _check_order(passes, known)
    return passes


def _lookup(name: str, known: Mapping[str, GraphPass]) -> GraphPass:
    found = known.get(ALIASES.get(name, name))
    if found is None:
        near = difflib.get_close_matches(name, [*known, *ALIASES], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise PassOrderError(f"unknown pass {name!r}{hint} Known passes: {', '.join(known)}")
    return found


def _check_order(passes: Sequence[GraphPass], known: Mapping[str, GraphPass]) -> None:
    provided: set[str] = set()
    names: list[str] = []
    stage_seen = "joint"
    for each in passes:
        missing = each.requires - provided
        if missing:
            need = ", ".join(sorted(missing))
            givers = [p.name for p in known.values() if p.provides & missing]
            raise PassOrderError(
                f"pass {each.name!r} needs {need!r}, which no earlier pass provides: put "
                f"{' or '.join(map(repr, givers)) or 'a pass that provides it'} before it, or "
                f"disable {each.name!r} (so far: {', '.join(names) or 'nothing'})"
            )
        clash = sorted(p.name for p in passes if p.name in each.conflicts_with and p is not each)
        if clash:
            raise PassOrderError(
                f"passes {each.name!r} and {clash[0]!r} exclude each other: drop one"
            )
        if stage_seen == "lowered" and each.stage == "joint":
            raise PassOrderError(
                f"pass {each.name!r} works on the joint graph and must come before "
                f"{names[-1]!r}, which works on the split graphs"
            )
        if each.name in names:
            raise PassOrderError(f"pass {each.name!r} is listed twice: keep one")
        stage_seen = each.stage
        provided |= each.provides
        names.append(each.name)
