"""Find the stage of compiling, or the pass, that first makes a result differ from eager.

    eager -> Dynamo's graph -> AOTAutograd's graphs -> decompositions -> Inductor
                                     | with passes: one more pass at a time

Each stage compiles a copy of the function, so torch.compile keeps the code that it already has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchloom._torch.module_calls import compiled_call
from torchloom._torch.tensors import tensors_inside, tree_map_only
from torchloom.backends import check_against_eager
from torchloom.backends.check import Tolerance, first_difference, gradients
from torchloom.backends.graphs import clone_inputs, name_of
from torchloom.errors import BackendError, BackendMismatchError
from torchloom.graph import GraphPass
from torchloom.inspect.live.target import target_of, twin_of
from torchloom.pipeline.backend import weave
from torchloom.pipeline.registry import PRESETS
from torchloom.shard import is_sharded, layout_of

_STAGES = ("eager", "aot_eager", "aot_eager_decomp_partition", "inductor")
_WORDS = {
    "eager": "Dynamo's capture",
    "aot_eager": "AOTAutograd's joint graph",
    "aot_eager_decomp_partition": "decompositions and the partitioner",
    "inductor": "Inductor's code",
}


class Bisection(NamedTuple):
    """Where a result first differs from eager."""

    stage: str | None
    """Backend of the first stage that differs, or None."""
    pass_name: str | None
    """The first pass that makes a difference, where passes do."""
    node: str | None
    """The first node that differs, where it could be found."""
    text: str
    """What differs, and by how much."""

    def __str__(self) -> str:
        if self.stage is None and self.pass_name is None:
            return "every stage equals eager"
        if self.pass_name is not None:
            return f"pass {self.pass_name!r} is the first to change the result: {self.text}"
        where = f" ({self.node})" if self.node else ""
        return (
            f"{_WORDS.get(str(self.stage), self.stage)} is the first to differ{where}: {self.text}"
        )


def bisect(
    fn: Any,
    *args: Any,
    backend: str | Callable[..., Any] = "inductor",
    passes: Sequence[str | GraphPass] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
) -> Bisection:
    """Find the first stage, or the first torchloom pass, that makes a result differ from eager.

    The function runs several times on copies of its arguments, from one random state; values and
    gradients of inputs and parameters are compared. A sharded model must be called by all ranks.

    Args:
        fn: a function or a module; also what torch.compile made of one.
        args: its arguments: tensors, or dicts, lists and tuples of them, and what else is a pytree.
        backend: the last stage.
        passes: torchloom passes to try one by one; default: the preset, if the model is sharded.
        rtol: relative tolerance; default: that of `torch.testing.assert_close`.
        atol: absolute tolerance; give both or neither.

    Raises:
        InspectError: there is no Python function behind `fn`.
        BackendError: one of two tolerances is missing.

    Example:
        >>> print(bisect(lambda x: x + 1, torch.ones(2), backend="aot_eager"))
        every stage equals eager
    """
    if (rtol is None) != (atol is None):
        raise BackendError("bisect() takes rtol and atol together, or neither")
    tolerance = Tolerance(rtol, atol)
    subject = _Subject(fn, args)
    expected = subject.run(None)
    last = _STAGES.index(backend) if backend in _STAGES else len(_STAGES) - 2
    stages: list[str | Callable[..., Any]] = list(_STAGES[: last + 1])
    if backend not in _STAGES:
        stages.append(backend)
    for stage in stages:
        found = first_difference(subject.run(stage), expected, tolerance)
        if found is not None:
            return Bisection(name_of(stage), None, subject.locate(stage, tolerance), found.text)
    for tried in _prefixes(subject, passes):
        options = {"lowering": "aot_eager", "passes": tried, "strict": True}
        found = first_difference(subject.run(weave, options), expected, tolerance)
        if found is not None:
            last_pass = tried[-1]
            name = last_pass if isinstance(last_pass, str) else last_pass.name
            return Bisection(None, name, None, found.text)
    return Bisection(None, None, None, "")


def _prefixes(
    subject: _Subject, passes: Sequence[str | GraphPass] | None
) -> list[list[str | GraphPass]]:
    """Return the lists of the first 1, 2, ... passes."""
    chosen: Sequence[str | GraphPass] = passes or ()
    module = subject.module
    if passes is None and module is not None and is_sharded(module):
        chosen = PRESETS[layout_of(module).stage]
    return [list(chosen[: count + 1]) for count in range(len(chosen))]


class _Subject:
    """The function under test: each run compiles it again and starts from the same values."""

    def __init__(self, fn: Any, args: Sequence[Any]) -> None:
        self.args = args
        target = target_of(fn)
        owner = target.leading[0] if target.leading else None
        self.module = owner if isinstance(owner, nn.Module) else None
        if isinstance(fn, nn.Module) and self.module is None:
            self.module = fn
        self._fn, self._leading = target.fn, target.leading

    def run(
        self, backend: str | Callable[..., Any] | None, options: dict[str, Any] | None = None
    ) -> list[Tensor | None]:
        """Return all tensors of the result, and the gradients of inputs and parameters."""
        call = self._compiled(backend, options)
        args = tree_map_only(Tensor, lambda tensor: clone_inputs([tensor])[0], self.args)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            results = tensors_inside(call(*args))
        params = () if self.module is None else self.module.parameters()
        grads = gradients(results, [*tensors_inside(args), *params])
        return [*(t.detach() for t in results), *grads]

    def locate(self, backend: str | Callable[..., Any], tolerance: Tolerance) -> str | None:
        """Return the first node that differs from eager under a backend, where that shows."""
        found: list[str] = []
        check = check_against_eager(
            backend, rtol=tolerance.rtol, atol=tolerance.atol, on_mismatch=found.append
        )
        try:
            self.run(check)
        except BackendMismatchError as error:
            found.append(str(error))
        texts = [text.partition(" at ")[2].partition(": ")[0] for text in found]
        return texts[0] if texts else None

    def _compiled(
        self, backend: str | Callable[..., Any] | None, options: dict[str, Any] | None
    ) -> Callable[..., Any]:
        if self.module is not None:
            if backend is None:
                return self.module._call_impl
            more: dict[str, Any] = {} if options is None else {"options": options}
            return compiled_call(self.module, backend, **more)
        leading = self._leading
        inner: Callable[..., Any] = twin_of(self._fn)
        if backend is not None:
            inner = torch.compile(inner, backend=backend, options=options)
        return lambda *args: inner(*leading, *args)
