"""Count captures of the same function: above a limit torch runs further sizes and modes eagerly.

A rank that runs eagerly calls other collectives than ranks that run compiled code. So the last capture
before the limit logs a warning, and the error that ends the run later names this cause.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from types import CodeType

from torch import fx

from torchloom._torch.compiling import compiling_code
from torchloom._torch.introspect import recompile_limit
from torchloom.log import get_logger
from torchloom.pipeline.shared_plan import parameters_of
from torchloom.position import POSITION

logger = get_logger(__name__)

_NOTE = "sizes"


@dataclass
class Sizes:
    """Counts the captures of one module's graphs."""

    _captures: Counter[tuple[CodeType | None, frozenset[str]]] = field(default_factory=Counter)

    def start_over(self) -> None:
        """Forget all counts, because the module is about to be captured again."""
        self._captures.clear()
        POSITION.notes.pop(_NOTE, None)

    def count(self, name: str, graph: fx.Graph) -> None:
        """Count a captured graph, and warn where it is the last that torch will compile."""
        params = parameters_of(graph)
        if not params:
            return
        key = (compiling_code(), params)
        self._captures[key] += 1
        if self._captures[key] != recompile_limit():
            return
        text = (
            f"{name} is the capture number {self._captures[key]} of the same {len(params)} parameters, which is "
            "torch's recompile_limit: at further sizes and modes this rank runs eagerly, which ranks that run "
            "compiled code cannot follow; raise torch._dynamo.config.recompile_limit, compile with dynamic=True, "
            "or pad: docs/ragged.md"
        )
        POSITION.notes[_NOTE] = text
        logger.warning("%s", text)
