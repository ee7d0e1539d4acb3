"""Predicts what a call does, without making it.

`outcome_of` follows the order in which Dynamo decides: rules that hold for every call, then the entry that fits,
then the rules for a call that no entry fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn

from torchloom._torch import dispatch, introspect, marks, notes
from torchloom.inspect.live.rewritten import continuations, graph_name, line_of
from torchloom.inspect.live.target import TargetFunction, frame_locals, target_of
from torchloom.inspect.wording.miss import OTHER_BACKEND


class CallOutcome(NamedTuple):
    """What happens to a call."""

    action: str
    """As in `CallReport.action`."""
    why: str
    is_certain: bool


class NextCall(NamedTuple):
    """A call that has not been made."""

    fn: Any
    """What would be called."""
    target: TargetFunction
    """The function behind it."""
    values: dict[str, Any]
    """The local variables with which the function would begin."""
    how: dispatch.Compilation | None
    """How torch.compile was called; None for a function that is not compiled itself."""
    every: list[introspect.CacheEntry]
    """All entries at the function's code, including those of other compilations of it."""

    @property
    def asked(self) -> Sequence[introspect.CacheEntry]:
        """The entries whose guards Dynamo would ask, in its order."""
        return list(dispatch.asked(self.every, self.how)) if self.how else self.every

    @property
    def region(self) -> int:
        """Number of the isolated compilation (`isolate_recompiles`), -1 for none."""
        return -1 if self.how is None else self.how.region

    @property
    def limit(self) -> int:
        """How many entries Dynamo keeps before it stops compiling the function."""
        own = None if self.how is None else self.how.limit
        return introspect.recompile_limit() if own is None else own


