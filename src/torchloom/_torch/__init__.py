"""The only door to private torch: one name per internal, with the versions it is known for.

Everything here was read in torch 2.11 to 2.13; that the names are there in 2.14 and 2.15 was tried. When
upstream moves, this file changes and no other. Compiler internals are imported inside the functions that need them, because importing
them costs seconds that eager users should not pay.
"""

from __future__ import annotations

import functools
import logging
import time
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload as OpOverload  # 2.11-2.15
from torch._ops import OpOverloadPacket as OpOverloadPacket  # 2.11-2.15
from torch.fx.graph import _BoxedCodeGen
from torch.utils._python_dispatch import TorchDispatchMode

from torchloom._torch.coalesced import all_gather_coalesced as all_gather_coalesced
from torchloom._torch.coalesced import all_gather_single as all_gather_single
from torchloom._torch.coalesced import all_reduce_coalesced as all_reduce_coalesced
from torchloom._torch.coalesced import reduce_scatter_coalesced as reduce_scatter_coalesced
from torchloom._torch.coalesced import reduce_scatter_single as reduce_scatter_single
from torchloom._torch.coalesced import supports_coalescing as supports_coalescing
from torchloom._torch.exchange import texts_of as texts_of
from torchloom._torch.frozen import compiling_again
from torchloom._torch.hush import hushed_store as hushed_store

DispatchMode = TorchDispatchMode
"""Base of modes that see each operator below autograd (2.11-2.15)."""

BoxedCodeGen = _BoxedCodeGen
"""Code generation for functions that take one list and empty it (2.11-2.15)."""


