"""What Dynamo does with a call: which entries it asks, whether it compiles when none fits. Changes nothing.

The rows of `table.inspection` say which of it a torch lacks, and what is answered there.
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType, MethodType, SimpleNamespace
from typing import Any, NamedTuple

from torchloom._torch import notes
from torchloom._torch.fallback import FallsBack, counts_whole_graphs
from torchloom._torch.introspect import CacheEntry, guard_leaves
from torchloom._torch.marks import Mark


class Compilation(NamedTuple):
    """How a function was handed to torch.compile."""

    backend: Any
    """What entries are compared with; None where that is not known."""
    region: int
    """Number of `isolate_recompiles=True`; -1 where entries are shared."""
    limit: int | None
    """`recompile_limit=` of the function."""
    is_whole_graph: bool
    """Whether failures are raised."""
    is_run_only: bool = False
    """Whether nothing is compiled, as by `torch._dynamo.run`."""
    falls_back: bool = False
    """Whether the original runs where compiling fails, as under torchloom.jit."""


def compilation_of(fn: Any) -> Compilation | None:
    """Return how what torch.compile returned is compiled; None for anything else."""
    from torch._dynamo.eval_frame import innermost_backend

    wrapper = _wrapper_of(fn)
    if wrapper is None:
        return None
    cells = zip(wrapper.__code__.co_freevars, wrapper.__closure__ or (), strict=False)
    found = {name: cell.cell_contents for name, cell in cells if name in ("callback", "self")}
    callback = found.get("callback")
    convert = getattr(callback, "_torchdynamo_orig_backend", None)
    return Compilation(
        None if convert is None else innermost_backend(convert),
        getattr(wrapper, "_isolate_recompiles_id", -1),
        getattr(convert, "_recompile_limit", None),
        type(convert).__name__ == "ConvertFrameAssert",
        callback is False,
        isinstance(callback, FallsBack),
    )


def compiled_behind(fn: Any) -> Any:
    """Return the compiled function that a decorator's function stands in front of, else `fn` itself.

    That the decorator's function has entries says nothing: all functions that it makes share its code.
    """
    if inspect.ismethod(fn):
        inner = compiled_behind(fn.__func__)
        return fn if inner is fn.__func__ else MethodType(inner, fn.__self__)
    if not _may_decorate(fn) or _wrapper_of(fn) is not None:
        return fn
    inner = fn
    for _ in range(20):
        inner = getattr(inner, "__wrapped__", None)
        if inner is None:
            break
        is_jitted = not _may_decorate(inner) and not inspect.ismethod(inner)
        if (is_jitted or inspect.isfunction(inner)) and _wrapper_of(inner) is not None:
            return inner
    return fn


def _may_decorate(fn: Any) -> bool:
    """Return whether something is what decorators make: a function, or a cache in front of one."""
    return inspect.isfunction(fn) or isinstance(fn, type(functools.lru_cache(len)))


def held_by_class(fn: Any) -> Any:
    """Return the function that a call of an object runs, where its class holds it compiled; else None.

    A decorator's function may stand in front of it: see `compiled_behind`.
    """
    import torch

    if inspect.isroutine(fn) or inspect.isclass(fn) or isinstance(fn, functools.partial):
        return None
    is_module = isinstance(fn, torch.nn.Module)
    if isinstance(fn, torch._dynamo.eval_frame.OptimizedModule):
        return None
    for name in ("__call__", "forward") if is_module else ("__call__",):
        if name == "forward" and (vars(fn).get(name) or fn._compiled_call_impl):
            break
        found = inspect.getattr_static(type(fn), name, None)
        if callable(found) and _wrapper_of(compiled_behind(found)) is not None:
            return found
    return None


def is_disabled(fn: Any) -> bool:
    """Return whether torch.compiler.disable stands in front of what was compiled."""
    fn = _run_by(fn)
    for _ in range(20):
        if not inspect.isfunction(fn) or fn.__code__.co_name == "compile_wrapper":
            return False
        # Decorators copy the mark of the function in them, which may be compiled all the same.
        if fn.__dict__.get("_torchdynamo_wrapper_id") == id(fn):
            return bool(fn.__dict__.get("_torchdynamo_disable"))
        fn = fn.__dict__.get("__wrapped__")
    return False


def _run_by(fn: Any) -> Any:
    """Return the function that a call of an object runs: its class has it, unless the object was compiled."""
    import torch

    if inspect.isroutine(fn) or inspect.isclass(fn) or isinstance(fn, functools.partial):
        return getattr(fn, "__func__", fn)
    held = held_by_class(fn)
    if held is not None or _wrapper_of(fn) is not None:
        return held
    name = "forward" if isinstance(fn, torch.nn.Module) else "__call__"
    own = vars(fn).get(name) if name == "forward" else None
    return inspect.getattr_static(type(fn), name, None) if own is None else own


def _wrapper_of(fn: Any) -> Any:
    """Return the function of Dynamo's that stands in front of a compiled one."""
    import torch

    for _ in range(20):  # wrappers in wrappers
        if getattr(getattr(fn, "__code__", None), "co_name", "") == "compile_wrapper":
            return fn
        inner = getattr(fn, "__torchloom_compiled__", None)
        if inner is not None:
            fn = inner
        elif isinstance(fn, functools.partial):
            fn = fn.func
        elif isinstance(fn, torch._dynamo.eval_frame.OptimizedModule):
            fn = fn.forward
        elif hasattr(fn, "__func__"):
            fn = fn.__func__
        else:
            held = held_by_class(fn)
            own = None
            if held is None and isinstance(fn, torch.nn.Module):
                own = fn._compiled_call_impl or vars(fn).get("forward")
            fn = own if held is None else compiled_behind(held)
        if fn is None:
            return None
    return None


