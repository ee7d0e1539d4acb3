"""What a call of a compiled function would do, as far as that can be known without running it.

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
