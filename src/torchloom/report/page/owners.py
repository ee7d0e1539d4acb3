"""Which optimizer sees which parameters whole, on which rank, why, and what that sends in a step."""

from __future__ import annotations

from torchloom.records import Session
from torchloom.records.summary import count
from torchloom.report.page.elements import Node, el, section, size, table, told
from torchloom.report.page.run_time import rows_of

_SHOWN = 40


def run_owners(session: Session) -> Node:
    """Return a table of optimizers, and one of the parameters that they see whole; nothing where none does."""
    rows = rows_of(session, "OwnersChosen", "num_divided", "step_bytes")
    newest = {
        str(d.get("optimizer")): d for d in rows if isinstance(d.get("parameters"), (list, tuple))
    }
    whole = [
        [str(name), " x ".join(map(str, shape)), str(kind), str(rank)]
        for kind, d in newest.items()
        for name, shape, rank in _rows(d["parameters"])
    ]
    if not whole:
        return None
    optimizers = [
        [
            kind,
            count(len(d["parameters"]), "parameter"),
            count(d["num_divided"], "parameter"),
            size(d["step_bytes"]),
            str(d.get("reason")),
        ]
        for kind, d in newest.items()
    ]
    more = f" The first {_SHOWN} of {len(whole)} are shown." if len(whole) > _SHOWN else ""
    return section(
        "Parameters that one rank steps for all",
        table(
            ["Optimizer", "Seen whole", "Stepped as shards", "#Sent in a step, all ranks", "Why"],
            optimizers,
        ),
        told(
            f"Before a step each gradient and weight travels to its owner, and the weight back after it.{more}"
        ),
        el("div", table(["Parameter", "Shape", "Optimizer", "Rank"], whole[:_SHOWN])),
    )


def _rows(values: object) -> list[tuple[object, list[object], object]]:
    """Return those of an event's parameters that are not damaged."""
    found = values if isinstance(values, (list, tuple)) else []
    return [
        (each[0], list(each[1]), each[2])
        for each in found
        if isinstance(each, (list, tuple)) and len(each) == 3 and isinstance(each[1], (list, tuple))
    ]
