"""A backend that runs another one and eager, and names the first node that differs.

1. Where results differ, the graph is compiled once more with every tensor as an output, and these are compared in order.
2. Outputs that must be kept change what is fused, and may make the error vanish: then prefixes of the graph that return a
   single node are compiled, by bisection.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from torchloom._torch.aot import copy_graph_module
from torchloom.backends.claims import CompilerFn
from torchloom.backends.combinators import Backend, Combined
from torchloom.backends.graphs import clone_inputs, name_of, tensors_of
from torchloom.backends.registry import lookup_backend
from torchloom.errors import BackendError, BackendMismatchError
from torchloom.log import get_logger


class Tolerance(NamedTuple):
    """How far results may differ; None means torch's default for the dtype."""

    rtol: float | None
    atol: float | None


class Mismatch(NamedTuple):
    """The first result that differs by more than the tolerance."""

    index: int
    text: str


def first_difference(
    actual: Sequence[Any], expected: Sequence[Any], tolerance: Tolerance
) -> Mismatch | None:
    """Return the first pair of results that differ, or None.

    Args:
        actual: results of the backend.
        expected: results of eager.
        tolerance: how far tensors may be apart; other results have to be equal.
    """
    if len(actual) != len(expected):
        return Mismatch(0, f"{len(actual)} results instead of {len(expected)}")
    for index, (left, right) in enumerate(zip(actual, expected, strict=True)):
        text = _compare(left, right, tolerance)
        if text is not None:
            return Mismatch(index, text)
    return None


def _compare(left: Any, right: Any, tolerance: Tolerance) -> str | None:
    if not isinstance(left, Tensor) or not isinstance(right, Tensor):
        same_kind = isinstance(left, Tensor) == isinstance(right, Tensor)
        return None if same_kind and (left is right or left == right) else f"{left} != {right}"
    if left.shape != right.shape or left.dtype != right.dtype:
        return f"{left.dtype} {tuple(left.shape)} instead of {right.dtype} {tuple(right.shape)}"
    try:
        torch.testing.assert_close(
            left.detach(), right.detach(), rtol=tolerance.rtol, atol=tolerance.atol, equal_nan=True
        )
    except AssertionError:
        return _describe(left.detach(), right.detach())
    return None


def _describe(left: Tensor, right: Tensor) -> str:
    """Say how far two tensors of one shape are apart."""
    wide = torch.complex128 if left.is_complex() else torch.float64
    distance = (left.to(wide) - right.to(wide)).abs()
    # NaN on one side only counts as the largest difference.
    distance = distance.nan_to_num(nan=torch.inf)
    flat = int(distance.argmax())
    place = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), distance.shape))
    num_off = int((left != right).sum())
    got, want = left.reshape(-1)[flat].item(), right.reshape(-1)[flat].item()
    return (
        f"{num_off} of {left.numel()} elements differ; most at {list(place)}: {got:.6g}, eager "
        f"has {want:.6g}"
    )


logger = get_logger(__name__)

Compile = Callable[[fx.GraphModule, Sequence[Any]], Any]


