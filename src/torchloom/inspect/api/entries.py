"""What torch.compile holds right now: the entries of a function, which of them fits a call, what its guards cost.

Nothing here compiles or resets anything, and only `overhead` runs the function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import CodeType
from typing import Any, NamedTuple

from torch.utils import benchmark

from torchloom._torch import dispatch, introspect
from torchloom.errors import InspectError
from torchloom.inspect.live.guards import guards_of, resolve_lines
from torchloom.inspect.live.rewritten import continuations_of
from torchloom.inspect.live.target import entries_of, frame_locals, resumed, target_of
from torchloom.inspect.pseudo import bytecode_listing, pseudo_source
from torchloom.inspect.wording.reasons import OTHER_BACKEND, Miss, miss_of
from torchloom.records import Continuation, Guard


class LiveEntry:
    """A compiled version of a function, as torch holds it: a pair of (guard, compiled code).

    Example:
        >>> guard, code = entries(compiled)[0]  # doctest: +SKIP
    """

    def __init__(
        self, raw: Any, depth: int, original: CodeType, namespace: Mapping[str, Any]
    ) -> None:
        # Keeps the function's code alive, and with it the memory that the guards are in.
        self._raw, self.depth, self._original = raw, depth, original
        self._namespace = namespace

    def __iter__(self) -> Iterator[Any]:
        """Unpack as (guard, compiled code)."""
        return iter((self.guard, self.code))

    @property
    def compile_id(self) -> str:
        """Dynamo's id, e.g. "0/1": frame and version."""
        return str(self._raw.compile_id)

    @property
    def function(self) -> str:
        """Name of the function, or of its rest after a graph break."""
        return self._original.co_name

    @property
    def code(self) -> CodeType:
        """The bytecode that runs in place of the function's own."""
        return self._raw.code

    @property
    def guard(self) -> LiveGuard:
        """The condition for using the entry."""
        return LiveGuard(self._raw.guard_manager, self._original)

    @property
    def source(self) -> str:
        """What the bytecode does, as readable pseudo-source."""
        return pseudo_source(self.code, self.function, original=self._original)

    @property
    def continuations(self) -> list[Continuation]:
        """The code behind its graph breaks, one for each branch, in the order of the calls."""
        return continuations_of(self.code, self._namespace)

    @property
    def original_bytecode(self) -> str:
        """The instructions that Python compiled from the source."""
        return bytecode_listing(self._original)

    @property
    def bytecode(self) -> str:
        """The instructions that Dynamo wrote and that run in their place."""
        return bytecode_listing(self.code, self._original)

    @property
    def is_live(self) -> bool:
        """Whether torch still holds the entry: a reset drops it."""
        held = introspect.cache_entries(self._original)
        return any(entry.code is self.code for entry in held)

    @property
    def backend(self) -> str:
        """Name of the backend that compiled it."""
        return introspect.backend_name(self._raw)

    def __repr__(self) -> str:
        return f"<entry {self.compile_id} of {self.function}, {len(self.guard)} guards>"


class LiveGuard:
    """The guards of one entry."""

    def __init__(self, manager: Any, code: CodeType) -> None:
        self._manager, self._code = manager, code

    def records(self) -> list[Guard]:
        """Return every guard as data."""
        found = guards_of(self._manager)
        resolve_lines(found, self._code)
        return found

    def __len__(self) -> int:
        return len(self.records())

    def __str__(self) -> str:
        return "\n".join(guard.english for guard in self.records())


def entries(fn: Any, *, resume: bool = False) -> list[LiveEntry]:
    """Return the entries that torch.compile holds for a function, the oldest first.

    Args:
        fn: what torch.compile returned, the function it was given, a module, or a method.
        resume: include the entries of the code behind graph breaks.

    Raises:
        InspectError: there is no Python function behind `fn`.

    Example:
        >>> compiled = torch.compile(lambda x: x + 1, backend="eager")
        >>> len(entries(compiled))
        0
    """
    target = target_of(fn)
    found = []
    for depth, code in resumed(target):
        if depth and not resume:
            continue
        # Dynamo keeps the most recently used entry in front.
        live = [
            LiveEntry(raw, depth, code, target.fn.__globals__) for raw in entries_of(target, code)
        ]
        found += sorted(live, key=lambda entry: sort_key(entry.compile_id))
    return found


