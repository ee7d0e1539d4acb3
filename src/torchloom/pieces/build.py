"""Compiles graphs ahead of their calls, in a form that another process can run.

Inductor stores generated source and builds it again where it is loaded. Here the shared objects that it
built are part of what is stored, so loading needs no C++ compiler and builds nothing. Most graphs are `plain`:
they do not need the compiler's modules either.
The wrappers of the others import Inductor's lowerings where they are loaded, which takes a second and a half.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import fx

from torchloom._torch.standalone import (
    WantsConstantError,
    before_codegen,
    build_settings,
    compile_alone,
    given_libraries,
    load_artifact,
    watched_libraries,
)
from torchloom.errors import ServeError
from torchloom.pieces.plain import PlainGraph, as_library, plain_graph, run_plain
from torchloom.pieces.reduced import NotPlainError

log = logging.getLogger(__name__)


Call = Callable[..., Any]
"""Takes a graph's inputs, returns its outputs."""


@dataclass
class Built:
    """A compiled graph."""

    call: Call
    plain: PlainGraph | None = None
    """What `run_plain` makes it of again."""
    content: bytes | None = None
    """What `load_piece` makes it of again, if it is not plain."""
    why_not: str = ""
    """Why it cannot be stored."""
    kernels: dict[str, Path] = field(default_factory=dict)
    """The shared objects that it calls, by what they were built of."""


def build_piece(
    graph_module: fx.GraphModule,
    inputs: Sequence[Any],
    patches: Mapping[str, Any],
    *,
    unbacked: bool = False,
    look: Callable[[], None] = lambda: None,
    known: Collection[int] = (),
) -> Built:
    """Compile a graph with Inductor.

    Args:
        graph_module: a graph of Dynamo, or a piece of one; it is left as it is.
        inputs: fake tensors and sizes, one for each placeholder.
        patches: Inductor's options.
        unbacked: whether its symbols are unbacked.
        look: called when the graph is one of plain operators, and what that assumes of sizes is known,
            before code is generated for it, which takes most of the time; it may raise `StopBuild`.
        known: places of inputs whose sizes and strides are those of the graph in each call: plain code does
            not compare them again, which takes about 0.2 us each.

    Raises:
        ServeError: a float that is a symbol reaches an operator that takes constants alone.
    """
    kernels: dict[str, Path] = {}

    def note(kind: str, main: str, optimized: str | None, device: str, path: Path) -> None:
        kernels[_key(kind, main, optimized, device)] = path

    with watched_libraries(note), before_codegen(look), build_settings(unbacked=unbacked):
        try:
            call, serialize = compile_alone(graph_module, inputs, patches)
        except WantsConstantError as error:
            raise ServeError(
                "a float argument that varies is returned, or reaches an operator that takes constants alone: "
                "Inductor cannot compile it. Give it as `fixed`, or as a tensor of one number"
            ) from error
        built = _stored(graph_module, call, serialize, known)
    # What is checked is what is stored: a plain graph runs here as it does where it is loaded.
    if built.plain is None:
        built.kernels = kernels
    return built


def _stored(
    graph_module: fx.GraphModule,
    call: Call,
    serialize: Callable[[], bytes],
    known: Collection[int],
) -> Built:
    built = Built(call)
    try:
        built.plain = plain_graph(graph_module, call, known)
        built.call = run_plain(built.plain)
        return built
    except NotPlainError as error:
        log.info("a graph runs with torch's wrappers: %s", error)
    try:
        built.content = serialize()
    except Exception as error:  # noqa: BLE001 - whatever an operator's pickling raises
        built.why_not = str(error).splitlines()[0] if str(error) else type(error).__name__
    return built


class StopBuild(BaseException):
    """Ends a build early; no handler of compilers takes it for a failure."""


def load_piece(content: bytes, kernels: Mapping[str, bytes]) -> Call:
    """Return a compiled graph that another process stored; nothing is compiled.

    Raises:
        LookupError: a shared object that it calls is not among `kernels`.
    """

    def find(kind: str, main: str, optimized: str | None, device: str) -> tuple[str, Any]:
        key = _key(kind, main, optimized, device)
        library = kernels.get(key)
        if library is None:
            raise LookupError(f"a shared object is missing ({kind}, {key[:12]})")
        return key, partial(as_library, library)

    with given_libraries(find):
        return load_artifact(content)


def _key(kind: str, main: str, optimized: str | None, device: str) -> str:
    text = "\x00".join((kind, device, main, optimized or ""))
    return hashlib.sha256(text.encode()).hexdigest()
