"""Compile Inductor's code for a graph ahead of its calls, take it apart, and say where Inductor looks for shared objects."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, fx

from torchloom._torch.inductor import empty_files_removed
from torchloom._torch.shapes import forget_constant_floats, no_special_sizes, range_text

Call = Callable[..., Any]


class WantsConstantError(Exception):
    """A float that is a symbol reaches an operator that takes constants alone."""


def compile_alone(
    graph_module: fx.GraphModule,
    inputs: Sequence[Any],
    patches: Mapping[str, Any],
) -> tuple[Call, Callable[[], bytes]]:
    """Compile a graph with Inductor; return its code, and a function that returns torch's artifact as bytes.

    Call it, and that function, within `build_settings`.

    Args:
        graph_module: a graph of Dynamo, or a piece of one; it is left as it is.
        inputs: fake tensors and sizes, one for each placeholder.
        patches: Inductor's options.

    Raises:
        WantsConstantError: see there.
    """
    from torch._dynamo.exc import TensorifyScalarRestartAnalysis
    from torch._inductor import standalone_compile

    # Inductor's key of its cache has no ranges: code for a narrow one would be found for a wide one.
    ranges = ", ".join(map(range_text, inputs))
    compiler_config: Any = torch.compiler.config  # its patch() is made at run time
    tag = f"{compiler_config.cache_key_tag} sizes {ranges}"
    try:
        with compiler_config.patch(cache_key_tag=tag), empty_files_removed(), _unique_keys():
            artifact: Any = standalone_compile(
                graph_module,
                list(inputs),
                dynamic_shapes="from_graph",
                options={"config_patches": dict(patches)},
                aot=True,
            )
    except TensorifyScalarRestartAnalysis as error:
        forget_constant_floats()
        raise WantsConstantError from error
    return _inner(artifact), artifact.serialize


@contextmanager
def _unique_keys() -> Iterator[None]:
    """Let graphs that torch cannot hash get keys that no other graph gets.

    Such a graph (one with `torch.func.jvp`, say) is cached under `random.random()` (torch 2.13, `autograd_cache_key`
    within AOT compilation). Under a seed, or in a state that was put back, that number comes again, and another
    graph's code was found under it.
    """
    state = random.getstate()
    random.seed()
    try:
        yield
    finally:
        random.setstate(state)


def load_artifact(content: bytes) -> Call:
    """Return the code of an artifact that `compile_alone` made in another process; this runs its content."""
    from torch._inductor.standalone_compile import AOTCompiledArtifact

    with own_instructions():
        return _inner(AOTCompiledArtifact.deserialize(content))


def own_instructions() -> AbstractContextManager[Any]:
    """Return a block in which the processor's own flags say which vector instructions it has.

    torch looks them up before it asks the compiler, which takes seconds for each.
    """
    from torch._inductor import config as inductor_config

    return inductor_config.patch({"cpp.vec_isa_ok": True})


@contextmanager
def build_settings(*, unbacked: bool) -> Iterator[None]:
    """Set what `compile_alone` needs set; `unbacked` says whether the graph's symbols are unbacked."""
    from torch._functorch import config

    caching: Any = config.patch(strict_autograd_cache=True, bypass_autograd_cache_key=True)  # type: ignore[attr-defined]
    with own_instructions(), caching, no_special_sizes(enabled=not unbacked), symbolic_minimum():
        yield


@contextmanager
def symbolic_minimum() -> Iterator[None]:
    """Let Inductor write `Min(a, b)` where no range tells which is less, as it does for unbacked symbols."""
    from torch._inductor.sizevars import SizeVarAllocator
    from torch.utils._sympy.functions import Max, Min

    allocator: Any = SizeVarAllocator
    known_minimum, known_maximum = SizeVarAllocator.evaluate_min, SizeVarAllocator.evaluate_max

    def evaluate_min(sizes: Any, left: Any, right: Any) -> Any:
        try:
            return known_minimum(sizes, left, right)
        except TypeError:
            return Min(left, right)

    def evaluate_max(sizes: Any, left: Any, right: Any) -> Any:
        least = evaluate_min(sizes, left, right)
        return {left: right, right: left}.get(least, Max(left, right))

    allocator.evaluate_min, allocator.evaluate_max = evaluate_min, evaluate_max
    try:
        yield
    finally:
        allocator.evaluate_min, allocator.evaluate_max = known_minimum, known_maximum


def _inner(artifact: Any) -> Call:
    return artifact.inner_fn.compiled_fn


class Returned(NamedTuple):
    """A result that is an input, or a view of one."""

    place: int
    """Of the input."""
    is_view: bool


@dataclass(frozen=True)
class GeneratedCode:
    """What Inductor and AOTAutograd made of a graph."""

    text: str
    """The module that Inductor wrote."""
    scope: Mapping[str, Any]
    """The globals of that module."""
    constants: Mapping[str, Tensor]
    """Tensors that the text refers to."""
    needs: str
    """Why AOTAutograd's wrappers have to run around it; nothing if they need not."""
    returned: tuple[Returned | None, ...]
    """For each result, which input it is or views, None for one that was computed."""
    written: tuple[int, ...]
    """Inputs that are written to."""


