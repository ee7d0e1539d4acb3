"""`torchloom.overhead`: time a call eagerly, compiled, and its guards alone."""

from __future__ import annotations

import statistics
import timeit
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torchloom._torch import introspect
from torchloom.errors import InspectError
from torchloom.inspect.api.explain_call import explain_call
from torchloom.inspect.live.guards import guards_of
from torchloom.inspect.live.target import frame_locals, target_of

_ROUNDS = 7
_ROUND_S = 0.02


class Overhead(NamedTuple):
    """Microseconds per call: medians over 7 rounds in which the three take turns."""

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
    runs: dict[str, Callable[[], Any]] = {
        "eager": lambda: target.fn(*given, **{**target.keywords, **kwargs}),
        "compiled": lambda: fn(*args, **kwargs),
        "guard": lambda: check(values),
    }
    medians_us = _medians_us(runs)
    return Overhead(
        eager_us=medians_us["eager"],
        compiled_us=medians_us["compiled"],
        guard_us=medians_us["guard"],
        num_guards=len(guards_of(raw.guard_manager)),
    )


def _medians_us(runs: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    """Return the median microseconds of each run. The runs take turns, so load on the machine hits all alike."""
    samples_s: dict[str, list[float]] = {name: [] for name in runs}
    numbers = {name: _number(run) for name, run in runs.items()}
    for _ in range(_ROUNDS):
        for name, run in runs.items():
            samples_s[name].append(timeit.timeit(run, number=numbers[name]) / numbers[name])
    return {name: statistics.median(found) * 1e6 for name, found in samples_s.items()}


def _number(run: Callable[[], Any]) -> int:
    """Return how many calls fill one round."""
    run()
    once = max(timeit.timeit(run, number=3) / 3, 1e-8)
    return max(1, min(1000, int(_ROUND_S / once)))
