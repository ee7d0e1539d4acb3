"""Builds the record of one watch from what its hooks collected."""

from __future__ import annotations

import platform
from typing import Any

import torch
import torch.distributed as dist

import torchloom
from torchloom import envs, events
from torchloom._torch import introspect
from torchloom.inspect.collected import Collected
from torchloom.inspect.record.advice import name_sources
from torchloom.inspect.record.compiles import Compile
from torchloom.inspect.record.entries import complete_entry
from torchloom.inspect.record.events import MEMORY_EVENTS, add_passes_and_bodies, note_memory
from torchloom.inspect.record.functions import functions_of
from torchloom.inspect.record.recompiles import explain_recompiles
from torchloom.inspect.record.rows import RowReader
from torchloom.inspect.wording.hider import Hider, Words
from torchloom.records import EventRow, Session


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
    _complete_entries(session, reader, hider, collected)
    add_passes_and_bodies(reader.compiles, collected.events)
    note_memory(session, collected.events)
    session.functions = functions_of(reader.compiles, reader.places, collected.eager)
    session.num_unknown_eager_calls = collected.eager.num_unknown
    session.events = [
        EventRow(kind=type(event).__name__, at_s=event.at_s, data=_plain(event))
        for event in collected.events
        if not isinstance(event, MEMORY_EVENTS)
    ]
    hider.in_record(session)
    return session


def _words_of(collected: Collected) -> Words:
    """Return the words in the source of all code that was traced."""
    codes = [code for each in collected.rewritings for code in (each.original, *each.traced)]
    codes += [row.code for row in collected.rows if row.code is not None]
    return Words(codes)


def _complete_entries(
    session: Session, reader: RowReader, hider: Hider, collected: Collected
) -> None:
    for compile_ in reader.compiles.values():
        failure = _why_incomplete(compile_, reader, hider, collected)
        if failure:
            session.orphans.append(f"entry {compile_.entry.compile_id} is incomplete: {failure}")
    for compile_ in reader.compiles.values():
        explain_recompiles(compile_.entry)
        name_sources(compile_)


def _why_incomplete(
    compile_: Compile, reader: RowReader, hider: Hider, collected: Collected
) -> str:
    """Complete an entry; return the error of one that cannot be read, or nothing."""
    try:
        complete_entry(compile_, reader, hider, collected.num_hits)
    except Exception as error:  # noqa: BLE001  any bug of ours: one entry must not hide the others
        return type(error).__name__
    return ""


def _plain(event: events.Event) -> dict[str, Any]:
    """Return an event as data; the texts of graphs stand in the entries already."""
    data = event.to_dict()
    for name in ("before", "after", "curve", "at_s", "kind"):
        data.pop(name, None)
    return data
