"""A backend that runs another one and eager, and names the first node that differs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from torchloom.backends.compare import Tolerance, first_difference
from torchloom.backends.forwarding import Forwarding
from torchloom.backends.graphs import clone_inputs, copy_graph_module, name_of, tensors_of
from torchloom.backends.locate import locate
from torchloom.backends.records import CompilerFn
from torchloom.backends.registry import lookup_backend
from torchloom.errors import BackendError, BackendMismatchError
from torchloom.log import get_logger

logger = get_logger(__name__)


@dataclass(frozen=True)
class _Check(Forwarding):
    backend: str | CompilerFn
    tolerance: Tolerance
    grads: bool
    on_mismatch: Callable[[str], object] | None

    @property
    def compiler_name(self) -> str:
        return f"check_against_eager({name_of(self.backend)})"

    def inner(self) -> tuple[str | CompilerFn, ...]:
        return (self.backend,)

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Any:
        eager = copy_graph_module(gm)
        compiled = lookup_backend(self.backend)(gm, example_inputs, **options)
        return _Checked(self, eager, compiled, options)


class _Checked:
    """One compiled graph beside its eager twin."""

    def __init__(
        self, check: _Check, eager: fx.GraphModule, compiled: Any, options: dict[str, Any]
    ) -> None:
        self._check, self._eager, self._compiled = check, eager, compiled
        self._options = options
        self._grads_to_check = check.grads
        self._is_random = False

    def __call__(self, *args: Any) -> Any:
        before, twin = clone_inputs(args), clone_inputs(args)
        state = torch.get_rng_state()
        with torch.random.fork_rng():
            expected = self._eager(*twin)
            drew = not torch.equal(state, torch.get_rng_state())
        if drew:
            self._skip_random()
            return self._compiled(*args)
        actual = self._compiled(*args)
        self._compare(list(actual), list(expected), args, twin, before)
        if self._grads_to_check and torch.is_grad_enabled():
            self._grads_to_check = False
            self._compare_grads(before)
        return actual

    def _compare(
        self,
        actual: list[Any],
        expected: list[Any],
        args: Sequence[Any],
        twin: Sequence[Any],
        before: Sequence[Any],
    ) -> None:
        check = self._check
        found = first_difference(actual, expected, check.tolerance)
        what = "output"
        if found is None:
            found, what = first_difference(args, twin, check.tolerance), "input (changed in place)"
        if found is None:
            return
        compile_fn = lookup_backend(check.backend)
        where = locate(
            self._eager,
            before,
            lambda gm, inputs: compile_fn(gm, inputs, **self._options),
            check.tolerance,
        )
        place = f"{what} {found.index} of the graph" if where is None else str(where)
        detail = found.text if where is None else where.text
        self._report(f"{place}: {detail}")

    def _compare_grads(self, args: Sequence[Any]) -> None:
        ours, theirs = clone_inputs(args), clone_inputs(args)
        actual, expected = _gradients(self._compiled, ours), _gradients(self._eager, theirs)
        found = first_difference(actual, expected, self._check.tolerance)
        if found is not None:
            wanted = [
                node.name
                for node, value in zip(_placeholders(self._eager), args, strict=False)
                if isinstance(value, Tensor) and value.requires_grad
            ]
            self._report(f"gradient of input {wanted[found.index]!r}: {found.text}")

    def _report(self, what: str) -> None:
        text = f"backend {name_of(self._check.backend)!r} differs from eager at {what}"
        if self._check.on_mismatch is None:
            raise BackendMismatchError(text)
        self._check.on_mismatch(text)

    def _skip_random(self) -> None:
        if not self._is_random:
            self._is_random = True
            logger.warning(
                "a graph draws random numbers, which compilers may draw in another order: it is "
                "not compared with eager. Switch dropout off (model.eval()) to compare it"
            )


def check_against_eager(
    backend: str | CompilerFn = "inductor",
    *,
    rtol: float | None = None,
    atol: float | None = None,
    grads: bool = True,
    on_mismatch: Callable[[str], object] | None = None,
) -> CompilerFn:
    """Return a backend that runs `backend` and eager at every call, and compares them.

    Outputs and inputs changed in place are compared at every call, gradients at the first call of
    each graph. At the first difference the graph is compiled again with all its values as outputs,
    and where that hides the difference, cut after single nodes, to name the first node that
    differs. Costs an eager run and two copies of the inputs per call: a tool for finding errors.
    Graphs that draw random numbers are run but not compared; a warning says so.

    Args:
        backend: a registered name or a callable.
        rtol: relative tolerance; default: that of `torch.testing.assert_close` for the dtype.
        atol: absolute tolerance; give both or neither.
        grads: compare gradients too.
        on_mismatch: called with the text of each difference; default: raise it.

    Raises:
        BackendError: `backend` is unknown, or one of two tolerances is missing.
        BackendMismatchError: at a call: the results differ.

    Example:
        >>> torch.compile(fn, backend=check_against_eager("inductor"))  # doctest: +SKIP
    """
    if (rtol is None) != (atol is None):
        raise BackendError("check_against_eager() takes rtol and atol together, or neither")
    lookup_backend(backend)
    return _Check(backend, Tolerance(rtol, atol), grads, on_mismatch)


def _gradients(fn: Callable[..., Any], args: Sequence[Any]) -> list[Tensor | None]:
    outputs = [out for out in tensors_of(fn(*args)) if out.requires_grad]
    inputs = [value for value in tensors_of(args) if value.requires_grad]
    if not outputs or not inputs:
        return []
    # Unequal weights, so that errors of two elements cannot cancel.
    weights = [torch.linspace(0.5, 1.5, o.numel()).view(o.shape).to(o) for o in outputs]
    return list(torch.autograd.grad(outputs, inputs, weights, allow_unused=True))


def _placeholders(gm: fx.GraphModule) -> list[fx.Node]:
    return [node for node in gm.graph.nodes if node.op == "placeholder"]
