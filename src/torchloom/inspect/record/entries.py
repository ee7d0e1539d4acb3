"""Completes an entry from the code that Dynamo wrote and from the live entry, while torch holds it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import CodeType
from typing import Any

from torchloom._torch import introspect
from torchloom.inspect.collected import Rewriting
from torchloom.inspect.live.guards import guards_of
from torchloom.inspect.live.rewritten import continuation, graph_name
from torchloom.inspect.pseudo import bytecode_listing, pseudo_source
from torchloom.inspect.record.compiles import Compile, user_stack
from torchloom.inspect.record.rows import RowReader
from torchloom.inspect.wording.english import source_in_words
from torchloom.inspect.wording.hider import Hider
from torchloom.inspect.wording.scrub import without_addresses
from torchloom.records import Guard

_SHAPE = re.compile(r"of shape \[[^\]]*\]")


def arguments_of(guards: Sequence[Guard], sizes: Mapping[str, Any]) -> dict[str, str]:
    """Return each tensor argument as dtype, shape, device and gradient, others as type or constant.

    Args:
        guards: those of the entry.
        sizes: the shapes of the call, by source.

    Example:
        >>> guard = Guard(
        ...     source="L['x']",
        ...     kind="TENSOR_MATCH",
        ...     text="",
        ...     english="argument x is a float32 tensor of shape [any, 4] without grad",
        ... )
        >>> arguments_of([guard], {"L['x']": [8, 4]})
        {'x': 'a float32 tensor of shape [8, 4] without grad'}
    """
    found: dict[str, str] = {}
    for guard in guards:
        if not guard.source.startswith("L[") or ".__" in guard.source:
            continue
        words = source_in_words(guard.source)
        name = words.removeprefix("argument ")
        if name.startswith("self") or "_modules" in guard.source or "_parameters" in guard.source:
            continue  # the module is the same for all entries
        if guard.kind == "TENSOR_MATCH":
            shape = sizes.get(guard.source)
            what = guard.english.removeprefix(f"{words} is ")
            if shape is not None:
                inner = ", ".join(str(size) for size in shape)
                what = _SHAPE.sub(f"of shape [{inner}]", what)
            found[name] = what
        elif guard.kind in ("EQUALS_MATCH", "CONSTANT_MATCH", "NONE_MATCH", "BOOL_MATCH"):
            found.setdefault(name, guard.english.removeprefix(f"{words} ").removeprefix("is "))
        elif guard.kind == "TYPE_MATCH":
            found.setdefault(name, guard.english.removeprefix(f"{words} is "))
    return found


def complete_entry(
    compile_: Compile, reader: RowReader, hider: Hider, num_hits: Mapping[str, int]
) -> None:
    """Add code, guards, hits, stack, arguments and phases to the entry of a compile.

    Args:
        compile_: its entry is completed in place.
        reader: has read the trace: knows files and phases.
        hider: notes the keys that guards name.
        num_hits: calls by the global name of an entry's graph.
    """
    entry = compile_.entry
    if compile_.rewritten is not None:
        _add_code(compile_, compile_.rewritten, num_hits)
        _add_live_state(compile_, compile_.rewritten, hider)
    reader.places.add_user_lines(compile_)
    entry.stack = user_stack(compile_)
    entry.trigger = arguments_of(entry.guards, compile_.sizes)
    entry.spans = reader.spans.of(entry.compile_id, entry.epoch)


def _add_code(compile_: Compile, rewritten: Rewriting, num_hits: Mapping[str, int]) -> None:
    entry, original = compile_.entry, rewritten.original
    entry.pseudo_source = pseudo_source(rewritten.transformed, original.co_name, original=original)
    entry.bytecode = _disassembled(rewritten.transformed, original)
    entry.original_bytecode = _disassembled(original, original)
    entry.continuations = [continuation(*each) for each in rewritten.continuations]
    entry.num_hits = num_hits.get(graph_name(rewritten.transformed) or "", 0)


def _add_live_state(compile_: Compile, rewritten: Rewriting, hider: Hider) -> None:
    entry = compile_.entry
    live = _live(rewritten)
    if live is not None:
        entry.backend = introspect.backend_name(live)
        entry.guards = guards_of(live.guard_manager, hider)
        if introspect.is_invalid(live.guard_manager):
            entry.status = "invalidated: what it guards on is gone"
    elif not entry.status.startswith("failed"):
        # torch drops the entries of modules that are freed (pytorch/pytorch#117045).
        entry.status = "invalidated: its module or closure is gone, or it was reset"


def _live(rewritten: Rewriting) -> introspect.CacheEntry | None:
    """Return torch's entry for a rewritten code object, None when it is gone."""
    held = introspect.cache_entries(rewritten.original)
    return next((entry for entry in held if entry.code is rewritten.transformed), None)


def _disassembled(code: CodeType, original: CodeType) -> str:
    return without_addresses(bytecode_listing(code, original))
