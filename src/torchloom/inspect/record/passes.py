"""What torchloom did to an entry's graphs, from its events: passes, and bodies that stand for equal layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torchloom import events
from torchloom.inspect.record.compiles import Compile, CompileKey
from torchloom.records import Artifact, PassRun


def add_passes_and_bodies(
    compiles: Mapping[CompileKey, Compile], heard: Sequence[events.Event]
) -> None:
    """Add each pass and each body to the entry of the compile that it was a part of.

    After a reset Dynamo counts compiles from 0 again: the latest compile of an id gets them.
    """
    for event in heard:
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
