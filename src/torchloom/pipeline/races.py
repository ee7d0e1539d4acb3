"""Check, after all passes, that no transfer of a woven graph races with its other nodes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from torchloom import ops
from torchloom.errors import PassError
from torchloom.graph import find, graph_text
from torchloom.races import find_races, schedule_of


def copies_in(graph: fx.Graph) -> bool:
    """Say whether a lowered graph copies between device and host beside compute."""
    return bool(find(graph, ops.offload_start) or find(graph, ops.reload_start))


def check_races(gm: fx.GraphModule, name: str, passes: Sequence[str]) -> None:
    """Prove that no transfer of a lowered graph can race with anything.

    Args:
        gm: the lowered graph.
        name: of the graph, for the message.
        passes: names of the passes that ran, for the message.

    Raises:
        PassError: the order of the graph leaves a race open.
    """
    races = find_races(schedule_of(gm.graph))
    if races:
        told = "\n".join(f"  {race}" for race in races[:10])
        raise PassError(
            f"graph {name!r} would race after the passes {', '.join(passes)}:\n{told}\n"
            "A pass moved a start or a wait too far: leave it out with compile.disable_passes, or "
            f"fix it.\n{graph_text(gm.graph)}"
        )
