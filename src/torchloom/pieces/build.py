"""Compiles graphs ahead of their calls, in a form that another process can run.

Inductor stores generated source and builds it again where it is loaded. Here the shared objects that it
built are part of what is stored, so loading needs no C++ compiler and builds nothing. Most graphs are `plain`:
they do not need the compiler's modules either.

The wrappers of the others ask `torch._inductor.select_algorithm` for `extern_kernels`, which are plain functions of torch,
and with it for all of Inductor's lowerings: a second and a half. While a stored graph is loaded, such modules are
stand-ins that know the names which are asked for, and import the real module for any other.
"""

from __future__ import annotations

import hashlib
import logging
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import fx

from torchloom._torch.generated import (
    DEBUG,
    DECOMPOSITION,
    GRAPH,
    MEMORY_PLANNING,
    SELECT_ALGORITHM,
)
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
from torchloom.pieces.plain import PlainGraph, plain_graph, run_plain, with_suffix
from torchloom.pieces.reduced import NotPlainError

log = logging.getLogger(__name__)


_KERNELS = {"mm": torch.mm, "addmm": torch.addmm, "bmm": torch.bmm, "baddbmm": torch.baddbmm}
"""What Inductor registers under these names, as it stands in `kernel/mm.py` and `kernel/bmm.py`."""


class _Kernels:
    """Stands for `extern_kernels`; a name that is not known is looked up in the real one, once."""

    def __init__(self) -> None:
        self.__dict__.update(_KERNELS)

    def __getattr__(self, name: str) -> Any:
        kernel = getattr(_real(SELECT_ALGORITHM).extern_kernels, name)
        setattr(self, name, kernel)
        return kernel


def _align(nbytes: Any) -> Any:
    return _real(MEMORY_PLANNING)._align(nbytes)


def _select_decomp_table() -> Any:
    return _real(DECOMPOSITION).select_decomp_table()


class _Lowering:
    """Stands for `GraphLowering`, of which loading calls one method, a hook for logs."""

    @staticmethod
    def save_output_code(code: str) -> None:
        """Hand the code to whoever listens at the real class; nobody can before it is imported."""


class _Stand(types.ModuleType):
    """Stands for a module; a name that it does not know is the real module's."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_real(self.__name__), name)


@contextmanager
def light_imports() -> Iterator[None]:
    """Let wrappers that are loaded meanwhile do without Inductor's lowerings."""
    stands = {
        SELECT_ALGORITHM: {"extern_kernels": _Kernels()},
        MEMORY_PLANNING: {"_align": _align},
        GRAPH: {"GraphLowering": _Lowering},
        DECOMPOSITION: {"select_decomp_table": _select_decomp_table},
    }
    put = {}
    for name, content in stands.items():
        if name not in sys.modules:
            put[name] = _Stand(name)
            put[name].__dict__.update(content)
    sys.modules.update(put)
    package, _, name = DEBUG.rpartition(".")
    inductor = import_module(package)
    if not hasattr(inductor, name):
        # Each call reads it. Nothing is recorded before the module itself is imported, which then takes
        # this place.
        stand = _Stand(DEBUG)
        stand.__dict__["RECORD_GRAPH_EXECUTION"] = False
        setattr(inductor, name, stand)
    try:
        yield
    finally:
        for name, stand in put.items():
            if sys.modules.get(name) is stand:
                del sys.modules[name]


def _real(name: str) -> Any:
    """Return the module itself, also where a stand-in has its place."""
    if isinstance(sys.modules.get(name), _Stand):
        del sys.modules[name]
    return import_module(name)


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
        built = _stored(call, serialize, known)
    # What is checked is what is stored: a plain graph runs here as it does where it is loaded.
    if built.plain is None:
        built.kernels = kernels
    return built


def _stored(call: Call, serialize: Callable[[], bytes], known: Collection[int]) -> Built:
    built = Built(call)
    try:
        built.plain = plain_graph(call, known)
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
        return key, partial(with_suffix, library)

    with given_libraries(find), light_imports():
        return load_artifact(content)


def _key(kind: str, main: str, optimized: str | None, device: str) -> str:
    text = "\x00".join((kind, device, main, optimized or ""))
    return hashlib.sha256(text.encode()).hexdigest()
