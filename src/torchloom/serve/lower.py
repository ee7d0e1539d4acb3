"""Pieces of a graph made runnable: by Inductor, as they are, or by a function of the user's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import fx

from torchloom._torch.fullgraph import FullGraph
from torchloom._torch.pieces import build_piece, dump_graph, load_graph, load_piece
from torchloom._torch.symbols import SizeGuard
from torchloom.errors import ArtifactError
from torchloom.serve.counter import counter
from torchloom.serve.patches import TUNED
from torchloom.serve.split import Piece
from torchloom.serve.store import Store

Call = Callable[..., Any]
Backend = Literal["inductor", "eager"] | Callable[[fx.GraphModule, list[Any]], Call]


@dataclass
class Lowered:
    """A piece that can run."""

    call: Call
    stored: dict[str, Any] = field(default_factory=dict)
    """Where its parts are in the store, or the parts themselves while there is none."""
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
        self._done: dict[tuple[str, bool, bool], Lowered] = {}

    def lower(
        self, piece: Piece, graph: FullGraph, *, unbacked: bool, tuned: bool = False
    ) -> Lowered:
        """Return a piece's function; equal pieces share one.

        Args:
            piece: a part of a graph.
            graph: the trace that it is a part of, which notes what compilers assume.
            unbacked: whether its sizes are unbacked symbols.
            tuned: whether to search for the fastest kernels.
        """
        key = (piece.digest, piece.is_kept, tuned)
        if key not in self._done:
            patches = {**TUNED, **self._patches} if tuned else self._patches
            before = {guard.text for guard in graph.size_guards()}
            lowered = self._done[key] = self._lower(piece, patches, unbacked)
            lowered.guards = tuple(g for g in graph.size_guards() if g.text not in before)
        return self._done[key]

    def _lower(self, piece: Piece, patches: Mapping[str, Any], unbacked: bool) -> Lowered:
        if piece.is_kept or self._backend == "eager":
            return self._as_it_is(piece.graph_module)
        counter.num_pieces += 1
        if self._backend == "inductor":
            built = build_piece(piece.graph_module, piece.inputs, patches, unbacked=unbacked)
            lowered = Lowered(built.call, why_not=built.why_not)
            if self._store is not None and built.content is not None:
                kernels = {
                    key: self._store.put(path.read_bytes(), ".so")
                    for key, path in built.kernels.items()
                }
                lowered.stored = {"compiled": self._store.put(built.content), "kernels": kernels}
            return lowered
        call = self._backend(piece.graph_module, list(piece.inputs))  # type: ignore[operator]
        return Lowered(call, why_not="what a backend of one's own returns cannot be stored")

    def _as_it_is(self, graph_module: fx.GraphModule) -> Lowered:
        lowered = Lowered(graph_module.forward)
        if self._store is not None:
            try:
                lowered.stored = {"graph": self._store.put(dump_graph(graph_module))}
            except Exception as error:  # noqa: BLE001 - whatever a constant's pickling raises
                lowered.why_not = f"a graph cannot be stored: {error}"
        return lowered


def loaded(stored: Mapping[str, Any], store: Store) -> Call:
    """Return the function of a stored piece; nothing is compiled.

    Raises:
        ArtifactError: a part of it is missing or damaged.
    """
    if "graph" in stored:
        return load_graph(store.get(stored["graph"])).forward
    kernels = {key: store.checked(digest) for key, digest in stored["kernels"].items()}
    try:
        return load_piece(store.get(stored["compiled"]), kernels)
    except LookupError as error:
        raise ArtifactError(
            f"a piece of the program is incomplete: {error}; build again"
        ) from error
