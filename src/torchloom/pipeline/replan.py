"""Plan again by measured times: either all ranks compile all graphs of that plan, or all return to the first one.

    compile    each rank compiles a graph by the second plan and tells the others whether that worked. If it
               failed on any rank, all ranks compile this graph and later ones by the figures of the first
               plan; if that fails too, all ranks run the graph eagerly sharded
    boundary   before the next optimizer step the ranks compare once more. If anything has failed, all
               return to the code of the first plan, which they still hold

A plan decides which collectives a graph calls, so all ranks must run the same plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from torchloom.errors import own_error
from torchloom.log import get_logger
from torchloom.pipeline.ragged import Kinds, Texts
from torchloom.plan import PlannerSnapshot

logger = get_logger(__name__)

_OPEN, _FINE = "not compiled yet", ""


@dataclass
class Replan:
    """The progress of a second plan, and the state that returning to the first plan needs.

    Args:
        texts: exchanges one text per rank; all ranks call it in the same order.
        plans: what the planner knew under the first plan.
        kinds: what the ranks had agreed on under it.
        woven: what the session knew of its graphs.
        keep: called once all ranks have compiled the second plan.
    """

    texts: Texts
    plans: PlannerSnapshot
    kinds: Kinds | None
    woven: list[tuple[frozenset[str], frozenset[str]]]
    keep: Callable[[], None]
    is_refused: bool = False
    """Whether all ranks know that the second plan failed on one of them."""
    restarted: set[frozenset[str]] = field(default_factory=set)
    """Parameters of shared graphs that Dynamo is about to capture again."""
    _num_compiled: int = 0
    _own: str = _FINE
    """What has failed on this rank."""

    def compiled(self) -> None:
        """Note that a graph has been compiled."""
        self._num_compiled += 1

    def failed(self, error: Exception) -> None:
        """Record a failure on this rank; the other ranks learn of it at the next comparison."""
        cause = own_error(error) or error
        self._own = self._own or f"{type(cause).__name__}: {str(cause).partition(chr(10))[0]}"

    def compare(self, graph: str, error: Exception | None) -> bool:
        """Return whether a graph was compiled on all ranks. All must call.

        Args:
            graph: what this rank calls it.
            error: why it was not compiled here.
        """
        if error is not None:
            self.failed(error)
        told = self.texts("how compiling a second plan went", self._own)
        failures = {rank: text for rank, text in enumerate(told) if text != _FINE}
        self._say(graph, failures)
        self._own = _FINE
        return not failures

    def conclude(self) -> Literal["open", "kept", "refused"]:
        """Decide with all ranks, between two steps, what becomes of the second plan. All ranks must call.

        Returns:
            "open" while a rank has compiled no graph of it, "kept" or "refused".
        """
        own = self._own or (_FINE if self._num_compiled else _OPEN)
        told = self.texts("what becomes of a second plan", own)
        failures = {rank: text for rank, text in enumerate(told) if text not in (_FINE, _OPEN)}
        self._say("a graph of its own", failures)
        if self.is_refused:
            return "refused"
        if _OPEN in told:
            return "open"
        self.keep()
        return "kept"

    def _say(self, graph: str, failures: dict[int, str]) -> None:
        if failures and not self.is_refused:
            rank, reason = min(failures.items())
            logger.warning(
                "the first plan stays, on all ranks, because rank %d cannot compile %s by the second one, which "
                "was made by measured times (%s)",
                rank,
                graph,
                reason,
            )
        self.is_refused = self.is_refused or bool(failures)
