"""Compiled pieces as objects of a store, and made runnable again.

Nothing here imports a compiler: a process that loads programs does not pay for one.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from torchloom._torch.inductor import why_cache_is_open
from torchloom.errors import ArtifactError
from torchloom.pieces.build import Built, load_piece
from torchloom.pieces.graphs import dump_graph, load_graph
from torchloom.pieces.plain import PlainGraph, run_plain
from torchloom.serve.store.folder import Store

Call = Callable[..., Any]


def stored_piece(built: Built, store: Store) -> dict[str, Any]:
    """Store a compiled piece and return where its parts are; nothing if it cannot be stored."""
    plain = built.plain
    kernels: Mapping[str, bytes] = (
        {key: path.read_bytes() for key, path in built.kernels.items()}
        if plain is None
        else plain.kernels
    )
    parts: dict[str, Any] = {
        "kernels": {key: store.put(content, ".so") for key, content in kernels.items()}
    }
    if plain is None:
        return {} if built.content is None else parts | {"compiled": store.put(built.content)}
    return parts | {
        "source": store.put(plain.source.encode(), ".py"),
        "constants": store.put(_bytes_of(plain.constants)) if plain.constants else None,
        "returned": plain.returned,
        "written": list(plain.written),
        "with_grad": plain.with_grad,
    }


def stored_graph(graph_module: fx.GraphModule, store: Store) -> dict[str, Any]:
    """Store a graph that runs as it is and return where it is."""
    return {"graph": store.put(dump_graph(graph_module))}


def loaded_piece(stored: Mapping[str, Any], store: Store) -> Call:
    """Return the function of a stored piece; nothing is compiled.

    Raises:
        ArtifactError: a part of it is missing or damaged, or needs a compiler's cache that others can write to.
    """
    if "graph" in stored:
        return load_graph(store.get(stored["graph"])).forward
    kernels = {key: store.get(digest) for key, digest in stored["kernels"].items()}
    try:
        if "compiled" in stored:
            if (
                reason := why_cache_is_open()
            ):  # torch writes its sources there, and runs what is there
                raise ArtifactError(reason)
            return load_piece(store.get(stored["compiled"]), kernels)
        returned = stored["returned"]
        plain = PlainGraph(
            store.get(stored["source"]).decode(),
            kernels,
            None if returned is None else tuple(returned),
            tuple(stored["written"]),
            _tensors_in(store.get(stored["constants"])) if stored["constants"] else {},
            stored["with_grad"],
        )
        return run_plain(plain)
    except LookupError as error:
        raise ArtifactError(
            f"a piece of the program is incomplete: {error}; build again"
        ) from error


def object_names(stored: Mapping[str, Any]) -> set[str]:
    """Return the names under which the parts of a stored piece are in the store."""
    names = ("graph", "compiled", "source", "constants")
    found = {stored[name] for name in names if stored.get(name)}
    return found | set(stored.get("kernels", {}).values())


def _bytes_of(tensors: Mapping[str, Tensor]) -> bytes:
    buffer = io.BytesIO()
    torch.save(dict(tensors), buffer)
    return buffer.getvalue()


def _tensors_in(content: bytes) -> dict[str, Tensor]:
    return torch.load(io.BytesIO(content), weights_only=True)
