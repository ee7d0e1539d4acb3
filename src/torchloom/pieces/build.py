"""Graphs compiled ahead of their calls, in a form that another process can run (2.11-2.15).

Inductor stores generated source and builds it again where it is loaded. Here the shared objects that it
built are part of what is stored, so loading needs no C++ compiler and builds nothing. Most graphs are `plain`:
they do not need the compiler's modules either.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import platform
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import fx

from torchloom.errors import ServeError
from torchloom.pieces.libraries import with_suffix
from torchloom.pieces.light import light_imports
from torchloom.pieces.plain import NotPlainError, PlainGraph, plain_graph, run_plain
from torchloom.pieces.symbols import forget_constant_floats

log = logging.getLogger(__name__)

Call = Callable[..., Any]
"""Takes a graph's inputs, returns its outputs."""

_LOCK = threading.RLock()
"""Held while torch's way to find libraries is another one: builds and loads take turns."""


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
    from torch._dynamo.exc import TensorifyScalarRestartAnalysis
    from torch._functorch import config as functorch_config
    from torch._inductor import config as inductor_config
    from torch._inductor import standalone_compile
    from torch.fx.experimental import _config

    shape_config: Any = _config  # its patch() is made at run time
    kernels: dict[str, Path] = {}
    with ExitStack() as stack:
        enter = stack.enter_context
        enter(_recorded(kernels))
        enter(_looked_at(look))
        # The processor's own flags say which instructions it has: torch looks them up before it asks
        # the compiler, which takes seconds for each.
        enter(inductor_config.patch({"cpp.vec_isa_ok": True}))
        enter(functorch_config.patch(strict_autograd_cache=True, bypass_autograd_cache_key=True))
        enter(shape_config.patch(backed_size_oblivious=not unbacked))
        try:
            artifact: Any = standalone_compile(
                graph_module,
                list(inputs),
                dynamic_shapes="from_graph",
                options={"config_patches": dict(patches)},
                aot=True,
            )
        except TensorifyScalarRestartAnalysis as error:
            forget_constant_floats()
            raise ServeError(
                "a float argument that varies is returned, or reaches an operator that takes constants alone: "
                "Inductor cannot compile it. Give it as `fixed`, or as a tensor of one number"
            ) from error
        built = Built(_inner(artifact))
        try:
            built.plain = plain_graph(built.call, known)
            # It runs here as it does where it is loaded: what is checked is what is stored.
            built.call = run_plain(built.plain)
            return built
        except NotPlainError as error:
            log.info("a graph runs with torch's wrappers: %s", error)
        try:
            built.content = artifact.serialize()
        except Exception as error:  # noqa: BLE001 - whatever an operator's pickling raises
            built.why_not = str(error).splitlines()[0] if str(error) else type(error).__name__
    built.kernels = kernels
    return built


class StopBuild(BaseException):
    """Ends a build early; no handler of compilers takes it for a failure."""


def load_piece(content: bytes, kernels: Mapping[str, bytes]) -> Call:
    """Return a compiled graph that another process stored; nothing is compiled.

    Raises:
        LookupError: a shared object that it calls is not among `kernels`.
    """
    from torch._inductor import config as inductor_config
    from torch._inductor.standalone_compile import AOTCompiledArtifact

    with _given(kernels), light_imports(), inductor_config.patch({"cpp.vec_isa_ok": True}):
        return _inner(AOTCompiledArtifact.deserialize(content))


def dump_graph(graph_module: fx.GraphModule) -> bytes:
    """Return a graph of public operators as bytes.

    Raises:
        ValueError: it calls functions that Dynamo made while it traced, such as those for NumPy's.
    """
    for node in graph_module.graph.nodes:
        if node.op == "call_function" and type(node.target).__module__.startswith("torch._dynamo"):
            raise ValueError(f"{node.target!r} exists in the process that traced it alone")
    from torch.fx._graph_pickler import GraphPickler, Options

    for node in graph_module.graph.nodes:
        for name in ("nn_module_stack", "source_fn_stack", "example_value", "stack_trace"):
            node.meta.pop(name, None)
    return GraphPickler.dumps(graph_module, Options(ops_filter=None))


def load_graph(content: bytes) -> fx.GraphModule:
    """Return what `dump_graph` stored."""
    from torch._subclasses import FakeTensorMode
    from torch.fx._graph_pickler import GraphPickler
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    graph_module: Any = GraphPickler.loads(content, FakeTensorMode(shape_env=ShapeEnv()))
    graph_module.recompile()
    return graph_module


