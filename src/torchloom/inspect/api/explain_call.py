"""What a call of a compiled function would do, as far as that can be known without running it.

Nothing here compiles, runs or resets anything.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from torch import nn

from torchloom._torch import dispatch, introspect, marks, notes
from torchloom.inspect.api.entries import sort_key
from torchloom.inspect.live.rewritten import continuations, graph_name, line_of
from torchloom.inspect.live.target import Target, entries_of, frame_locals, target_of
from torchloom.inspect.wording.english import source_in_words, without_addresses, without_values
from torchloom.inspect.wording.reasons import reason_of

_OTHER_BACKEND = "BACKEND_MATCH: "


class Miss(NamedTuple):
    """Why an entry does not serve a call."""

    compile_id: str
    source: str
    """The value that differs, as Dynamo writes it."""
    text: str
    """The check that failed."""
    english: str


class CallReport(NamedTuple):
    """What a call would do."""

    hit: str | None
    """Compile id of the entry that would serve it, up to its first graph break."""
    hits: tuple[str, ...]
    """All entries whose guards hold; the first one serves."""
    misses: tuple[Miss, ...]
    num_entries: int
    limit: int
    """How many entries Dynamo keeps before it stops compiling the function."""
    action: str
    """What happens:

    - "hit": an entry serves;
    - "compile", "recompile": a new entry is made;
    - "eager": it runs as it is, `why` says why;
    - "error": torch raises, as after `set_stance("fail_on_recompile")`;
    - "unknown": an entry serves up to a graph break, and whether something is compiled behind it depends
      on values that only running it gives; `why` says which branches have no entry.
    """
    why: str = ""
    is_certain: bool = True
    """Whether nothing else decides: guards behind a graph break, on values that are not known yet, hooks of
    a module, or a decorator in front of the compiled function. Of a function that is not compiled itself
    (`torch.compile(fn, disable=True)` is one) it is not certain that it is called compiled."""

    def __str__(self) -> str:
        lines = {
            "hit": f"would use entry {self.hit}",
            "compile": "would compile: nothing has been compiled yet",
            "recompile": f"would recompile: {self.num_entries} of {self.limit} entries, none fits",
            "eager": "would run eagerly",
            "error": "would raise",
            "unknown": f"would use entry {self.hit} up to its graph break"
            if self.hit
            else "cannot be known",
        }
        rows = [lines[self.action] + (f": {self.why}" if self.why else "")]
        rows += [f"  entry {miss.compile_id}: {miss.english}" for miss in self.misses]
        return "\n".join(rows)


def explain_call(fn: Any, /, *args: Any, **kwargs: Any) -> CallReport:
    """Say what a call with these arguments would do, without compiling or running anything.

    Guards on global state (grad mode, autocast) and `torch.compiler.set_stance` are taken as they are
    now: call this where the function would be called. Hand over what torch.compile returned: of the
    plain function it is not known with which backend it would be called.

    Raises:
        InspectError: there is no Python function behind `fn`, or the arguments do not fit it.

    Example:
        >>> explain_call(torch.compile(lambda x: x + 1), 3).action
        'compile'
    """
    target = target_of(fn)
    values = frame_locals(target, args, kwargs)
    behind = dispatch.compiled_behind(fn)
    how = dispatch.compilation_of(behind)
    every = introspect.cache_entries(target.code)
    asked = list(dispatch.asked(every, how)) if how else every
    ours = {id(entry.guard_manager) for entry in entries_of(target, target.code)}
    hits: list[introspect.CacheEntry] = []
    misses: list[Miss] = []
    for entry in asked:
        failure = _failure(entry, how, values)
        if failure is None:
            hits.append(entry)
        elif id(entry.guard_manager) in ours:
            misses.append(miss_of(str(entry.compile_id), failure))
    misses.sort(key=lambda miss: sort_key(miss.compile_id))
    limit = introspect.recompile_limit() if how is None or how.limit is None else how.limit
    action, why, is_certain = _action(fn, target, every, how, values, hits)
    # A decorator may change what it passes on, and modes; hooks are compiled by themselves.
    held = dispatch.held_by_class(fn)
    is_decorated = behind is not fn or dispatch.compiled_behind(held) is not held
    is_certain = is_certain and not is_decorated and not _has_hooks(fn, target)
    is_certain = is_certain and (how is not None or action == "eager")
    serves = bool(hits) and action in ("hit", "unknown") and not dispatch.skips_guards()
    return CallReport(
        hit=str(hits[0].compile_id) if serves else None,
        hits=tuple(str(each.compile_id) for each in hits),
        misses=tuple(misses),
        num_entries=len(ours),
        limit=limit,
        action=action,
        why=why,
        is_certain=is_certain,
    )


def _action(
    fn: Any,
    target: Target,
    every: list[introspect.CacheEntry],
    how: dispatch.Compilation | None,
    values: dict[str, Any],
    hits: list[introspect.CacheEntry],
) -> tuple[str, str, bool]:
    """Return what happens, why, and whether that is certain."""
    if dispatch.is_disabled(fn):
        return "eager", "torch.compiler.disable stands in front of it", True
    mark = marks.mark_of(target.code, _region(how))
    found = _without_guards(target, every, how, mark)
    if found is None and hits:
        found = _behind(target, hits[0], how)
    action, why, is_certain = found or _unfitted(target, every, how, values, mark)
    # Where the mark is not known, Dynamo may have left the function alone since.
    is_certain = is_certain and (mark is not None or not notes.is_met(target.code))
    if action == "eager" and dispatch.is_eager_an_error(how):
        why = f"{why}, and of a whole graph something compiled has to run"
        is_certain = is_certain and not dispatch.calls_functions(target.code)
        action = "error"
    if action == "error" and how is not None and how.falls_back and not dispatch.is_forbidden():
        return "eager", f"{why}; then the original runs", is_certain
    return action, why, is_certain


def _region(how: dispatch.Compilation | None) -> int:
    return -1 if how is None else how.region


def _unfitted(  # noqa: PLR0911
    target: Target,
    every: list[introspect.CacheEntry],
    how: dispatch.Compilation | None,
    values: dict[str, Any],
    mark: marks.Mark | None,
) -> tuple[str, str, bool]:
    """Return what happens to a call that no entry fits, why, and whether that is certain."""
    stance = dispatch.stance()
    if stance == "eager_on_recompile":
        return "eager", "no entry fits, and nothing is compiled in this stance", True
    exceeded = dispatch.exceeded_limit(every, how, values, mark)
    if mark is not None and mark.is_run_only:
        return "eager", f"{exceeded or dispatch.LIMIT_BEFORE}, none fits", True
    if dispatch.is_forbidden():
        return "error", "no entry fits, and torch.compiler.set_stance forbids compiling", True
    if dispatch.is_in_dispatch_mode():
        return "eager", "no entry fits, and inside of a dispatch mode Dynamo compiles nothing", True
    if how is not None and how.is_run_only:
        return "eager", "no entry fits, and torch._dynamo.run compiles nothing", True
    ours = [each for each in every if each.region == _region(how)]
    if ours and dispatch.is_recompile_an_error():
        return "error", "no entry fits, and torch._dynamo.config.error_on_recompile is set", True
    if exceeded is not None:
        is_error = dispatch.is_limit_an_error(how)
        return "error" if is_error else "eager", f"{exceeded}, none fits", True
    failed = notes.last_failure(target.code, every, mark)
    why = "" if failed is None else f"the last attempt ended with {failed}"
    return ("recompile" if ours else "compile"), why, True


def _has_hooks(fn: Any, target: Target) -> bool:
    """Return whether a call of a module runs hooks beside the function that holds its entries."""
    if isinstance(fn, nn.Module) and introspect.has_global_hooks():
        return True
    if not isinstance(fn, nn.Module) or target.wrapped is not None or not target.leading:
        return False
    owner = vars(target.leading[0])
    names = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    return any(owner.get(name) for name in names)


def _without_guards(  # noqa: PLR0911
    target: Target,
    every: list[introspect.CacheEntry],
    how: dispatch.Compilation | None,
    mark: marks.Mark | None,
) -> tuple[str, str, bool] | None:
    """Return what happens to every call, whatever the guards say; None if they decide."""
    stance = dispatch.stance()
    if stance == "force_eager":
        return "eager", 'torch.compiler.set_stance("force_eager") is in force', True
    if dispatch.is_never_compiled(target.code):
        return "eager", "generators are not compiled", True
    if how is not None and not every and dispatch.is_left_alone(target.code):
        return "eager", "Dynamo leaves functions of this file alone, as those of torch.nn", True
    if stance == "eager_then_compile" and not dispatch.has_examples(target.code):
        return "eager", "the first call of the stance eager_then_compile", True
    if dispatch.skips_guards() and every:
        return "unknown", "guards are skipped in this stance", False
    left_alone = notes.left_alone(target.code, every, mark)
    if left_alone is not None:
        # What is in one of torch's own functions is a frame by itself.
        return "eager", left_alone, mark is not None and target.wrapped is None
    if not every and notes.is_forgotten(target.code, mark):
        why = "Dynamo has met the function before, and no longer notes whether it gave it up"
        return "unknown", why, False
    return None


def _failure(
    entry: introspect.CacheEntry, how: dispatch.Compilation | None, values: dict[str, Any]
) -> str | None:
    if introspect.is_invalid(entry.guard_manager):
        return str(entry.guard_manager.invalidation_reason)
    failure = introspect.guard_failure(entry, values)
    if failure is None and not dispatch.is_same_backend(entry, how):
        return f"{_OTHER_BACKEND}compiled by {introspect.backend_name(entry)}"
    return failure


def _behind(
    target: Target, entry: introspect.CacheEntry, how: dispatch.Compilation | None
) -> tuple[str, str, bool]:
    """Return what a call does that an entry serves, by what is compiled behind its graph breaks."""
    open_lines: list[int] = []
    seen: set[int] = set()
    waiting = [entry.code]
    while waiting:
        for _, code in continuations(waiting.pop(), target.fn.__globals__):
            if id(code) in seen:
                continue
            seen.add(id(code))
            every = introspect.cache_entries(code)
            asked = dispatch.asked(every, how) if how else every
            found = [each for each in asked if dispatch.is_same_backend(each, how)]
            waiting += [each.code for each in found]
            mark = marks.mark_of(code, _region(how))
            is_closed = mark is not None and mark.is_run_only
            if not found and not is_closed and notes.left_alone(code, every, mark) is None:
                open_lines.append(line_of(code))
    if open_lines:
        lines = ", ".join(str(line) for line in sorted(set(open_lines)))
        why = f"what follows at line {lines} is not compiled yet, and which way it goes depends on values"
        return "unknown", why, False
    # Code without a graph calls a function that breaks and is compiled by itself.
    return "hit", "", not seen and graph_name(entry.code) is not None


def miss_of(compile_id: str, failure: str) -> Miss:
    """Return a failed guard in words.

    Args:
        compile_id: of the entry.
        failure: the first check that failed, as torch tells it.
    """
    text = without_values(failure.partition("\nUser stack trace")[0].partition("  #")[0].strip())
    if text.startswith(_OTHER_BACKEND):
        english = f"{text.removeprefix(_OTHER_BACKEND)}, this call has another backend"
        return Miss(compile_id, "", text, english)
    quoted = re.match(r"tensor '(.+?)' .*mismatch", text)
    if quoted:
        source = quoted.group(1)
        english = (
            f"{source_in_words(source)}: {without_addresses(text)[len(quoted.group(1)) + 10 :]}"
        )
        return Miss(compile_id, source, text, english)
    reason = reason_of(text)
    english = reason.expected
    if reason.source or reason.actual:
        got = f", got {reason.actual}" if reason.actual else ""
        english = f"{reason.source or 'the call'}: expected {reason.expected}{got}"
    return Miss(compile_id, _source_in(text), text, english)


def _source_in(text: str) -> str:
    """Return the first source expression in the text of a failed guard."""
    start = min((i for i in (text.find("L["), text.find("G[")) if i >= 0), default=-1)
    if start < 0:
        return ""
    depth, end = 0, start
    while end < len(text):
        char = text[end]
        if char == "[":
            depth += 1
        elif char == "]":
            depth -= 1
        elif depth == 0 and not (char.isalnum() or char in "._"):
            break
        end += 1
    return text[start:end]
