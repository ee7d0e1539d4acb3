"""Builds the record of one watch from what its hooks collected."""

from __future__ import annotations

from typing import Any

from torchloom import events
from torchloom.inspect.heard import Heard
from torchloom.inspect.record.compiles import Compile
from torchloom.inspect.record.entries import complete_entry
from torchloom.inspect.record.functions import functions_of
from torchloom.inspect.record.memory import MEMORY_EVENTS, note_memory
from torchloom.inspect.record.passes import add_passes_and_bodies
from torchloom.inspect.record.recompile_outcomes import explain_recompiles
from torchloom.inspect.record.rows import RowReader
from torchloom.inspect.record.source_names import name_sources
from torchloom.inspect.wording.hider import Hider
from torchloom.inspect.wording.vocabulary import Words
from torchloom.records import EventRow, Session


def build_session(heard: Heard) -> Session:
    """Return the record of one watch."""
    hider = Hider(_words_of(heard))
    reader = RowReader(hider)
    for rewriting in heard.rewritings:
        reader.rewriting(rewriting)
    for row in heard.rows:
        reader.row(row)
    session = Session(num_resets=heard.num_resets, orphans=reader.orphans, unknown=reader.unknown)
    _complete_entries(session, reader, hider, heard)
    add_passes_and_bodies(reader.compiles, heard.events)
    note_memory(session, heard.events)
    session.functions = functions_of(reader.compiles, reader.places, heard.eager)
    session.num_unknown_eager_calls = heard.eager.num_unknown
    session.events = [
        EventRow(kind=type(event).__name__, at_s=event.at_s, data=_plain(event))
        for event in heard.events
        if not isinstance(event, MEMORY_EVENTS)
    ]
    hider.in_record(session)
    return session


def _words_of(heard: Heard) -> Words:
    """Return the words in the source of all code that was traced."""
    codes = [code for each in heard.rewritings for code in (each.original, *each.traced)]
    codes += [row.code for row in heard.rows if row.code is not None]
    return Words(codes)


def _complete_entries(session: Session, reader: RowReader, hider: Hider, heard: Heard) -> None:
    for compile_ in reader.compiles.values():
        failure = _why_incomplete(compile_, reader, hider, heard)
        if failure:
            session.orphans.append(f"entry {compile_.entry.compile_id} is incomplete: {failure}")
    for compile_ in reader.compiles.values():
        explain_recompiles(compile_.entry)
        name_sources(compile_)


def _why_incomplete(compile_: Compile, reader: RowReader, hider: Hider, heard: Heard) -> str:
    """Complete an entry; return the error of one that cannot be read, or nothing."""
    try:
        complete_entry(compile_, reader, hider, heard.num_hits)
    except Exception as error:  # noqa: BLE001  any bug of ours: one entry must not hide the others
        return type(error).__name__
    return ""


def _plain(event: events.Event) -> dict[str, Any]:
    """Return an event as data; the texts of graphs stand in the entries already."""
    data = event.to_dict()
    for name in ("before", "after", "curve", "at_s", "kind"):
        data.pop(name, None)
    return data