def asked(entries: Sequence[CacheEntry], how: Compilation | None) -> Iterator[CacheEntry]:
    """Yield the entries that a call looks through, in that order; see also `is_same_backend`."""
    region = -1 if how is None else how.region
    yield from (entry for entry in entries if entry.region == region)
    if region != -1:
        yield from (entry for entry in entries if entry.region == -1)


def is_same_backend(entry: CacheEntry, how: Compilation | None) -> bool:
    """Return whether an entry was compiled by the backend of the call."""
    from torch._dynamo import eval_frame

    backend = None if how is None else how.backend
    forced = getattr(eval_frame._stance, "backend", None)
    if forced is not None and how is not None:
        backend = eval_frame.get_compiler_fn(forced)
        return _is_same(_innermost(entry.backend), _innermost(backend))
    return backend is None or _is_same(entry.backend, backend)


def _is_same(backend: Any, other: Any) -> bool:
    """Compare as Dynamo does: one object is the same, and what cannot be compared is not."""
    try:
        return backend is other or bool(backend == other)
    except Exception:  # noqa: BLE001  `==` of an object of the program's may raise anything
        return False


def _innermost(backend: Any) -> Any:
    from torch._dynamo.eval_frame import innermost_backend

    return innermost_backend(backend)


def stance() -> str:
    """Return what `torch.compiler.set_stance` asks for; "eager_on_recompile" where Dynamo is disabled."""
    from torch._dynamo import config, eval_frame

    found = str(eval_frame._stance.stance)
    return "eager_on_recompile" if config.disable and found == "default" else found


def is_forbidden() -> bool:
    """Return whether `torch.compiler.set_stance` forbids compiling."""
    return stance() == "fail_on_recompile"


def skips_guards() -> bool:
    """Return whether `set_stance(skip_guard_eval_unsafe=True)` is in force."""
    from torch._dynamo import eval_frame

    return bool(getattr(eval_frame._stance, "skip_guard_eval_unsafe", False))


def is_limit_an_error(how: Compilation | None) -> bool:
    """Return whether a call over a recompile limit raises."""
    from torch._dynamo import config

    whole = how is not None and how.is_whole_graph
    return whole or bool(getattr(config, "fail_on_recompile_limit_hit", False))


def is_in_dispatch_mode() -> bool:
    """Return whether a mode of the program's is active inside of which Dynamo compiles nothing."""
    try:
        from torch._dynamo import config
        from torch.utils import _python_dispatch as modes

        if getattr(config, "inline_torch_dispatch_torch_compile", False):
            return bool(modes.any_torch_dispatch_mode_on_stack())
        return bool(modes.is_in_any_mode_without_ignore_compile_internals())
    except (ImportError, AttributeError):
        return False


def is_recompile_an_error() -> bool:
    """Return whether Dynamo is told to raise where no entry fits."""
    from torch._dynamo import config

    return bool(getattr(config, "error_on_recompile", False))


