"""Check an operator against what it promises, on a family of inputs made from one example.

    fake        shapes, strides, dtypes, devices and aliases of results, as the real operator has them
    writes      arguments that are written to are declared, all of them
    aliases     results are new tensors, whatever the input
    symbols     the fake takes any size: no branch, no constant that only the example has
    gradient    backward against finite differences
    compiled    `torch.compile` with dynamic shapes gives what eager gives

`torch.library.opcheck` runs its tests on one call; most mistakes show in other ones.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from torchloom.custom_ops.dims import free_dims, refusal
from torchloom.custom_ops.look import Finding, look
from torchloom.custom_ops.samples import Dims, Sample, TensorLike, family, sample_of, smaller
from torchloom.custom_ops.symbolic import Branch, branches_of
from torchloom.custom_ops.target import CheckedOperator, target_of, tensors_in
from torchloom.errors import OpCheckError


@dataclass(kw_only=True)
class OpReport:
    """What `check_op` saw."""

    name: str
    findings: list[Finding] = field(default_factory=list)
    num_inputs: int = 0
    """Inputs that the operator took."""
    num_refused: int = 0
    """Inputs that it refused; they say nothing about it."""
    notes: list[str] = field(default_factory=list)
    """What could not be checked."""

    @property
    def ok(self) -> bool:
        """Whether no promise was broken."""
        return not self.findings

    def __str__(self) -> str:
        head = f"{self.name}: {len(self.findings)} findings on {self.num_inputs} inputs"
        if self.num_refused:
            head += f" ({self.num_refused} more were refused by the operator itself)"
        return "\n".join([head, *map(str, self.findings), *(f"note: {n}" for n in self.notes)])


Args = Sequence[Any] | Mapping[str, Any]


def check_op(
    op: Any,
    samples: Iterable[Args],
    *,
    count: int = 200,
    gradients: bool = True,
    compiled: bool = True,
    strict: bool = True,
) -> OpReport:
    """Check an operator on a family of inputs made from examples.

    Args:
        op: what `torchloom.custom_op` or `torch.library.custom_op` returned, or an operator of
            `torch.ops`.
        samples: examples of its arguments: tuples, or dicts of keyword arguments. The operator has
            to take each of them.
        count: inputs to make of each example.
        gradients: compare backward, if there is one, with finite differences.
        compiled: compare `torch.compile(dynamic=True)` with eager.
        strict: raise if anything is found.

    Returns:
        The report; `report.ok` says whether all is well.

    Raises:
        OpCheckError: something was found, and `strict`; or an example is refused.

    Example:
        >>> @torch.library.custom_op("docs::twice", mutates_args=())
        ... def twice(x: torch.Tensor) -> torch.Tensor:
        ...     return x * 2
        >>> @twice.register_fake
        ... def _(x):
        ...     return torch.empty_like(x)
        >>> check_op(twice, [(torch.randn(4, 8),)], count=30, compiled=False).ok
        True
    """
    target = target_of(op)
    report = OpReport(name=target.name)
    found: dict[str, Finding] = {}
    num_examples = 0
    for each in samples:
        num_examples += 1
        example = sample_of((), each) if isinstance(each, Mapping) else sample_of(each)
        _check_example(target, example, count, report, found)
        dims = free_dims(target, example)
        for branch in branches_of(target, example, dims):
            found.setdefault(f"branch {branch.condition}", _branch(target, branch, example))
        if gradients:
            _check_gradient(target, example, dims, report, found)
        if compiled:
            _check_compiled(target, example, dims, report, found)
    if not num_examples:
        raise OpCheckError(
            f"{target.name} was given no samples: pass at least one call's arguments"
        )
    report.findings += found.values()
    if strict and not report.ok:
        raise OpCheckError(str(report))
    return report


def _check_example(
    target: CheckedOperator,
    example: Sample,
    count: int,
    report: OpReport,
    found: dict[str, Finding],
) -> None:
    against = refusal(target, example)
    if against is not None:
        raise OpCheckError(f"{target.name} refuses the example {example}: {against}")
    dims = free_dims(target, example)
    for sample in family(example, dims, count):
        findings = look(target, sample)
        if findings is None:
            report.num_refused += 1
            continue
        report.num_inputs += 1
        for finding in findings:
            if finding.kind not in found:
                found[finding.kind] = _shrunk(target, sample, dims, finding)


def _shrunk(
    target: CheckedOperator, sample: Sample, dims: Sequence[Dims], finding: Finding
) -> Finding:
    """Return the same finding on the simplest sample that shows it."""
    again = True
    while again:
        again = False
        for simpler in smaller(sample, dims):
            for other in look(target, simpler) or ():
                if other.kind == finding.kind:
                    sample, finding, again = simpler, other, True
                    break
            if again:
                break
    return finding


def _check_gradient(
    target: CheckedOperator,
    example: Sample,
    dims: Sequence[Dims],
    report: OpReport,
    found: dict[str, Finding],
) -> None:
    if not target.has_backward or target.mutates:
        return
    small = _sized(target, example, dims, (3, 2, 4, 5))
    doubled = small.with_tensors([_doubled(each) for each in small.tensors])
    if refusal(target, doubled) is not None:
        report.notes.append(f"the gradient is not checked: {target.name} takes no float64")
        return
    args, kwargs = doubled.make()

    def forward(*tensors: Tensor) -> Any:
        given = iter(tensors)
        values = [_replaced(value, given) for value in args]
        named = {name: _replaced(value, given) for name, value in kwargs.items()}
        result = tensors_in(target.call(*values, **named))
        return tuple(each for each in result if each.dtype.is_floating_point)

    tensors = tensors_in([*args, *kwargs.values()])
    if not any(tensor.requires_grad for tensor in tensors):
        return
    try:
        torch.autograd.gradcheck(forward, tuple(tensors), eps=1e-6, atol=1e-5, rtol=1e-3)
    except Exception as error:  # noqa: BLE001 - a backward may raise anything
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        found.setdefault(
            "gradient",
            Finding(
                kind="gradient",
                sample=str(doubled),
                says=f"backward of {target.name} does not match finite differences: {first}",
                fix="compare the formula in register_autograd with the operator's own",
            ),
        )


def _check_compiled(
    target: CheckedOperator,
    example: Sample,
    dims: Sequence[Dims],
    report: OpReport,
    found: dict[str, Finding],
) -> None:
    def call(*args: Any, **kwargs: Any) -> Any:
        return target.call(*args, **kwargs)

    # A code object of its own: torch counts recompiles per code object, and gives up after some.
    fresh = types.FunctionType(call.__code__.replace(), call.__globals__, closure=call.__closure__)
    compiled = torch.compile(fresh, backend="aot_eager", fullgraph=True, dynamic=True)
    for sizes in ((5, 7, 11, 13), (3, 4, 6, 9)):
        sample = _sized(target, example, dims, sizes)
        results = []
        try:
            for run in (call, compiled):
                args, kwargs = sample.make()
                with torch.no_grad():
                    results.append([*tensors_in(run(*args, **kwargs)), *tensors_in(args)])
        except Exception as error:  # noqa: BLE001 - compilers raise anything
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            says = f"{target.name} cannot be compiled: {reason}"
            fix = "see the other findings: its fake decides what compilers believe"
        else:
            if all(map(_equal, *results)):
                continue
            says = f"{target.name} compiled gives other values than eager"
            fix = "see the other findings; an operator that draws random numbers or keeps a state differs, too"
        found.setdefault(
            "compiled", Finding(kind="compiled", sample=str(sample), says=says, fix=fix)
        )
        return


def _sized(
    target: CheckedOperator, example: Sample, dims: Sequence[Dims], sizes: Sequence[int]
) -> Sample:
    """Return the example with other sizes, as far as the operator takes them."""
    sample = example
    for number, group in enumerate(dims):
        other = group.set(sample, sizes[number % len(sizes)])
        if refusal(target, other) is None:
            sample = other
    return sample


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(
        torch.nan_to_num(one) if one.dtype.is_floating_point else one,
        torch.nan_to_num(other) if other.dtype.is_floating_point else other,
    )


def _doubled(like: TensorLike) -> TensorLike:
    if like.dtype.is_floating_point:
        return replace(like, dtype=torch.float64, requires_grad=True)
    return like


def _replaced(value: Any, given: Any) -> Any:
    if isinstance(value, Tensor):
        return next(given)
    if isinstance(value, list) and any(isinstance(each, Tensor) for each in value):
        return [_replaced(each, given) for each in value]
    return value


def _branch(target: CheckedOperator, branch: Branch, example: Sample) -> Finding:
    return Finding(
        kind="branch",
        sample=str(example),
        says=(
            f"the fake of {target.name} decides by a size: {branch.condition} "
            f"({branch.where}), which does not hold for {branch.counterexample}"
        ),
        fix="a fake's result has to follow from its arguments' sizes by formulas; decide in the "
        "operator, or make two operators",
    )