def generated_code(compiled: Call) -> GeneratedCode:
    """Take apart the code that `compile_alone` returned, in the process that made it.

    Raises:
        AttributeError, KeyError, TypeError: torch keeps it in another form.
    """
    result = compiled.serialize()  # type: ignore[attr-defined]
    graph = result.compiled_fw.result
    return GeneratedCode(
        graph.source_code,
        compiled.current_callable.__func__.__globals__,  # type: ignore[attr-defined]
        graph.constants or {},
        next((reason for reason, holds in _reasons(result).items() if holds), ""),
        tuple(_returned(result.runtime_metadata.output_info)),
        tuple(result.runtime_metadata.mutated_graph_handled_indices_seen_by_autograd),
    )


def _reasons(result: Any) -> dict[str, bool]:
    meta, graph = result.runtime_metadata, result.compiled_fw.result
    return {
        "it computes gradients": result.compiled_bw is not None,
        "it takes tensor subclasses": result.maybe_subclass_meta is not None,
        "it draws random numbers by torch's functional way": meta.is_rng_op_functionalized,
        "it has effects that are ordered by tokens": bool(meta.tokens),
        "it changes the gradient mode": meta.grad_enabled_mutation is not None,
        "its inputs are changed after it ran": meta.num_mutated_inp_runtime_indices > 0,
        "its inputs share memory": any(w.needs_post_compile for w in result.dispatch_wrappers),
        "autocast is on": torch._C._is_any_autocast_enabled(),
        "its results share memory": meta.num_intermediate_bases > 0,
        "inputs have to be realigned": bool(graph.inputs_to_check),
        "it holds constants that are no plain tensors": bool(
            graph.constants is None or graph.frozen_param_names or graph.torchbind_constants
        ),
    }


def _returned(outputs: Sequence[Any]) -> Iterator[Returned | None]:
    """Yield for each result which input it is or views, None for one that was computed."""
    from torch._functorch._aot_autograd.schemas import OutputType

    kinds = {OutputType.is_input: False, OutputType.alias_of_input: True}
    for output in outputs:
        is_view = kinds.get(output.output_type)
        yield None if is_view is None else Returned(output.base_idx, is_view)


Load = Callable[[], Any]
"""Builds or finds a shared object, and loads it."""

_LOCK = threading.RLock()
"""Held while torch's way to find libraries is another one: builds and loads take turns."""


@contextmanager
def watched_libraries(loaded: Callable[[str, str, str | None, str, Path], None]) -> Iterator[None]:
    """Tell of each shared object that Inductor loads meanwhile.

    Args:
        loaded: told the kind of library, its two sources, the device, and the shared object.
    """

    def wrap(original: Any, cls: Any, main: str, device: str, *rest: Any, **more: Any) -> Load:
        load = original(cls, main, device, *rest, **more)

        def told() -> Any:
            library = load()
            path = Path(getattr(library, "__file__", None) or library._name)
            loaded(cls.__name__, main, more.get("optimized_code"), device, path)
            return library

        return told

    with _loading(wrap):
        yield


@contextmanager
def given_libraries(
    find: Callable[[str, str, str | None, str], tuple[str, Callable[[], Any]]],
) -> Iterator[None]:
    """Let Inductor find shared objects that are built already, and build none.

    Args:
        find: given the kind of library, its two sources and the device, returns a name that is this
            library's alone and a function that makes a context of the path to load it by.
    """

    def wrap(_original: Any, cls: Any, main: str, device: str, *_rest: Any, **more: Any) -> Load:
        key, opened = find(cls.__name__, main, more.get("optimized_code"), device)

        def load() -> Any:
            with opened() as path:
                return cls._load_library(path, key)

        return load

    with _loading(wrap):
        yield


@contextmanager
def _loading(wrap: Callable[..., Load]) -> Iterator[None]:
    """Have `wrap` asked for each library that Inductor wants."""
    from torch._inductor.codecache import CppCodeCache

    with _LOCK:
        method = CppCodeCache.__dict__["load_async"]
        original = method.__func__

        def load_async(
            cls: type, main_code: str, device_type: str = "cpu", *rest: Any, **more: Any
        ) -> Load:
            return wrap(original, cls, main_code, device_type, *rest, **more)

        CppCodeCache.load_async = classmethod(load_async)
        try:
            yield
        finally:
            CppCodeCache.load_async = method


@contextmanager
def before_codegen(look: Callable[[], None]) -> Iterator[None]:
    """Call a function between AOTAutograd and Inductor; a torch without the place between calls it never."""
    from torch._inductor import compile_fx

    original = getattr(compile_fx, "_recursive_joint_graph_passes", None)
    if original is None:
        yield
        return

    def passes(*args: Any, **kwargs: Any) -> Any:
        look()
        return original(*args, **kwargs)

    with _LOCK, mock.patch.object(compile_fx, "_recursive_joint_graph_passes", passes):
        yield