def is_never_compiled(code: CodeType) -> bool:
    """Return whether a function is of a kind that Dynamo runs as it is."""
    return bool(code.co_flags & inspect.CO_GENERATOR)


def has_examples(code: CodeType) -> bool:
    """Return whether the stance `eager_then_compile` has seen a call of a function."""
    from torch._dynamo import eval_frame

    key = code.co_filename + str(code.co_firstlineno)
    examples = getattr(eval_frame, "get_example_inputs", None)
    return examples is None or bool(examples(key))


def exceeded_limit(
    entries: Sequence[CacheEntry],
    how: Compilation | None,
    values: Mapping[str, Any],
    mark: Mark | None,
) -> str | None:
    """Return the limit that keeps a call that no entry fits from being compiled, in words.

    Args:
        entries: all of the function.
        how: as it is compiled.
        values: the local variables with which the call begins.
        mark: what Dynamo keeps on the function's code.
    """
    from torch._dynamo import cache_size, config, convert_frame

    region = -1 if how is None else how.region
    frame: Any = SimpleNamespace(f_locals=dict(values))
    own = [entry for entry in entries if entry.region == region]
    # Not by `compute_cache_size`, which takes entries in another form up to torch 2.12.
    num_alike = sum(cache_size._has_same_id_matched_objs(frame, each) for each in own)
    limit = config.recompile_limit if how is None or how.limit is None else how.limit
    if num_alike >= limit:
        return f"the limit of {limit} entries is reached"
    most = config.accumulated_recompile_limit
    frames = {entry.compile_id.frame_id for entry in entries}
    if mark is not None and mark.frame_id is not None:
        frames.add(mark.frame_id)
    attempts = max((convert_frame.FRAME_COMPILE_COUNTER.get(each, 0) for each in frames), default=0)
    if max(len(entries), attempts) >= most:
        return f"the limit of {most} compiles in all is reached"
    # The notes do not tell regions apart.
    is_noted = region == -1 and any(notes.was_refused(frame_id, own) for frame_id in frames)
    return LIMIT_BEFORE if mark is None and is_noted else None


LIMIT_BEFORE = "a recompile limit was reached before, and Dynamo remembers it"


def is_eager_an_error(how: Compilation | None) -> bool:
    """Return whether a call in which nothing compiled runs raises: of a whole graph, where torch counts."""
    from torch._dynamo import eval_frame

    whole = how is not None and how.is_whole_graph
    return whole and counts_whole_graphs() and eval_frame._stance.stance == "default"


def calls_functions(code: CodeType) -> bool:
    """Return whether a function calls anything, which Dynamo may have compiled by itself."""
    names = (
        each.opname
        for each in dis.get_instructions(code.replace(co_consts=(None,) * len(code.co_consts)))
    )
    return any(name.startswith("CALL") and "INTRINSIC" not in name for name in names)


def run_only(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs `fn`, with what is compiled of what it calls, and compiles nothing."""
    import torch

    return torch._dynamo.run(fn)


def is_left_alone(fn: Callable[..., Any] | CodeType) -> bool:
    """Return whether Dynamo makes no entries for a function itself, as for those of torch.nn."""
    from torch._dynamo import trace_rules

    return bool(trace_rules.check(fn))


def wrapped_inline(fn: Callable[..., Any]) -> Any:
    """Return the function in which torch.compile puts what has no code of its own: partials, objects."""
    from torch._dynamo.external_utils import wrap_inline

    return wrap_inline(fn)


def is_for_wrapped(entry: CacheEntry, fn: Any) -> bool:
    """Return whether an entry of `wrapped_inline`, whose code all such callables share, may be for `fn`.

    Types and functions tell; values in it may have changed since the entry was made.
    """
    manager = entry.guard_manager
    scope = {"L": {"fn": fn}, **(manager.closure_vars or {})}
    names = dict(manager.global_scope or {})
    for source, kind, parts, _ in guard_leaves(manager):
        if kind not in ("TYPE_MATCH", "ID_MATCH") or not source.startswith("L['fn']"):
            continue
        for part in parts:
            check = part.partition(", type=<")[0].partition("  # ")[0]
            try:
                if not eval(check, names, scope):
                    return False
            except Exception:  # noqa: BLE001  `fn` lacks what the guard looks at, or runs code of the program's
                return False
    return True
