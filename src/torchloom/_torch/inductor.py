"""Inductor: compiling with it, its settings, its folder."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from torch import fx

from torchloom.errors import CompileError
from torchloom.files import why_replaceable


def inductor_compile(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    patches: Mapping[str, Any],
    timed: Callable[[Any, float, str | None], None],
    *,
    backward_at_once: bool = False,
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
    wrap: Callable[[Any, fx.GraphModule], Callable[[Any], Any]] | None = None,
) -> Callable[..., Any]:
    """Compile a Dynamo graph with Inductor.

    Args:
        gm: the graph; Inductor changes it.
        example_inputs: fake tensors and sizes, one for each placeholder.
        patches: options of Inductor, which also hold while the backward graph is compiled.
        timed: told "forward", "backward" or "inference", the seconds that compiling took, and the code of the
            wrapper, None if it came from a cache; not called where a cache held both graphs together.
        backward_at_once: compile the backward graph now, not at its first run.
        around: makes a block in which the graph is traced, and each half of it compiled, whenever that is.
        wrap: told a kind as above and the graph before it is compiled, returns what makes something else of its code.
            The two graphs are then traced even where a cache holds both; each of them may still come from a cache.
    """
    from torch._functorch import config as functorch_config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    @functools.wraps(compile_fx_inner)
    def inner(*args: Any, **kwargs: Any) -> Any:
        kind = "inference" if kwargs.get("is_inference") else "forward"
        kind = "backward" if kwargs.get("is_backward") else kind
        started = time.perf_counter()
        with around(), empty_files_removed():
            wrapped = None if wrap is None else wrap(kind, args[0])
            compiled: Any = compile_fx_inner(*args, **kwargs)
        if wrapped is not None:
            compiled.current_callable = wrapped(compiled.current_callable)
        source = getattr(compiled, "source_code", None)
        timed(kind, time.perf_counter() - started, source or None)
        return compiled

    settings = {"force_non_lazy_backward_lowering": True} if backward_at_once else {}
    if wrap is not None:
        settings["enable_autograd_cache"] = False
    with functorch_config.patch(settings), around():
        compiled: Any = compile_fx(
            gm, list(example_inputs), inner_compile=inner, config_patches=dict(patches)
        )
    return compiled


@contextmanager
def empty_files_removed() -> Iterator[None]:
    """Remove, and name, an empty file of Inductor's cache that an error of the block comes from.

    A linker that is killed leaves one behind, and Inductor takes each file that exists for a whole one.

    Raises:
        CompileError: in place of such an error; the next run compiles the file again.
    """
    try:
        yield
    except Exception as error:
        said = str(error)  # locks, which are empty, lie in a folder with a longer name
        empty = [
            path
            for path in Path(inductor_cache_dir()).glob("??/*")
            if path.name.partition(".")[0] in said and path.is_file() and not path.stat().st_size
        ]
        if not empty:
            raise
        for path in empty:
            path.unlink(missing_ok=True)
        raise CompileError(
            f"{empty[0]} in the compiler's cache was empty, as a compile that was killed leaves it: it is removed "
            "now, run the program again"
        ) from error


def first_unrecordable(gm: fx.GraphModule) -> fx.Node | None:
    """Return the first operator of a graph that Inductor's own CUDA graphs refuse to record."""
    from torch._inductor.utils import get_first_incompatible_cudagraph_node

    return get_first_incompatible_cudagraph_node(gm)


def load_inductor() -> None:
    """Import Inductor now, as `torch.compile(backend="inductor")` does when it is called.

    The import takes a second, which would otherwise count as compile time of the first step.
    """
    import torch._inductor.compile_fx  # noqa: F401


def hash_files(paths: tuple[str, ...]) -> bytes:
    """Hash the contents of source files (cached for the last call only)."""
    from torch._inductor.custom_graph_pass import get_hash_for_files

    return get_hash_for_files(paths)


@functools.cache
def ops_made_in_place() -> frozenset[Any]:
    """Return the operators that Inductor may turn into ones that write their input."""
    from torch._inductor.fx_passes import reinplace

    return frozenset({*reinplace.inplaceable_ops, *reinplace.inplaceable_foreach_ops})


def bisect_status_file() -> str | None:
    """Return the state file of an unfinished compiler bisection, which every compile obeys."""
    from torch._inductor.compiler_bisector import CompilerBisector

    path = Path(CompilerBisector.get_dir()) / "bisect_status.txt"
    return str(path) if path.exists() else None


def inductor_config() -> dict[str, Any]:
    """Return a copy of Inductor's settings."""
    from torch._inductor import config

    return dict(config.get_config_copy())  # type: ignore[attr-defined]


def inductor_cache_dir() -> str:
    """Return the folder of Inductor's caches."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return cache_dir()


REALIZED_TO_STRIDES = "inductor_realize_to_strides"
"""Meta of a node whose value Inductor must lay out with the strides of its fake."""


def why_cache_is_open() -> str:
    """Return why others can write to Inductor's cache and what to do, or nothing.

    Inductor runs the sources and shared objects that lie in its cache, by names that anybody can work out. Left
    alone, the cache is a folder of /tmp, which whoever comes first may make.
    """
    folder = Path(inductor_cache_dir())
    reason = why_replaceable(folder / "any")
    return reason and (
        f"the compiler's cache {folder} is not this user's alone ({reason}), and what lies in it is run as "
        "code: set TORCHINDUCTOR_CACHE_DIR to a folder of your own"
    )