def machine_of(device_types: Sequence[str]) -> dict[str, str]:
    """Return what compiled code depends on: versions, the processor, the number of threads, the GPU.

    Inductor compiles for the very processor (`-march=native`) and writes the number of threads into its loops.
    """

    facts = {"torch": torch.__version__, "python": platform.python_version()}
    facts["machine"] = platform.machine()
    facts["vector instructions"] = _instructions()
    facts["processor"] = _processor()
    facts["threads"] = str(torch.get_num_threads())
    for kind in sorted(set(device_types) - {"cpu"}):
        module = torch.get_device_module(kind)
        facts[kind] = str(module.get_device_properties(0)) if module.is_available() else "none"
    return facts


def _instructions() -> str:
    """Return what the processor can do, asked of it and not of a compiler."""
    known = ("avx512_vnni", "avx512_bf16", "amx_tile", "amx_fp16")
    tests = {name: getattr(torch._C._cpu, f"_is_{name}_supported", None) for name in known}
    able = [name for name, test in tests.items() if test is not None and test()]
    return " ".join([torch.backends.cpu.get_cpu_capability(), *able])


@functools.cache
def _processor() -> str:
    """Return the processor's name with a hash of all that it can do."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    said = dict(
        reversed([[part.strip() for part in line.split(":", 1)] for line in lines if ":" in line])
    )
    flags = said.get("flags", said.get("Features", ""))
    digest = hashlib.sha256(" ".join(sorted(flags.split())).encode()).hexdigest()[:12]
    return f"{said.get('model name', platform.processor())} ({digest})"


def _inner(artifact: Any) -> Call:
    return artifact.inner_fn.compiled_fn


def _key(kind: str, main: str, optimized: str | None, device: str) -> str:
    text = "\x00".join((kind, device, main, optimized or ""))
    return hashlib.sha256(text.encode()).hexdigest()


@contextmanager
def _recorded(kernels: dict[str, Path]) -> Iterator[None]:
    """Note each shared object that Inductor loads meanwhile."""

    def wrap(original: Call, cls: type, main: str, device: str, *rest: Any, **more: Any) -> Call:
        load = original(cls, main, device, *rest, **more)
        key = _key(cls.__name__, main, more.get("optimized_code"), device)

        def loaded() -> Any:
            library = load()
            kernels[key] = Path(getattr(library, "__file__", None) or library._name)
            return library

        return loaded

    with _loading(wrap):
        yield


@contextmanager
def _given(kernels: Mapping[str, bytes]) -> Iterator[None]:
    """Let Inductor find shared objects that are built already, and build none."""

    def wrap(_original: Call, cls: Any, main: str, device: str, *_rest: Any, **more: Any) -> Call:
        key = _key(cls.__name__, main, more.get("optimized_code"), device)
        content = kernels.get(key)
        if content is None:
            raise LookupError(f"a shared object is missing ({cls.__name__}, {key[:12]})")

        def loaded() -> Any:
            with with_suffix(content) as path:
                return cls._load_library(path, key)

        return loaded

    with _loading(wrap):
        yield


@contextmanager
def _looked_at(look: Callable[[], None]) -> Iterator[None]:
    """Call a function between AOTAutograd and Inductor."""
    from torch._inductor import compile_fx

    name = "_recursive_joint_graph_passes"
    original = getattr(compile_fx, name, None)
    if original is None:  # nothing is looked at early: what was assumed is judged when all is built
        yield
        return

    def passes(*args: Any, **kwargs: Any) -> Any:
        look()
        return original(*args, **kwargs)

    with _LOCK, mock.patch.object(compile_fx, name, passes):
        yield


@contextmanager
def _loading(wrap: Callable[..., Call]) -> Iterator[None]:
    """Have `wrap` asked for each library that Inductor wants."""
    from torch._inductor.codecache import CppCodeCache

    with _LOCK:
        method = CppCodeCache.__dict__["load_async"]
        original = method.__func__

        def load_async(
            cls: type, main_code: str, device_type: str = "cpu", *rest: Any, **more: Any
        ) -> Call:
            return wrap(original, cls, main_code, device_type, *rest, **more)

        CppCodeCache.load_async = classmethod(load_async)
        try:
            yield
        finally:
            CppCodeCache.load_async = method
