"""The order in which chunks of optimizer state pass through slots of device memory.

    one slot     load 0, step 0, store 0 | load 1, step 1, store 1 | ...
    two slots    load 1 runs beside step 0, and beside store 0 if the link carries both directions

A slot is filled again when the store that read it is done. The order is plain data: the stream
executes it, and the race checker proves it.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from torchloom.races import Event, Start, TransferSchedule, Use, WaitFor

Kind = Literal["load", "await load", "step", "store", "await store"]


class Action(NamedTuple):
    """One thing to do for one chunk."""

    kind: Kind
    chunk: int


def stream_actions(num_chunks: int, num_slots: int) -> tuple[Action, ...]:
    """Return what to do, in order; chunk `c` uses slot `c % num_slots`.

    Example:
        >>> [f"{kind} {chunk}" for kind, chunk in stream_actions(2, 1)][:4]
        ['load 0', 'await load 0', 'step 0', 'store 0']
    """
    actions: list[Action] = []
    stored = 0
    for chunk in range(num_chunks):
        # Fill every slot that this chunk, or one after it, may have.
        first = 0 if chunk == 0 else chunk + num_slots - 1
        for ahead in range(first, min(chunk + num_slots, num_chunks)):
            if ahead >= num_slots:
                actions.append(Action("await store", ahead - num_slots))
                stored += 1
            actions.append(Action("load", ahead))
        actions += [Action("await load", chunk), Action("step", chunk), Action("store", chunk)]
    return (*actions, *(Action("await store", chunk) for chunk in range(stored, num_chunks)))


def schedule_of_actions(actions: tuple[Action, ...], num_slots: int) -> TransferSchedule:
    """Return the actions as reads and writes of slots and host memory, for `find_races`."""
    places: dict[str, str] = {}
    events: list[Event] = []
    for kind, c in actions:
        host, old, new, kept = (f"{name} {c}" for name in ("host", "old", "new", "kept"))
        places.update({old: f"slot {c % num_slots}", new: f"slot {c % num_slots}", kept: host})
        event: dict[Kind, Event] = {
            "load": Start(f"load {c}", "to_device", frozenset({host}), frozenset({old})),
            "await load": WaitFor(f"load {c}"),
            "step": Use(f"step {c}", frozenset({old}), frozenset({new})),
            "store": Start(f"store {c}", "to_host", frozenset({new}), frozenset({kept})),
            "await store": WaitFor(f"store {c}"),
        }
        events.append(event[kind])
    chunks = {c for _, c in actions}
    events.append(Use("next step", reads=frozenset(f"kept {c}" for c in chunks)))
    return TransferSchedule(tuple(events), frozenset(f"host {c}" for c in chunks), places)
