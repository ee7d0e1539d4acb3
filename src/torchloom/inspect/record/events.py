"""What torchloom's own events say: passes and bodies of an entry, plans, peaks and standing memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchloom import events
from torchloom.inspect.record.compiles import Compile, CompileKey
from torchloom.records import Alive, Artifact, GraphPlan, PassRun, Peak, Session, Standing
from torchloom.records.io import from_plain


def add_passes_and_bodies(
    compiles: Mapping[CompileKey, Compile], collected: Sequence[events.Event]
) -> None:
    """Add each pass and each body to the entry of the compile that it was a part of.

    After a reset Dynamo counts compiles from 0 again: the latest compile of an id gets them.
    """
    for event in collected:
        if not isinstance(event, events.PassRan | events.BodyWoven) or event.compile_id is None:
            continue
        parts = event.compile_id.strip("[]").split("/")
        if len(parts) != 2 or not all(part.isdigit() for part in parts):
            continue
        candidates = [key for key in compiles if key[1:] == (int(parts[0]), int(parts[1]))]
        if not candidates:
            continue
        entry = compiles[max(candidates)].entry
        if isinstance(event, events.PassRan):
            entry.passes.append(_pass_run(event))
        else:
            entry.artifacts.append(_body(event))


def _body(event: events.BodyWoven) -> Artifact:
    named = [layer for layer in event.layers if layer]
    between = f" ({named[0]} ... {named[-1]})" if named else ""
    return Artifact(
        kind="body",
        title=f"{event.name} {event.half}: layer x {len(event.layers)}{between}",
        text=event.text,
        num_bytes=len(event.text.encode()),
    )


def _pass_run(event: events.PassRan) -> PassRun:
    return PassRun(
        name=event.name,
        stage=event.stage,
        graph=event.graph,
        num_edits=event.num_edits,
        duration_s=event.duration_s,
        before=event.before,
        after=event.after,
        curve=None if event.curve is None else list(event.curve),
    )


MEMORY_EVENTS = (events.GraphPlanned, events.PeakFound, events.StandingFound)
"""Kinds that have records of their own, and are left out of the list of events."""


def note_memory(session: Session, collected: Sequence[events.Event]) -> None:
    """Add plans, peaks and standing memory to a record."""
    for event in collected:
        if isinstance(event, events.GraphPlanned):
            session.plans.append(_plan(event))
        elif isinstance(event, events.PeakFound):
            session.peaks.append(_peak(event.graph, event.contents))
        elif isinstance(event, events.StandingFound):
            found = _standing(event)
            if found not in session.standing:  # emitted again with each graph
                session.standing.append(found)


def _plan(event: events.GraphPlanned) -> GraphPlan:
    plan: Mapping[str, Any] = event.plan
    facts = {
        **plan,
        "graph": event.graph,
        "planning_s": event.planning_s,
        "num_tries": event.num_tries,
        "decisions": list(plan["decisions"]),
        "resident": dict(plan["resident"]),
        "pieces": dict(plan["pieces"]),
    }
    return from_plain(GraphPlan, facts)


def _peak(graph: str, contents: Mapping[str, Any]) -> Peak:
    facts = {name: contents[name] for name in ("phase", "node", "layer", "peak_bytes")}
    alive = [
        Alive(kind=kind, layer=layer, num_bytes=num_bytes, num_values=num_values)
        for kind, layer, num_bytes, num_values in contents["groups"]
    ]
    return Peak(graph=graph, alive=alive, **facts)


def _standing(event: events.StandingFound) -> Standing:
    parts = [Alive(kind=kind, layer=layer, num_bytes=size) for kind, layer, size in event.parts]
    return Standing(
        budget_bytes=event.budget_bytes,
        base_bytes=event.base_bytes,
        step_bytes=event.step_bytes,
        parts=parts,
    )