def inductor_compile(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    patches: Mapping[str, Any],
    timed: Callable[[Any, float, str | None], None],
    *,
    backward_at_once: bool = False,
) -> Callable[..., Any]:
    """Compile a Dynamo graph with Inductor under config patches (2.11-2.15).

    The patches also hold for the backward graph, which is compiled at its first run unless
    `backward_at_once`. `timed` is told "forward", "backward" or "inference", the seconds that it took
    and the wrapper code, unless a cache held both graphs.
    """
    from torch._functorch import config as functorch_config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    @functools.wraps(compile_fx_inner)
    def inner(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        compiled = compile_fx_inner(*args, **kwargs)
        kind = "inference" if kwargs.get("is_inference") else "forward"
        kind = "backward" if kwargs.get("is_backward") else kind
        source = getattr(compiled, "source_code", None)
        timed(kind, time.perf_counter() - started, source or None)
        return compiled

    eager = {"force_non_lazy_backward_lowering": True} if backward_at_once else {}
    with functorch_config.patch(eager):
        compiled: Any = compile_fx(
            gm, list(example_inputs), inner_compile=inner, config_patches=dict(patches)
        )
    return compiled


def load_inductor() -> None:
    """Import Inductor now, as `torch.compile(backend="inductor")` does when it is called (2.11-2.15).

    The import takes a second, which would otherwise count as compile time of the first step.
    """
    import torch._inductor.compile_fx  # noqa: F401


def aot_compile(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    partition: Callable[..., Any],
    inference: Callable[..., Any],
    backward_at_once: bool = False,
) -> Callable[..., Any]:
    """Run AOTAutograd over a Dynamo graph with own compilers and partitioner (2.11-2.15).

    With sizes that vary, a backward graph whose compile fails is otherwise tried again at its first run;
    with `backward_at_once` the failure is that of the whole.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch import config as functorch_config

    backend = aot_autograd(
        fw_compiler=forward,
        bw_compiler=backward,
        partition_fn=partition,
        inference_compiler=inference,
    )
    eager = {"force_non_lazy_backward_lowering": True} if backward_at_once else {}
    with functorch_config.patch(eager):
        return backend(gm, list(example_inputs))


def without_modes() -> AbstractContextManager[Any]:
    """Return a block in which operators really run, also inside of a compiler (2.11-2.15)."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def lives_on(value: torch.Tensor) -> bool:
    """Say whether an input of a captured graph is a parameter or buffer (2.11-2.15)."""
    is_static = getattr(value, "_dynamo_static_input_type", None) is not None
    return is_static or isinstance(value, torch.nn.Parameter)


def top_saved_tensors_hooks() -> tuple[Any, Any] | None:
    """Return the two hooks that autograd asks now (2.11-2.15)."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def pop_saved_tensors_hooks() -> None:
    """Take the hooks that autograd asks now off its stack (2.11-2.15)."""
    torch._C._autograd._pop_saved_tensors_default_hooks()


def push_saved_tensors_hooks(hooks: tuple[Any, Any]) -> None:
    """Let autograd ask these hooks first (2.11-2.15)."""
    torch._C._autograd._push_saved_tensors_default_hooks(*hooks)


def neg_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor that reads each element negated, as `.imag` of a conjugate does (2.11-2.15)."""
    return torch._neg_view(tensor)


def boxed(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return `fn` with the calling convention of compiled graphs: one list (2.11-2.15)."""
    from torch._functorch.aot_autograd import make_boxed_func

    return fn if getattr(fn, "_boxed_call", False) else make_boxed_func(fn)


def min_cut_partition(joint: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
    """Split a joint graph by min-cut, obeying the recompute tags of its nodes (2.11-2.15)."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    return min_cut_rematerialization_partition(joint, joint_inputs, **kwargs)


def trial_partition(joint: fx.GraphModule, num_fwd_outputs: int) -> tuple[fx.Graph, fx.Graph]:
    """Return the graphs that min-cut would make of a joint graph, which stays as it is (2.11-2.15).

    Nodes keep their names: in the trial common subexpressions are not merged, and random operators
    that backward runs again are not wrapped.
    """
    from unittest import mock

    from torch._functorch import config, partitioners

    copy = fx.Graph()
    copy.output(copy.graph_copy(joint.graph, {}))
    copy.output_node().meta.update(joint.graph.output_node().meta)
    as_they_are = mock.patch.object(
        partitioners, "functionalize_rng_ops", lambda joint, fw, bw, num_syms: (fw, bw)
    )
    with config.patch(cse=False), as_they_are:  # type: ignore[attr-defined]
        forward, backward = partitioners.min_cut_rematerialization_partition(
            fx.GraphModule(joint, copy), (), num_fwd_outputs=num_fwd_outputs
        )
    return forward.graph, backward.graph


def sketch(root: torch.nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """Return a graph module that makes its code when it is called first, if ever (2.11-2.15)."""
    from torch.fx._lazy_graph_module import _LazyGraphModule

    return _LazyGraphModule(root, graph)


def sketching() -> AbstractContextManager[Any]:
    """Return a block in which torch's partitioners return sketches (2.11-2.15)."""
    from torch.fx._lazy_graph_module import _use_lazy_graph_module

    return _use_lazy_graph_module(True)


MUST_BE_IN_BACKWARD = {"partitioner_tag": "must_be_in_backward"}
"""Meta of a node that min-cut leaves to the backward graph, with all that reads it (2.11-2.15)."""


REALIZED_TO_STRIDES = "inductor_realize_to_strides"
"""Meta of a node whose value Inductor must lay out with the strides of its fake (2.11-2.15)."""


def keeps_graph() -> bool:
    """Say whether the backward pass that runs here keeps its graph for another one (2.11-2.15)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def is_random(node: fx.Node) -> bool:
    """Say whether a node draws random numbers (2.11-2.15)."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def fake_mode() -> Any:
    """Return a new mode whose tensors hold no data; real ones may be mixed in (2.11-2.15)."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def size_hint(size: Any) -> int:
    """Return a size as a number, without a guard: for a symbol what the trace saw (2.11-2.15)."""
    if isinstance(size, int):
        return size
    hint = size.node.hint
    return 1 if hint is None else int(hint)


def layout_hint(tensor: torch.Tensor) -> tuple[list[int], list[int], int]:
    """Return sizes and strides as numbers, without a guard, and how many elements they reach over.

    Example:
        >>> layout_hint(torch.empty(1, 3).expand(2, 3))
        ([2, 3], [0, 1], 3)
    """
    sizes = [size_hint(size) for size in tensor.shape]
    strides = [size_hint(stride) for stride in tensor.stride()]
    reach = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    return sizes, strides, 0 if 0 in sizes else reach + 1


def hash_files(paths: tuple[str, ...], extra: str = "") -> bytes:
    """Hash the contents of source files with a salt (2.11-2.15; cached for the last call only)."""
    from torch._inductor.custom_graph_pass import get_hash_for_files

    return get_hash_for_files(paths, extra)


def compile_counters() -> Mapping[str, Mapping[str, int]]:
    """Return Dynamo's, Inductor's and AOTAutograd's running counters (2.11-2.15)."""
    from torch._dynamo.utils import counters

    return counters


def registered_backends() -> Mapping[str, Callable[..., Any]]:
    """Return the loaded backends of torch's registry, built-ins included, by name (2.11-2.15).

    The first call runs torch's lazy import of its backends.
    """
    from torch._dynamo.backends import registry

    registry._lazy_import()
    return registry._COMPILER_FNS


def register_backend(fn: Callable[..., Any], *, name: str, tags: tuple[str, ...]) -> None:
    """Add a plain function to torch's registry (2.11-2.15)."""
    from torch._dynamo.backends import registry

    # Up to 2.13 torch asks `fn not in _BACKENDS`, a dict of names.
    registry._COMPILER_FNS.pop(name, None)
    registry.register_backend(fn, name=name, tags=tags)  # type: ignore[arg-type]


def forget_backend(name: str, entry_point: EntryPoint | None) -> None:
    """Take a name out of torch's registry, or give it back to an entry point (2.11-2.15)."""
    from torch._dynamo.backends import registry

    registry._COMPILER_FNS.pop(name, None)
    registry._BACKENDS.pop(name, None)
    tags: dict[str, Any] = getattr(registry, "_BACKEND_TAGS", {})  # 2.14, 2.15
    tags.pop(name, None)
    if entry_point is not None:
        registry._BACKENDS[name] = entry_point


def backend_tags(name: str) -> tuple[str, ...] | None:
    """Return the tags of a loaded backend of torch's registry, None if there is none (2.11-2.15).

    They are kept by name since 2.14, before as an attribute of the function.
    """
    from torch._dynamo.backends import registry

    found = registered_backends().get(name)
    if found is None:
        return None
    by_name: dict[str, tuple[str, ...]] | None = getattr(registry, "_BACKEND_TAGS", None)
    return tuple(getattr(found, "_tags", ()) if by_name is None else by_name.get(name, ()))


def unknown_backend_error(base: type[Exception]) -> type[Exception]:
    """Return a class that is torch's `InvalidBackend` as well as `base` (2.11-2.15)."""
    return _unknown_backend_error(base)


@functools.cache
def _unknown_backend_error(base: type[Exception]) -> type[Exception]:
    from torch._dynamo.exc import InvalidBackend

    def init(self: Exception, message: str) -> None:  # torch's own takes a name
        Exception.__init__(self, message)

    body = {"__init__": init, "__module__": base.__module__, "__doc__": "No such backend."}
    return type("UnknownBackendError", (base, InvalidBackend), body)


def default_store() -> Any:
    """Return the key-value store that the default process group was built with (2.11-2.15)."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def own_store() -> Any:
    """Return the default group's store through a connection of its own, where it can have one.

    A call that blocks holds a connection, so that a thread needs another one (2.11-2.15).
    """
    store = default_store()
    try:
        return store.clone()
    except (NotImplementedError, RuntimeError):  # stores without a server have no connection
        return store


@functools.cache
def ops_made_in_place() -> frozenset[Any]:
    """Return the operators that Inductor may turn into ones that write their input (2.11-2.15)."""
    from torch._inductor.fx_passes import reinplace

    return frozenset({*reinplace.inplaceable_ops, *reinplace.inplaceable_foreach_ops})


def group_store(group: Any) -> Any:
    """Return the key-value store of a process group, shared by its ranks alone (2.11-2.15)."""
    from torch.distributed.distributed_c10d import _get_process_group_store

    return _get_process_group_store(group)


def group_timeout(group: Any) -> timedelta:
    """Return how long a collective of a process group may take (2.11-2.15)."""
    return group._get_backend(torch.device("cpu")).options._timeout


def compile_in_place(
    module: torch.nn.Module,
    backend: Any,
    *,
    around: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda call: call,
    **kwargs: Any,
) -> None:
    """Let calls of `module` run compiled, as `Module.compile` does (2.11-2.15).

    `around` wraps what calls it. `Module.compile` hands `_call_impl` to Dynamo, which up to 2.13 skips frames of torch.nn: a root such as
    nn.Sequential would then not be captured at all. One frame of our own is always captured.
    """
    call = around(compiled_call(module, backend, **kwargs))
    module._compiled_call_impl = compiling_again(module, call)


def compiled_call(
    module: torch.nn.Module, backend: Any, *, is_forward_alone: bool = False, **kwargs: Any
) -> Callable[..., Any]:
    """Return what calls `module` compiled; see `compile_in_place` (2.11-2.15).

    Args:
        module: as it is; a later change of its hooks is not noticed.
        backend: a name or a callable.
        is_forward_alone: leave the module's own hooks to the caller.
        kwargs: for torch.compile.
    """
    _ignore_logging()
    # A class may define a __call__ of its own; nn.Module's only chooses what to run.
    call = module.forward if is_forward_alone else module._call_impl
    if type(module).__call__ is not torch.nn.Module.__call__ and not is_forward_alone:
        call = functools.partial(type(module).__call__, module)

    def enter(*args: Any, **kwds: Any) -> Any:
        return call(*args, **kwds)

    # Dynamo keeps compiled entries, and counts them against its limit, by code object: a copy per
    # module keeps modules apart.
    code = enter.__code__
    code = code.replace(
        co_name=type(module).__name__, co_consts=(*code.co_consts, *_forward_place(module))
    )
    own = types.FunctionType(code, globals(), code.co_name, None, enter.__closure__)
    if callable(backend):
        own.backend = backend  # type: ignore[attr-defined]
        backend = _Backend(backend)
    weakref.finalize(own, _forget_entries, code).atexit = False  # type: ignore[misc]
    return torch.compile(own, backend=backend, **kwargs)


class _Backend:
    """What Dynamo is given in the place of a backend, which ends with the function that it compiles.

    Dynamo keeps every backend for good: in `cached_backends`, and in entries of the code of classes
    whose forward breaks, also once their guards have found that the module is gone (2.11-2.15).
    """

    def __init__(self, backend: Callable[..., Any]) -> None:
        self._backend = weakref.ref(backend)
        self.compiler_name = getattr(backend, "compiler_name", type(backend).__name__)

    def __call__(self, *args: Any, **options: Any) -> Any:
        backend = self._backend()
        if backend is None:
            raise RuntimeError(f"what {self.compiler_name} compiled for has been deleted")
        return backend(*args, **options)


def _forget_entries(code: types.CodeType) -> None:
    """Drop Dynamo's entries of a function that is gone (2.11-2.15).

    They would live on: they hold the key of a weak dict, `orig_code_map`, whose value is the code.
    """
    from torch._C._dynamo.eval_frame import reset_code

    reset_code(code)


def _forward_place(module: torch.nn.Module) -> tuple[tuple[str, str, int], ...]:
    """Return a constant by which records name the module's forward in place of our function."""
    from torchloom._torch import introspect  # which needs Dynamo

    forward = getattr(type(module).forward, "__code__", None)
    if forward is None:
        return ()
    return ((introspect.FORWARD_PLACE, forward.co_filename, forward.co_firstlineno),)


def is_compiled_module(module: torch.nn.Module) -> bool:
    """Say whether torch.compile or Module.compile has been applied to a module (2.11-2.15)."""
    from torch._dynamo.eval_frame import OptimizedModule

    return isinstance(module, OptimizedModule) or module._compiled_call_impl is not None


def why_no_dynamo() -> str | None:
    """Return what keeps torch.compile from working on this Python and platform, or None."""
    from torch._dynamo.eval_frame import check_if_dynamo_supported

    try:
        check_if_dynamo_supported()
    except RuntimeError as error:
        return str(error)
    return None


def _ignore_logging() -> None:
    """Let Dynamo skip the once-only warnings that transformers adds to loggers (2.11-2.15).

    A log call would otherwise break the graph, e.g. in GPT-2's attention mask.
    """
    warn_once = getattr(logging.Logger, "warning_once", None)
    if warn_once is not None:
        torch._dynamo.config.ignore_logging_functions.add(warn_once)


def compiled_in_place(module: torch.nn.Module) -> Callable[..., Any] | None:
    """Return what calls of a module run, None where they run eagerly (2.11-2.13)."""
    return module._compiled_call_impl


def call_in_place(module: torch.nn.Module, call: Callable[..., Any] | None) -> None:
    """Let calls of a module run what `compiled_in_place` returned (2.11-2.13)."""
    module._compiled_call_impl = call


def is_restart(error: BaseException) -> bool:
    """Say whether Dynamo is about to capture the same code again, having learnt something (2.11-2.13)."""
    from torch._dynamo.exc import RestartAnalysis

    return isinstance(error, RestartAnalysis)


def recompile_limit() -> int:
    """Return how many captures of one function torch compiles before it runs it eagerly (2.11-2.13)."""
    from torch._dynamo import config

    return config.recompile_limit  # type: ignore[attr-defined]


def forget_compiled_call(module: torch.nn.Module) -> None:
    """Let calls of `module` run eagerly again (2.11-2.15)."""
    module._compiled_call_impl = None


def bisect_status_file() -> str | None:
    """Return the state file of an unfinished compiler bisection, which every compile obeys."""
    from torch._inductor.compiler_bisector import CompilerBisector

    path = Path(CompilerBisector.get_dir()) / "bisect_status.txt"
    return str(path) if path.exists() else None


def inductor_config() -> dict[str, Any]:
    """Return a copy of Inductor's settings (2.11-2.15)."""
    from torch._inductor import config

    return dict(config.get_config_copy())  # type: ignore[attr-defined]


def inductor_cache_dir() -> str:
    """Return the folder of Inductor's caches (2.11-2.15)."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return cache_dir()


def keep_calls(overload: Any) -> None:
    """Let compilers keep each call of an operator, in order, though it returns nothing (2.11-2.15)."""
    from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

    _register_effectful_op(overload, _EffectType.ORDERED)


def has_autograd_kernel(overload: Any) -> bool:
    """Return whether an operator has a backward of its own (2.11-2.15)."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), "Autograd")