def _beside_eager(
    made: Combined,
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: dict[str, Any],
    *parts: Any,
) -> Any:
    (backend,) = made.inner
    eager = copy_graph_module(gm)

    def compile_fn(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return lookup_backend(backend)(graph, inputs, **options)

    return _Checked(name_of(backend), eager, compile_fn, compile_fn(gm, example_inputs), *parts)


class _Checked:
    """One compiled graph beside its eager twin."""

    def __init__(
        self,
        backend: str,
        eager: fx.GraphModule,
        compile_fn: Compile,
        compiled: Any,
        tolerance: Tolerance,
        grads: bool,
        on_mismatch: Callable[[str], object] | None,
    ) -> None:
        self._backend, self._eager, self._compile = backend, eager, compile_fn
        self._compiled, self._tolerance, self._on_mismatch = compiled, tolerance, on_mismatch
        self._grads_to_check = grads
        self._is_random = False

    def __call__(self, *args: Any) -> Any:
        before, twin = clone_inputs(args), clone_inputs(args)
        state = torch.get_rng_state()
        with torch.random.fork_rng():
            expected = self._eager(*twin)
            drew = not torch.equal(state, torch.get_rng_state())
        actual = self._compiled(*args)
        if drew:
            self._say_random()
            return actual
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
        tolerance = self._tolerance
        what, found = "output", first_difference(actual, expected, tolerance)
        if found is None:
            what, found = "input (changed in place)", first_difference(args, twin, tolerance)
        if found is None:
            return
        node = _first_node(self._eager, before, self._compile, tolerance)
        self._report(node or f"{what} {found.index} of the graph: {found.text}")

    def _compare_grads(self, args: Sequence[Any]) -> None:
        ours, theirs = clone_inputs(args), clone_inputs(args)
        actual, expected = (
            gradients(tensors_of(fn(*given)), tensors_of(given))
            for fn, given in ((self._compiled, ours), (self._eager, theirs))
        )
        found = first_difference(actual, expected, self._tolerance)
        if found is not None:
            placeholders = self._eager.graph.find_nodes(op="placeholder")
            wanted = [
                node.name
                for node, value in zip(placeholders, args, strict=False)
                if isinstance(value, Tensor) and value.requires_grad
            ]
            self._report(f"gradient of input {wanted[found.index]!r}: {found.text}")

    def _report(self, what: str) -> None:
        text = f"backend {self._backend!r} differs from eager at {what}"
        if self._on_mismatch is None:
            raise BackendMismatchError(text)
        self._on_mismatch(text)

    def _say_random(self) -> None:
        if not self._is_random:
            self._is_random = True
            logger.warning(
                "a graph draws random numbers, which compilers may draw in another order: it is "
                "not compared with eager. Switch dropout off (model.eval()) to compare it"
            )


def check_against_eager(
    backend: Backend = "inductor",
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
    name = f"check_against_eager({name_of(backend)})"
    parts = (Tolerance(rtol, atol), grads, on_mismatch)
    return Combined(name, (backend,), _beside_eager, parts)


def gradients(outputs: Iterable[Tensor], inputs: Iterable[Tensor]) -> list[Tensor | None]:
    """Return a gradient for each input that requires one: of all outputs, each element with another weight."""
    roots, wanted = ([each for each in some if each.requires_grad] for some in (outputs, inputs))
    if not roots or not wanted:
        return []
    # Unequal weights, so that errors of two elements cannot cancel.
    weights = [torch.linspace(0.5, 1.5, o.numel()).view(o.shape).to(o) for o in roots]
    return list(torch.autograd.grad(roots, wanted, weights, allow_unused=True))


def _first_node(
    gm: fx.GraphModule, inputs: Sequence[Any], compile_fn: Compile, tolerance: Tolerance
) -> str | None:
    """Return the first node that differs from eager and how, None if no part of the graph reproduces the difference.

    Args:
        gm: the captured graph, untouched.
        inputs: real inputs at which the whole graph differs.
        compile_fn: the backend.
        tolerance: what counts as different.
    """
    with torch.random.fork_rng():
        values = _Values(gm)
        values.run(*clone_inputs(inputs))
    nodes = values.tensors

    def said(chosen: Sequence[fx.Node]) -> str | None:
        cut = _returning(gm, [node.name for node in chosen])
        expected = cut(*clone_inputs(inputs))
        with torch.random.fork_rng():
            actual = compile_fn(copy_graph_module(cut), clone_inputs(inputs))(*clone_inputs(inputs))
        found = first_difference(list(actual), list(expected), tolerance)
        return None if found is None else f"{_shown(chosen[found.index])}: {found.text}"

    if not nodes:
        return None
    text = said(nodes)
    if text is not None or (text := said(nodes[-1:])) is None:
        return text
    low, high = 0, len(nodes) - 1
    while low < high:
        middle = (low + high) // 2
        found = said([nodes[middle]])
        if found is None:
            low = middle + 1
        else:
            high, text = middle, found
    return text


class _Values(fx.Interpreter):
    """Runs a graph and notes which nodes are tensors."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.tensors: list[fx.Node] = []

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.op not in ("placeholder", "get_attr", "output") and isinstance(value, Tensor):
            self.tensors.append(n)
        return value


def _returning(gm: fx.GraphModule, names: Sequence[str]) -> fx.GraphModule:
    """Return a copy of `gm` that stops after the last of `names` and returns them."""
    cut = copy_graph_module(gm)
    nodes = {node.name: node for node in cut.graph.nodes}
    *_, output = cut.graph.nodes
    output.args = (tuple(nodes[name] for name in names),)
    # In-place calls have no users but effects: only those after the last wanted node may go.
    for node in reversed(list(cut.graph.nodes)):
        if node is nodes[names[-1]]:
            break
        if node is not output and not node.users and node.op != "placeholder":
            cut.graph.erase_node(node)
    cut.recompile()
    return cut


def _shown(node: fx.Node) -> str:
    """Return a node as Python, and the user's line that it is of."""
    target: Any = node.target
    if not isinstance(target, str):
        module = getattr(target, "__module__", "") or ""
        name = getattr(target, "__name__", str(target))
        target = f"{module}.{name}" if module and not module.startswith("_") else name
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    where = f", {':'.join(frames[-1])}" if frames else ""
    return f"node {node.name!r} = {target}({', '.join(map(str, node.args))}){where}"
