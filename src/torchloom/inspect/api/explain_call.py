"""`torchloom.explain_call`: torch's own check of the guards of each entry for a call that is not made.

Nothing here compiles, resets or runs the function.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torchloom._torch import dispatch, introspect
from torchloom.inspect.api.entries import sort_key
from torchloom.inspect.live.target import entries_of, frame_locals, target_of
from torchloom.inspect.wording.reasons import OTHER_BACKEND, Miss, miss_of


class CallReport(NamedTuple):
    """What the guards say of a call."""

    hit: str | None
    """Compile id of the entry that serves it, up to its first graph break."""
    hits: tuple[str, ...]
    """All entries whose guards hold; torch uses the first."""
    misses: tuple[Miss, ...]
    num_entries: int
    limit: int
    """How many entries Dynamo keeps before it stops compiling the function."""
    action: str
    """What follows from the guards:

    - "hit": an entry fits;
    - "compile", "recompile": there is no entry, or none fits;
    - "eager": none fits, and no more are made: the function runs uncompiled, or raises with `fullgraph=True`;
    - "unknown": something else than guards decides; `why` says what.
    """
    why: str = ""

    def __str__(self) -> str:
        words = {
            "hit": f"would use entry {self.hit}",
            "compile": "would compile, unless torch has given the function up: there is no entry",
            "recompile": f"would recompile: {self.num_entries} of {self.limit} entries, none fits",
            "eager": "would run eagerly, or raise with fullgraph=True",
            "unknown": "guards do not decide",
        }
        rows = [words[self.action] + (f": {self.why}" if self.why else "")]
        rows += [f"  entry {miss.compile_id}: {miss.english}" for miss in self.misses]
        return "\n".join(rows)


def explain_call(fn: Any, /, *args: Any, **kwargs: Any) -> CallReport:
    """Ask torch which entry fits a call, and which guard fails in each other one.

    Nothing is compiled, and the function does not run. Guards look at the current global state (grad mode,
    autocast): call this where you would call the function. Pass what torch.compile returned; the plain function does
    not tell which backend it would be called with. What no guard tells is left out: functions that Dynamo gave up,
    hooks of modules, and whether the code behind a graph break is compiled.

    Raises:
        InspectError: there is no Python function behind `fn`, or the arguments do not fit it.

    Example:
        >>> explain_call(torch.compile(lambda x: x + 1), 3).action
        'compile'
    """
    target = target_of(fn)
    how = dispatch.compilation_of(dispatch.compiled_behind(fn))
    values = frame_locals(target, args, kwargs)
    ours = entries_of(target, target.code)
    own = [entry for entry in ours if entry.region == (-1 if how is None else how.region)]
    hits: list[str] = []
    misses: list[Miss] = []
    for entry in dispatch.asked(ours, how):
        failure = _failure(entry, how, values)
        if failure is None:
            hits.append(str(entry.compile_id))
        else:
            misses.append(miss_of(str(entry.compile_id), failure))
    limit = introspect.recompile_limit() if how is None or how.limit is None else how.limit
    action, why = "hit" if hits else "recompile" if own else "compile", ""
    if not hits and dispatch.num_alike(own, values) >= limit:
        action, why = "eager", f"the limit of {limit} entries is reached, none fits"
    beside = dispatch.decided_without_guards(fn)
    if beside is not None:
        action, why = "unknown", beside
    return CallReport(
        hit=hits[0] if action == "hit" else None,
        hits=tuple(hits),
        misses=tuple(sorted(misses, key=lambda miss: sort_key(miss.compile_id))),
        num_entries=len(ours),
        limit=limit,
        action=action,
        why=why,
    )


def _failure(
    entry: introspect.CacheEntry, how: dispatch.Compilation | None, values: dict[str, Any]
) -> str | None:
    """Return the check of an entry that a call fails, in torch's words; None if the entry fits."""
    if introspect.is_invalid(entry.guard_manager):
        return str(entry.guard_manager.invalidation_reason)
    failure = introspect.guard_failure(entry, values)
    if failure is None and how is not None and not dispatch.is_same_backend(entry, how):
        return f"{OTHER_BACKEND}compiled by {introspect.backend_name(entry)}"
    return failure
