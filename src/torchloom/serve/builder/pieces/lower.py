"""Make each piece of a graph runnable: compiled by Inductor, as it is, or by a function of the user's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import fx

from torchloom._torch.inductor import why_cache_is_open
from torchloom.errors import ServeError
from torchloom.pieces.build import build_piece
from torchloom.pieces.fullgraph import FullGraph
from torchloom.pieces.symbols import SizeGuard
from torchloom.serve.builder.pieces.inductor_options import TUNED
from torchloom.serve.builder.pieces.piece import Piece
from torchloom.serve.counter import counter
from torchloom.serve.store.entries import stored_graph, stored_piece
from torchloom.serve.store.folder import Store

Call = Callable[..., Any]
Backend = Literal["inductor", "eager"] | Callable[[fx.GraphModule, list[Any]], Call]


@dataclass
class Lowered:
    """A piece that can run."""

    call: Call
    stored: dict[str, str] = field(default_factory=dict)
    """Where it is in the store, by its form."""
    why_not: str = ""
    """Why it cannot be stored."""
    guards: tuple[SizeGuard, ...] = ()
    """What its compiler assumed of sizes: as true of every trace that an equal piece is taken from."""


class Lowerer:
    """Makes each piece runnable once.

    Args:
        backend: what compiles.
        patches: Inductor's options.
        store: where compiled pieces are kept; in memory alone if None.
    """

    def __init__(self, backend: Backend, patches: Mapping[str, Any], store: Store | None) -> None:
        self._backend = backend
        self._patches = patches
        self._store = store
        self._done: dict[tuple[str, bool, bool, frozenset[int]], Lowered] = {}

    def lower(
        self,
        piece: Piece,
        graph: FullGraph,
        *,
        unbacked: bool,
        tuned: bool = False,
        look: Callable[[], None] = lambda: None,
        known: frozenset[int] = frozenset(),
    ) -> Lowered:
        """Return a piece's function; equal pieces share one.

        Args:
            piece: a part of a graph.
            graph: the trace that it is a part of, which notes what compilers assume.
            unbacked: whether its sizes are unbacked symbols.
            tuned: whether to search for the fastest kernels.
            look: called before code is generated, when `graph` knows what tracing the piece assumed.
            known: places of inputs that are compared before the graph runs (`call.weight_checks`).
        """
        key = (piece.digest, piece.is_kept, tuned, known)
        if key not in self._done:
            patches = {**TUNED, **self._patches} if tuned else self._patches
            before = {guard.text for guard in graph.size_guards()}
            lowered = self._done[key] = self._lower(piece, patches, unbacked, look, known)
            lowered.guards = tuple(g for g in graph.size_guards() if g.text not in before)
        return self._done[key]

    def _lower(
        self,
        piece: Piece,
        patches: Mapping[str, Any],
        unbacked: bool,
        look: Callable[[], None],
        known: frozenset[int],
    ) -> Lowered:
        if piece.is_kept or self._backend == "eager":
            return self._as_it_is(piece.graph_module)
        if self._backend == "inductor":
            if reason := why_cache_is_open():
                raise ServeError(reason)
            built = build_piece(
                *(piece.graph_module, piece.inputs, patches),
                unbacked=unbacked,
                look=look,
                known=known,
            )
            counter.num_pieces += 1
            lowered = Lowered(built.call, why_not=built.why_not)
            if self._store is not None:
                lowered.stored = stored_piece(built, self._store)
            return lowered
        counter.num_pieces += 1
        call = self._backend(piece.graph_module, list(piece.inputs))  # type: ignore[operator]
        return Lowered(call, why_not="what a backend of one's own returns cannot be stored")

    def _as_it_is(self, graph_module: fx.GraphModule) -> Lowered:
        lowered = Lowered(graph_module.forward)
        if self._store is not None:
            try:
                lowered.stored = stored_graph(graph_module, self._store)
            except Exception as error:  # noqa: BLE001 - pickling a user's constant may raise anything
                lowered.why_not = f"a graph cannot be stored: {error}"
        return lowered
