"""`torchloom.explain`: run a function once under a watch and report its graphs, breaks and guards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from torchloom.inspect.api.watch import Watch
from torchloom.inspect.live.target import target_of, twin_of
from torchloom.records import Break, Session


class Explanation(NamedTuple):
    """Counts and reasons for one call."""

    num_graphs: int
    num_breaks: int
    num_guards: int
    breaks: tuple[Break, ...]
    record: Session

    def __str__(self) -> str:
        from torchloom.records.summary import summary

        return summary(self.record)


def explain(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Explanation:
    """Compile and run a function once, and report what was captured.

    Compiles a copy of the function with a backend that keeps the graphs: the entries that torch.compile
    holds for `fn` stay, and nothing is reset. Counts the graphs that the backend received, and the
    distinct places where a graph ended.

    Args:
        fn: a function, a module, or what torch.compile returned.
        args: as for a call of `fn`. The function runs, effects included.
        kwargs: as for a call of `fn`.

    Raises:
        InspectError: there is no Python function behind `fn`.

    Example:
        >>> explain(lambda x: x + 1, torch.ones(2)).num_breaks
        0
    """
    target = target_of(fn)
    graphs: list[torch.fx.GraphModule] = []

    def keep(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        graphs.append(gm)
        return gm.forward

    # Dynamo keeps entries by code object: one of its own keeps the function's entries out of this.
    twin = twin_of(target.fn)
    with Watch() as watch:
        torch.compile(twin, backend=keep)(*target.leading, *args, **{**target.keywords, **kwargs})
    record = watch.record
    breaks = tuple(record.breaks())
    return Explanation(
        num_graphs=len(graphs),
        num_breaks=len(breaks),
        num_guards=sum(len(entry.guards) for entry in record.entries()),
        breaks=breaks,
        record=record,
    )
