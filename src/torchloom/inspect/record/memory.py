"""Turns events about memory and plans into records: standing memory, peaks, plans."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torchloom import events
from torchloom.records import Alive, Decision, GraphPlan, Peak, Session, Standing

MEMORY_EVENTS = (events.GraphPlanned, events.PeakFound, events.StandingFound)
"""Kinds that have records of their own, and are left out of the list of events."""


def note_memory(session: Session, heard: Sequence[events.Event]) -> None:
    """Add plans, peaks and standing memory to a record."""
    for event in heard:
        if isinstance(event, events.GraphPlanned):
            session.plans.append(_plan(event))
        elif isinstance(event, events.PeakFound):
            session.peaks.append(_peak(event.graph, event.contents))
        elif isinstance(event, events.StandingFound):
            found = _standing(event)
            if found not in session.standing:  # emitted again with each graph
                session.standing.append(found)


def _plan(event: events.GraphPlanned) -> GraphPlan:
    known = {each.name for each in dataclasses.fields(GraphPlan)} & event.plan.keys()
    facts: dict[str, Any] = {name: event.plan[name] for name in known}
    fields = {each.name for each in dataclasses.fields(Decision)}
    facts["decisions"] = [
        Decision(**{name: each[name] for name in fields}) for each in facts["decisions"]
    ]
    facts.update(
        graph=event.graph,
        planning_s=event.planning_s,
        num_tries=event.num_tries,
        resident=dict(facts["resident"]),
        pieces=dict(facts["pieces"]),
    )
    return GraphPlan(**facts)


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