def next_call(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NextCall:
    """Return a call, without making it.

    Args:
        fn: what would be called.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Raises:
        InspectError: there is no Python function behind `fn`, or the arguments do not fit it.
    """
    target = target_of(fn)
    return NextCall(
        fn,
        target,
        frame_locals(target, args, kwargs),
        dispatch.compilation_of(dispatch.compiled_behind(fn)),
        introspect.cache_entries(target.code),
    )


def failure_of(call: NextCall, entry: introspect.CacheEntry) -> str | None:
    """Return the check of an entry that a call fails, in torch's words; None if the entry fits."""
    if introspect.is_invalid(entry.guard_manager):
        return str(entry.guard_manager.invalidation_reason)
    failure = introspect.guard_failure(entry, call.values)
    if failure is None and not dispatch.is_same_backend(entry, call.how):
        return f"{OTHER_BACKEND}compiled by {introspect.backend_name(entry)}"
    return failure


def outcome_of(call: NextCall, hits: Sequence[introspect.CacheEntry]) -> CallOutcome:
    """Return what happens to a call.

    Args:
        call: not made yet.
        hits: the entries that fit, in the order in which they are asked.
    """
    found = _by_rules(call, hits)
    # A decorator may change what it passes on, and modes; hooks are compiled by themselves.
    held = dispatch.held_by_class(call.fn)
    is_decorated = (
        dispatch.compiled_behind(call.fn) is not call.fn
        or dispatch.compiled_behind(held) is not held
    )
    is_certain = found.is_certain and not is_decorated and not _has_hooks(call)
    is_certain = is_certain and (call.how is not None or found.action == "eager")
    return found._replace(is_certain=is_certain)


def _by_rules(call: NextCall, hits: Sequence[introspect.CacheEntry]) -> CallOutcome:
    if dispatch.is_disabled(call.fn):
        return CallOutcome("eager", "torch.compiler.disable stands in front of it", True)
    mark = marks.mark_of(call.target.code, call.region)
    found = _without_guards(call, mark)
    if found is None and hits:
        found = _behind_breaks(call, hits[0])
    action, why, is_certain = found or _unfitted(call, mark)
    # Where the mark is not known, Dynamo may have left the function alone since.
    is_certain = is_certain and (mark is not None or not notes.is_met(call.target.code))
    # With fullgraph=True, torch raises from 2.12 on when a call runs nothing compiled (pytorch/pytorch#181817).
    if action == "eager" and dispatch.is_eager_an_error(call.how):
        why = f"{why}, and of a whole graph something compiled has to run"
        is_certain = is_certain and not dispatch.calls_functions(call.target.code)
        action = "error"
    falls_back = call.how is not None and call.how.falls_back
    if action == "error" and falls_back and not dispatch.is_forbidden():
        return CallOutcome("eager", f"{why}; then the original runs", is_certain)
    return CallOutcome(action, why, is_certain)


def _without_guards(  # noqa: PLR0911  one return for each rule, in Dynamo's order
    call: NextCall, mark: marks.Mark | None
) -> CallOutcome | None:
    """Return what happens to every call, whatever the guards say; None if the guards decide."""
    code, every, stance = call.target.code, call.every, dispatch.stance()
    if stance == "force_eager":
        return CallOutcome("eager", 'torch.compiler.set_stance("force_eager") is in force', True)
    if dispatch.is_never_compiled(code):
        return CallOutcome("eager", "generators are not compiled", True)
    if call.how is not None and not every and dispatch.is_left_alone(code):
        why = "Dynamo leaves functions of this file alone, as those of torch.nn"
        return CallOutcome("eager", why, True)
    if stance == "eager_then_compile" and not dispatch.has_examples(code):
        return CallOutcome("eager", "the first call of the stance eager_then_compile", True)
    if dispatch.skips_guards() and every:
        return CallOutcome("unknown", "guards are skipped in this stance", False)
    left_alone = notes.left_alone(code, every, mark)
    if left_alone is not None:
        # What is in one of torch's own functions is a frame by itself.
        return CallOutcome("eager", left_alone, mark is not None and call.target.wrapped is None)
    if not every and notes.is_forgotten(code, mark):
        why = "Dynamo has met the function before, and no longer notes whether it gave it up"
        return CallOutcome("unknown", why, False)
    return None


def _unfitted(  # noqa: PLR0911  one return for each rule, in Dynamo's order
    call: NextCall, mark: marks.Mark | None
) -> CallOutcome:
    """Return what happens to a call that no entry fits."""
    if dispatch.stance() == "eager_on_recompile":
        return CallOutcome("eager", "no entry fits, and nothing is compiled in this stance", True)
    exceeded = dispatch.exceeded_limit(call.every, call.how, call.values, mark)
    if mark is not None and mark.is_run_only:
        return CallOutcome("eager", f"{exceeded or dispatch.LIMIT_BEFORE}, none fits", True)
    if dispatch.is_forbidden():
        why = "no entry fits, and torch.compiler.set_stance forbids compiling"
        return CallOutcome("error", why, True)
    if dispatch.is_in_dispatch_mode():
        why = "no entry fits, and inside of a dispatch mode Dynamo compiles nothing"
        return CallOutcome("eager", why, True)
    if call.how is not None and call.how.is_run_only:
        return CallOutcome("eager", "no entry fits, and torch._dynamo.run compiles nothing", True)
    ours = [each for each in call.every if each.region == call.region]
    if ours and dispatch.is_recompile_an_error():
        why = "no entry fits, and torch._dynamo.config.error_on_recompile is set"
        return CallOutcome("error", why, True)
    if exceeded is not None:
        is_error = dispatch.is_limit_an_error(call.how)
        return CallOutcome("error" if is_error else "eager", f"{exceeded}, none fits", True)
    failed = notes.last_failure(call.target.code, call.every, mark)
    why = "" if failed is None else f"the last attempt ended with {failed}"
    return CallOutcome("recompile" if ours else "compile", why, True)


def _behind_breaks(call: NextCall, entry: introspect.CacheEntry) -> CallOutcome:
    """Return what happens to a call that an entry fits, by what is compiled behind its graph breaks."""
    open_lines: set[int] = set()
    seen: set[int] = set()
    waiting = [entry.code]
    while waiting:
        for _, code in continuations(waiting.pop(), call.target.fn.__globals__):
            if id(code) in seen:
                continue
            seen.add(id(code))
            found, is_open = _compiled_at(call, code)
            waiting += [each.code for each in found]
            if is_open:
                open_lines.add(line_of(code))
    if open_lines:
        lines = ", ".join(str(line) for line in sorted(open_lines))
        why = f"what follows at line {lines} is not compiled yet, and which way it goes depends on values"
        return CallOutcome("unknown", why, False)
    # Code without a graph calls a function that breaks and is compiled by itself.
    return CallOutcome("hit", "", not seen and graph_name(entry.code) is not None)


def _compiled_at(call: NextCall, code: Any) -> tuple[list[introspect.CacheEntry], bool]:
    """Return the entries of a continuation, and whether a call that reaches it would compile it."""
    every = introspect.cache_entries(code)
    asked = dispatch.asked(every, call.how) if call.how else every
    found = [each for each in asked if dispatch.is_same_backend(each, call.how)]
    mark = marks.mark_of(code, call.region)
    is_closed = mark is not None and mark.is_run_only
    is_open = not found and not is_closed and notes.left_alone(code, every, mark) is None
    return found, is_open


def _has_hooks(call: NextCall) -> bool:
    """Return whether a call of a module runs hooks beside the function that holds its entries."""
    fn, target = call.fn, call.target
    if isinstance(fn, nn.Module) and introspect.has_global_hooks():
        return True
    if not isinstance(fn, nn.Module) or target.wrapped is not None or not target.leading:
        return False
    owner = vars(target.leading[0])
    names = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    return any(owner.get(name) for name in names)
