"""What Dynamo does with a call: the compiled function behind what is called, which entries it asks, what runs as it is.

To run what cannot be compiled
as it is, torch has a setting, `suppress_errors`, which holds for all that compiles while it is set. Here the callback
of one compiled function is replaced in its closure; where there is none, errors of compiles are raised.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CodeType, MethodType, SimpleNamespace
from typing import Any, NamedTuple

from torchloom._torch.introspect import CacheEntry, guard_leaves


class Compilation(NamedTuple):
    """How a function was handed to torch.compile."""

    backend: Any
    """What entries are compared with; None where that is not known."""
    region: int
    """Number of `isolate_recompiles=True`; -1 where entries are shared."""
    limit: int | None
    """`recompile_limit=` of the function."""


def compilation_of(fn: Any) -> Compilation | None:
    """Return how what torch.compile returned is compiled; None for anything else."""
    from torch._dynamo.eval_frame import innermost_backend

    wrapper = _wrapper_of(fn)
    if wrapper is None:
        return None
    cells = zip(wrapper.__code__.co_freevars, wrapper.__closure__ or (), strict=False)
    callback = next((cell.cell_contents for name, cell in cells if name == "callback"), None)
    convert = getattr(callback, "_torchdynamo_orig_backend", None)
    return Compilation(
        None if convert is None else innermost_backend(convert),
        getattr(wrapper, "_isolate_recompiles_id", -1),
        getattr(convert, "_recompile_limit", None),
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


def decided_without_guards(fn: Any) -> str | None:
    """Return what decides about all calls whatever the guards say, in words; None if nothing does."""
    from torch._dynamo import config, eval_frame

    stance = eval_frame._stance
    if stance.stance != "default" or getattr(stance, "skip_guard_eval_unsafe", False):
        return f"torch.compiler.set_stance is in force ({stance.stance})"
    if config.disable:
        return "torch._dynamo.config.disable is set"
    return "torch.compiler.disable stands in front of it" if _is_disabled(fn) else None


def _is_disabled(fn: Any) -> bool:
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


def is_same_backend(entry: CacheEntry, how: Compilation) -> bool:
    """Return whether an entry was compiled by the backend of the call."""
    return how.backend is None or _is_same(entry.backend, how.backend)


def _is_same(backend: Any, other: Any) -> bool:
    """Compare as Dynamo does: one object is the same, and what cannot be compared is not."""
    try:
        return backend is other or bool(backend == other)
    except Exception:  # noqa: BLE001  `==` of an object of the program's may raise anything
        return False


def num_alike(entries: Sequence[CacheEntry], values: Mapping[str, Any]) -> int:
    """Return how many entries count against the recompile limit of a call.

    Args:
        entries: those of the function in the region of the call.
        values: the local variables with which the call begins.
    """
    from torch._dynamo import cache_size

    frame: Any = SimpleNamespace(f_locals=dict(values))
    # Not by `compute_cache_size`, which takes entries in another form up to torch 2.12.
    return sum(cache_size._has_same_id_matched_objs(frame, each) for each in entries)


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


class FallsBack:
    """A callback of Dynamo's in front of a function's own, which compiles its frames.

    Frames that cannot be compiled run as they are. A whole graph raises before it has begun, see `is_own`, or
    runs as it is where there is nothing to compile.

    Args:
        callback: what torch.compile made for the function.
        code: of the function.
        is_whole_graph: whether the function was compiled as one.
        note: gets the reason of each frame that failed.
    """

    def __init__(
        self,
        callback: Callable[..., Any],
        code: CodeType,
        *,
        is_whole_graph: bool,
        note: Callable[[str], None],
    ) -> None:
        self._callback, self._code = callback, code
        self._is_whole_graph, self._note = is_whole_graph, note
        self._thread = threading.local()
        # What entries are compared with.
        self._torchdynamo_orig_backend: Any = callback._torchdynamo_orig_backend  # type: ignore[attr-defined]

    def __call__(self, frame: Any, *rest: Any) -> Any:
        """Compile a frame, as Dynamo asks."""
        from torch._dynamo import config, convert_frame

        # No other function is compiled while the setting holds.
        with convert_frame.compile_lock, _noted(self._note):
            if self._is_whole_graph:
                return self._compile_whole(frame, *rest)
            with config.patch(suppress_errors=True):
                return self._callback(frame, *rest)

    def _compile_whole(self, frame: Any, *rest: Any) -> Any:
        is_own = frame.f_code is self._code
        try:
            found = self._callback(frame, *rest)
        except Exception as error:  # compilers raise anything; it is raised again
            if is_own:
                self._thread.error = error
            raise
        if not is_own or getattr(found, "guarded_code", found) is not None:
            return found
        # torch would run it, leave it alone from then on, and raise in the end.
        self._note(getattr(found, "skip_reason", None) or "nothing in it was to compile")
        _count_as_compiled()
        return dataclasses.replace(found, apply_to_code=False)

    def is_own(self, error: Exception) -> bool:
        """Return whether an error ended the compile of the whole function: then nothing of it has run.

        It is forgotten then.
        """
        is_own = getattr(self._thread, "error", None) is error
        self._thread.error = None
        return is_own


def let_fall_back(
    compiled: Any, code: CodeType, *, is_whole_graph: bool, note: Callable[[str], None]
) -> FallsBack | None:
    """Let the frames of one compiled function run as they are where they cannot be compiled.

    Args:
        compiled: what torch.compile returned for a function.
        code: of that function.
        is_whole_graph: whether it was compiled as one.
        note: gets the reason of each frame that failed.
    """
    names = compiled.__code__.co_freevars
    if "callback" not in names:
        return None
    cell = compiled.__closure__[names.index("callback")]
    callback = cell.cell_contents
    if not hasattr(callback, "_torchdynamo_orig_backend"):
        return None
    found = FallsBack(callback, code, is_whole_graph=is_whole_graph, note=note)
    cell.cell_contents = found
    return found


def counts_whole_graphs() -> bool:
    """Return whether Dynamo counts what compiles in a call of a whole graph, and raises where nothing does."""
    from torch._C._dynamo import eval_frame as compiled_frames

    return hasattr(compiled_frames, "set_fullgraph_compiled_frame_count")


def _count_as_compiled() -> None:
    """Let a whole graph count as compiled that runs as it is."""
    from torch._C._dynamo import eval_frame as compiled_frames

    if not counts_whole_graphs():
        return
    before = compiled_frames.set_fullgraph_compiled_frame_count(1)
    if before != 0:
        compiled_frames.set_fullgraph_compiled_frame_count(before)


@contextmanager
def _noted(note: Callable[[str], None]) -> Iterator[None]:
    """Tell why compiles inside the block fail, those that raise and those that do not."""
    from torch._dynamo import utils

    found = getattr(utils, "_compilation_metrics", ())
    last = found[-1] if found else None
    told: list[str] = []
    try:
        yield
    except Exception as error:  # compilers raise anything; it is raised again
        told.append(f"{type(error).__name__}: {error}")
        raise
    finally:
        for metrics in reversed(found):
            if metrics is last:
                break
            if metrics.fail_reason:
                told = [f"{(metrics.fail_type or '').rpartition('.')[2]}: {metrics.fail_reason}"]
        for reason in told:
            note(reason)
