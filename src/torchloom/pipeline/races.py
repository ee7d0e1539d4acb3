"""Check after each pass that no transfer of a graph races with its other nodes, and that each gradient is reduced once."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from torchloom.errors import PassError
from torchloom.graph import graph_text
from torchloom.races import (
    Reductions,
    find_races,
    find_unreduced,
    reductions_of,
    schedule_of,
)
from torchloom.races.check import Kind

_SAID: Mapping[Kind, str] = {
    "read before arrival": "{at} reads {subject} before transfer {other} has arrived: wait for it first",
    "written under way": "{at} writes {subject}, which transfer {other} may still use: wait for it first",
    "freed under way": "the memory of {subject} is given back behind {at} while transfer {other} may still use it: wait "
    "for it first, and name its inputs in the wait",
    "used after free": "{at} uses {subject} after its memory was given back: free it once, behind all that use it",
    "read before written": "{at} reads {subject}, which nothing has written: write it first",
    "waited for without start": "{at} waits for no transfer: name all results of one start, its inputs and its handle, "
    "once and behind it",
    "never waited for": "transfer {subject} is never waited for: wait for it once",
}


def check_races(
    gm: fx.GraphModule, name: str, after: str, before: Reductions | None = None
) -> None:
    """Prove that no transfer of a graph can race with anything, and that its gradients are reduced as they were.

    Args:
        gm: the graph.
        name: of the graph, for the message.
        after: the pass that left the graph so, for the message.
        before: the reductions of the graph before the first pass; None: they are not checked.

    Raises:
        PassError: the order of the graph leaves a race open, or a gradient is not reduced once and returned.
    """
    schedule = schedule_of(gm.graph)
    races = find_races(schedule)
    lost = None
    if before is not None and before.reduced:
        lost = find_unreduced(before, reductions_of(schedule, before))
    if not races and lost is None:
        return
    lines = {node.name: line for line, node in enumerate(gm.graph.nodes, start=1)}

    def told(node: str) -> str:
        line = f" (line {lines[node]})" if node in lines else ""
        return f"{'return' if node == 'output' else '%' + node}{line}"

    if races:
        race = races[0]
        at = "" if race.at == len(schedule.events) else told(schedule.issued_by[race.at])
        subject, other = (told(each) if each else "" for each in (race.subject, race.other))
        what = _SAID[race.kind].format(at=at, subject=subject, other=other)
    else:
        assert lost is not None
        way = "returned by" if lost.is_reduced else "reduced exactly once, see"
        what = (
            f"gradient {told(lost.gradient)} of {lost.param!r} is not {way} {told(lost.at)}: reduce it once and return "
            "the result"
        )
    raise PassError(
        f"graph {name!r} is wrong after pass {after!r}: {what}, or leave the pass out with compile.disable_passes\n"
        f"{graph_text(gm.graph)}"
    )
