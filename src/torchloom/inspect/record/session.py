"""Builds the record of one watch from what its hooks collected: completed entries, events, plans and peaks."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist

import torchloom
from torchloom import envs, events
from torchloom._torch import introspect
from torchloom.files import from_plain
from torchloom.inspect.collected import Collected, Rewriting
from torchloom.inspect.live.guards import guards_of, resolve_lines
from torchloom.inspect.live.rewritten import continuation, graph_name
from torchloom.inspect.pseudo import bytecode_listing, pseudo_source
from torchloom.inspect.record.compiles import Compile, CompileKey, user_stack
from torchloom.inspect.record.functions import functions_of
from torchloom.inspect.record.recompiles import explain_recompiles, name_sources
from torchloom.inspect.record.rows import RowReader
from torchloom.inspect.wording.english import source_in_words, value_in_words, without_addresses
from torchloom.inspect.wording.hider import Hider, Words
from torchloom.records import (
    Artifact,
    EventRow,
    GraphPlan,
    Guard,
    PassRun,
    Peak,
    Session,
    Standing,
)


def describe_process(session: Session) -> None:
    """Write into a record which process made it.

    Raises:
        ConfigError: a launcher's variables make no sense.
    """
    session.torchloom, session.torch = torchloom.__version__, torch.__version__
    session.python, session.platform = platform.python_version(), platform.platform()
    session.device = (
        torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    )
    session.config = introspect.config_changes()
    if dist.is_available() and dist.is_initialized():
        session.rank, session.world_size = dist.get_rank(), dist.get_world_size()
    else:
        launch = envs.launch()
        session.rank, session.world_size = launch.rank, launch.world_size


def build_session(collected: Collected) -> Session:
    """Return the record of one watch."""
    hider = Hider(_words_of(collected))
    reader = RowReader(hider)
    for rewriting in collected.rewritings:
        reader.rewriting(rewriting)
    for row in collected.rows:
        reader.row(row)
    session = Session(num_resets=collected.num_resets, orphans=reader.orphans)
    _complete_entries(session, reader, hider, collected.num_hits)
    note_events(session, reader.compiles, collected.events)
    session.functions = functions_of(reader.compiles, collected.eager)
    session.num_unknown_eager_calls = collected.eager.num_unknown
    hider.in_record(session)
    return session


def _words_of(collected: Collected) -> Words:
    """Return the words in the source of all code that was traced."""
    codes = [code for each in collected.rewritings for code in (each.original, *each.traced)]
    codes += [row.code for row in collected.rows if row.code is not None]
    return Words(codes)


def _complete_entries(
    session: Session, reader: RowReader, hider: Hider, num_hits: Mapping[str, int]
) -> None:
    for compile_ in reader.compiles.values():
        try:
            complete_entry(compile_, reader, hider, num_hits)
        except Exception as error:  # noqa: BLE001, PERF203  any bug of ours: one entry must not hide the others
            where = f"entry {compile_.entry.compile_id} is incomplete"
            session.orphans.append(f"{where}: {type(error).__name__}")
    for compile_ in reader.compiles.values():
        explain_recompiles(compile_.entry)
        name_sources(compile_)


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
        name = source_in_words(guard.source).removeprefix("argument ")
        if name.startswith("self") or "_modules" in guard.source or "_parameters" in guard.source:
            continue  # the module is the same for all entries
        said, shape = value_in_words(guard), sizes.get(guard.source)
        if guard.kind == "TENSOR_MATCH":
            inner = ", ".join(map(str, shape or ()))
            found[name] = said if shape is None else _SHAPE.sub(f"of shape [{inner}]", said)
        elif said:
            found.setdefault(name, said)
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
    resolve_lines(entry.guards, compile_.code)
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
    held = introspect.cache_entries(rewritten.original)
    live = next((each for each in held if each.code is rewritten.transformed), None)
    if live is not None:
        entry.backend = introspect.backend_name(live)
        entry.guards = guards_of(live.guard_manager, hider.check)
        if introspect.is_invalid(live.guard_manager):
            entry.status = "invalidated: what it guards on is gone"
    elif not entry.status.startswith("failed"):
        # torch drops the entries of modules that are freed (pytorch/pytorch#117045).
        entry.status = "invalidated: its module or closure is gone, or it was reset"


def _disassembled(code: CodeType, original: CodeType) -> str:
    return without_addresses(bytecode_listing(code, original))


_ELSEWHERE = ("before", "after", "curve", "at_s", "kind")
"""Fields of events that the row of an event leaves out: the texts of graphs stand in the entries already."""


def note_events(
    session: Session, compiles: Mapping[CompileKey, Compile], collected: Sequence[events.Event]
) -> None:
    """Add what torchloom told: plans, peaks and standing memory, all else as events, passes and bodies to entries.

    After a reset Dynamo counts compiles from 0 again: the latest compile of an id gets its passes.

    Args:
        session: gets plans, peaks, standing memory and events.
        compiles: by key; their entries get passes and bodies.
        collected: what was told, in order.
    """
    latest = {compiles[key].entry.compile_id: compiles[key].entry for key in sorted(compiles)}
    for event in collected:
        facts = event.to_dict()
        if isinstance(event, events.GraphPlanned):
            session.plans.append(_record_of(GraphPlan, {**event.plan, **facts}))
        elif isinstance(event, events.PeakFound):
            contents: Mapping[str, Any] = event.contents
            alive = _alive(contents["groups"])
            session.peaks.append(_record_of(Peak, {**contents, **facts, "alive": alive}))
        elif isinstance(event, events.StandingFound):
            found = _record_of(Standing, {**facts, "parts": _alive(event.parts)})
            if found not in session.standing:  # emitted again with each graph
                session.standing.append(found)
        else:
            data = {name: value for name, value in facts.items() if name not in _ELSEWHERE}
            row = EventRow(kind=type(event).__name__, at_s=event.at_s, data=data)
            session.events.append(row)
        entry = latest.get(str(facts.get("compile_id") or "").strip("[]"))
        if entry and isinstance(event, events.PassRan):
            entry.passes.append(_record_of(PassRun, facts))
        elif entry and isinstance(event, events.BodyWoven):
            entry.artifacts.append(_body(event))


def _record_of(of: type[Any], facts: Mapping[str, Any]) -> Any:
    """Return the record that an event tells of, which has the same names."""
    return from_plain(of, json.loads(json.dumps(facts, default=list)))


def _body(event: events.BodyWoven) -> Artifact:
    named = [layer for layer in event.layers if layer]
    between = f" ({named[0]} ... {named[-1]})" if named else ""
    title = f"{event.name} {event.half}: layer x {len(event.layers)}{between}"
    return Artifact(kind="body", title=title, text=event.text)


def _alive(parts: Iterable[Sequence[Any]]) -> list[dict[str, Any]]:
    names = ("kind", "layer", "num_bytes", "num_values")
    return [dict(zip(names, each, strict=False)) for each in parts]
