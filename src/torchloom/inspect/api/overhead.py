"""`torchloom.overhead`: time a call eagerly, compiled, and its guards alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch.utils import benchmark

from torchloom._torch import introspect
from torchloom.errors import InspectError
from torchloom.inspect.api.explain_call import explain_call
from torchloom.inspect.live.guards import guards_of
from torchloom.inspect.live.target import frame_locals, target_of

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