def sort_key(compile_id: str) -> tuple[int, ...]:
    """Return a key that sorts compile ids by age: 0/2 before 0/10."""
    return tuple(int(part) for part in compile_id.split("/") if part.isdigit())


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
        failure = failure_of(entry, how, values)
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


def failure_of(
    entry: introspect.CacheEntry, how: dispatch.Compilation | None, values: dict[str, Any]
) -> str | None:
    """Return the check of an entry that a call fails, in torch's words; None if the entry fits."""
    if introspect.is_invalid(entry.guard_manager):
        return str(entry.guard_manager.invalidation_reason)
    failure = introspect.guard_failure(entry, values)
    if failure is None and how is not None and not dispatch.is_same_backend(entry, how):
        return f"{OTHER_BACKEND}{introspect.backend_name(entry)}"
    return failure


_MEASURED_S = 0.15


class Overhead(NamedTuple):
    """Microseconds per call: medians of `torch.utils.benchmark`."""

    eager_us: float
    compiled_us: float
    guard_us: float
    """Time of checking the guards of the entry that the call uses."""
    num_guards: int

    def __str__(self) -> str:
        lines = [
            f"eager     {self.eager_us:9.2f} us",
            f"compiled  {self.compiled_us:9.2f} us",
            f"guards    {self.guard_us:9.2f} us ({self.num_guards} guards)",
        ]
        return "\n".join([*lines, self.advice])

    @property
    def advice(self) -> str:
        """What to do, by these figures."""
        if self.compiled_us <= self.eager_us:
            return "compiling pays for this call"
        if self.guard_us > 0.5 * (self.compiled_us - self.eager_us):
            return "guards are most of the cost: compile a larger function, or fewer parameters"
        return "the fixed cost of a compiled call outweighs the work: compile a larger function"


def overhead(fn: Any, /, *args: Any, **kwargs: Any) -> Overhead:
    """Measure a call of a compiled function: eager, compiled, and its guards alone.

    Runs the function a few hundred times, side effects included. Compiles nothing: call the function
    once before.

    Args:
        fn: what torch.compile returned.
        args: positional arguments of the call to measure.
        kwargs: keyword arguments of the call to measure.

    Raises:
        InspectError: the function is not compiled, or no entry fits these arguments.

    Example:
        >>> compiled = torch.compile(lambda x: x + 1, backend="eager")  # doctest: +SKIP
        >>> compiled(x); print(overhead(compiled, x))  # doctest: +SKIP
    """
    target = target_of(fn)
    if fn is target.fn:
        raise InspectError(
            f"{target.name} itself is not compiled: pass what torch.compile returned"
        )
    call = explain_call(fn, *args, **kwargs)
    if call.hit is None:
        raise InspectError(
            f"no entry of {target.name} fits this call, so there is nothing to measure: {call}"
        )
    values = frame_locals(target, args, kwargs)
    raw = next(e for e in introspect.cache_entries(target.code) if str(e.compile_id) == call.hit)
    check = raw.guard_manager.check
    given = (*target.leading, *args)
    return Overhead(
        eager_us=_median_us(lambda: target.fn(*given, **{**target.keywords, **kwargs})),
        compiled_us=_median_us(lambda: fn(*args, **kwargs)),
        guard_us=_median_us(lambda: check(values)),
        num_guards=len(guards_of(raw.guard_manager)),
    )


def _median_us(run: Callable[[], Any]) -> float:
    timer = benchmark.Timer("run()", globals={"run": run})
    return timer.blocked_autorange(min_run_time=_MEASURED_S).median * 1e6
