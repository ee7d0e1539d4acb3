"""The only door to private torch: one name per internal, with the versions it is known for.

Everything here was read in torch 2.11, 2.12 and 2.13. When upstream moves, this file changes and
no other. Compiler internals are imported inside the functions that need them, because importing
them costs seconds that eager users should not pay.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass as CustomGraphPass  # 2.11-2.13
from torch._ops import OpOverload as OpOverload  # 2.11-2.13
from torch.fx.graph import _BoxedCodeGen

BoxedCodeGen = _BoxedCodeGen
"""Code generation for functions that take one list and empty it (2.11-2.13)."""


def inductor_compile(
    gm: fx.GraphModule, example_inputs: Sequence[Any], patches: Mapping[str, Any]
) -> Callable[..., Any]:
    """Compile a Dynamo graph with Inductor under config patches (2.11-2.13).

    The patches also hold for the backward graph, which is compiled later.
    """
    from torch._inductor.compile_fx import compile_fx

    compiled: Any = compile_fx(gm, list(example_inputs), config_patches=dict(patches))
    return compiled


def load_inductor() -> None:
    """Import Inductor now, as `torch.compile(backend="inductor")` does when it is called (2.11-2.13).

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
) -> Callable[..., Any]:
    """Run AOTAutograd over a Dynamo graph with own compilers and partitioner (2.11-2.13)."""
    from torch._dynamo.backends.common import aot_autograd

    backend = aot_autograd(
        fw_compiler=forward,
        bw_compiler=backward,
        partition_fn=partition,
        inference_compiler=inference,
    )
    return backend(gm, list(example_inputs))


def boxed(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return `fn` with the calling convention of compiled graphs: one list (2.11-2.13)."""
    from torch._functorch.aot_autograd import make_boxed_func

    return fn if getattr(fn, "_boxed_call", False) else make_boxed_func(fn)


def min_cut_partition(joint: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
    """Split a joint graph by min-cut, obeying the recompute tags of its nodes (2.11-2.13)."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    return min_cut_rematerialization_partition(joint, joint_inputs, **kwargs)


def hash_files(paths: tuple[str, ...], extra: str = "") -> bytes:
    """Hash the contents of source files with a salt (2.11-2.13; cached for the last call only)."""
    from torch._inductor.custom_graph_pass import get_hash_for_files

    return get_hash_for_files(paths, extra)


def compile_counters() -> Mapping[str, Mapping[str, int]]:
    """Return Dynamo's, Inductor's and AOTAutograd's running counters (2.11-2.13)."""
    from torch._dynamo.utils import counters

    return counters


def lookup_backend(name: str) -> Callable[..., Any]:
    """Return the function of a registered torch.compile backend (2.11-2.13)."""
    from torch._dynamo import lookup_backend as lookup

    return lookup(name)


def default_store() -> Any:
    """Return the key-value store that the default process group was built with (2.11-2.13)."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def compile_in_place(module: torch.nn.Module, backend: Any, **kwargs: Any) -> None:
    """Let calls of `module` run compiled, as `Module.compile` does (2.11-2.13).

    `Module.compile` hands `_call_impl` to Dynamo, which skips frames of torch.nn: a root such as
    nn.Sequential would then not be captured at all. One frame of our own is always captured.
    """
    _ignore_logging()
    call = module._call_impl

    def enter(*args: Any, **kwds: Any) -> Any:
        return call(*args, **kwds)

    module._compiled_call_impl = torch.compile(enter, backend=backend, **kwargs)


def _ignore_logging() -> None:
    """Let Dynamo skip the once-only warnings that transformers adds to loggers (2.11-2.13).

    A log call would otherwise break the graph, e.g. in GPT-2's attention mask.
    """
    warn_once = getattr(logging.Logger, "warning_once", None)
    if warn_once is not None:
        torch._dynamo.config.ignore_logging_functions.add(warn_once)


def forget_compiled_call(module: torch.nn.Module) -> None:
    """Let calls of `module` run eagerly again (2.11-2.13)."""
    module._compiled_call_impl = None


def inductor_cache_dir() -> str:
    """Return the folder of Inductor's caches (2.11-2.13)."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return cache_dir()
