"""`torchloom.explain_call`: predict what a call of a compiled function does, without making the call.

Nothing here compiles, runs or resets anything.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torchloom._torch import dispatch, introspect
from torchloom.inspect.api.entries import sort_key
from torchloom.inspect.live.next_call import failure_of, next_call, outcome_of
from torchloom.inspect.live.target import entries_of
from torchloom.inspect.wording.miss import Miss, miss_of


class CallReport(NamedTuple):
    """What a call would do."""

    hit: str | None
    """Compile id of the entry that would serve it, up to its first graph break."""
    hits: tuple[str, ...]
    """All entries whose guards hold; torch uses the first."""
    misses: tuple[Miss, ...]
    num_entries: int
    limit: int
    """How many entries Dynamo keeps before it stops compiling the function."""
    action: str
    """What happens:

    - "hit": torch uses an entry;
    - "compile", "recompile": torch makes a new entry;
    - "eager": the function runs uncompiled; `why` says why;
    - "error": torch raises, as after `set_stance("fail_on_recompile")`;
    - "unknown": torch uses an entry up to a graph break. Which branch follows depends on values that only
      running it gives; `why` names the branches that have no entry.
    """
    why: str = ""
    is_certain: bool = True
    """Whether `action` cannot turn out otherwise. False where guards behind a graph break test values that
    are not known yet, where a module runs hooks, where a decorator wraps the compiled function, and for a
    function that is not compiled itself (such as `torch.compile(fn, disable=True)`)."""

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

    Reads the current global state (grad mode, autocast, `torch.compiler.set_stance`): call this where you
    would call the function. Pass what torch.compile returned; the plain function does not tell which
    backend it would be called with.

    Raises:
        InspectError: there is no Python function behind `fn`, or the arguments do not fit it.

    Example:
        >>> explain_call(torch.compile(lambda x: x + 1), 3).action
        'compile'
    """
    call = next_call(fn, args, kwargs)
    ours = {id(entry.guard_manager) for entry in entries_of(call.target, call.target.code)}
    hits: list[introspect.CacheEntry] = []
    misses: list[Miss] = []
    for entry in call.asked:
        failure = failure_of(call, entry)
        if failure is None:
            hits.append(entry)
        elif id(entry.guard_manager) in ours:
            misses.append(miss_of(str(entry.compile_id), failure))
    misses.sort(key=lambda miss: sort_key(miss.compile_id))
    outcome = outcome_of(call, hits)
    serves = bool(hits) and outcome.action in ("hit", "unknown") and not dispatch.skips_guards()
    return CallReport(
        hit=str(hits[0].compile_id) if serves else None,
        hits=tuple(str(each.compile_id) for each in hits),
        misses=tuple(misses),
        num_entries=len(ours),
        limit=call.limit,
        action=outcome.action,
        why=outcome.why,
        is_certain=outcome.is_certain,
    )
