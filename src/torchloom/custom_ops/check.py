"""Check an operator against what it promises, on a family of inputs made from each example.

    fake        shapes, strides, dtypes, devices and aliases of results, as the real operator has them
    writes      arguments that are written to are declared, all of them
    aliases     results are new tensors, whatever the input
    branch      the fake takes any size: no decision by a size
    gradient    backward against finite differences
    opcheck     what `torch.library.opcheck` finds on the example: schema, autograd registration, and compiled with
                dynamic shapes

opcheck looks at one call; most mistakes show in other ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torchloom._torch.operators import has_autograd_kernel
from torchloom._torch.tensors import fake_mode
from torchloom.custom_ops.inputs import OperatorCall, call_of, calls_like, tensors_in
from torchloom.errors import OpCheckError
from torchloom.pieces.symbols import SizeGuard, size_guards


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One broken promise, on the first input that shows it."""

    kind: str
    """fake, write, alias, branch, schema, gradient or compiled; with what of it differs."""
    sample: str
    says: str
    """What differs."""
    fix: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.says}\n    on {self.sample}\n    {self.fix}"


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


def check_op(
    op: Any,
    samples: Iterable[Sequence[Any] | Mapping[str, Any]],
    *,
    count: int = 200,
    gradients: bool = True,
    compiled: bool = True,
    strict: bool = True,
) -> OpReport:
    """Check an operator on a family of inputs made from examples, and by `torch.library.opcheck`.

    Args:
        op: what `torchloom.custom_op` or `torch.library.custom_op` returned, or an operator of
            `torch.ops`.
        samples: examples of its arguments: tuples, or dicts of keyword arguments. The operator has
            to take each of them.
        count: inputs that the operator takes, to make of each example.
        gradients: compare backward, if there is one, with finite differences.
        compiled: compare the operator compiled with dynamic shapes with eager.
        strict: raise if anything is found.

    Returns:
        The report; `report.ok` says whether all is well.

    Raises:
        OpCheckError: something was found, and `strict`; or an example is refused.
        TypeError: `op` is no operator.

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
    defined = getattr(op, "_opoverload", op)
    overload = getattr(defined, "default", defined)  # torch.ops.aten.gelu stands for its default
    if not hasattr(overload, "_schema"):
        raise TypeError(
            f"{op!r} is no operator: pass what @custom_op returned, or one of torch.ops"
        )
    check = _Check(overload, OpReport(name=overload._schema.name))
    examples = [call_of(sample) for sample in samples]
    if not examples:
        raise OpCheckError(f"{check.name} was given no samples: pass at least one call's arguments")
    for example in examples:
        accepted = check.family(example, count)
        check.branches(example, accepted)
        if gradients and _has_backward(op, overload):
            check.gradient(example)
        check.by_torch(example, gradients=gradients, compiled=compiled)
    report = check.report
    if strict and not report.ok:
        raise OpCheckError(str(report))
    return report


class _Check:
    """One operator under check, and the first finding of each kind."""

    def __init__(self, overload: Any, report: OpReport) -> None:
        self.overload, self.name, self.report = overload, report.name, report
        arguments = overload._schema.arguments
        self.arguments = [each.name for each in arguments]
        self.written = {a.name for a in arguments if a.alias_info and a.alias_info.is_write}

    def find(self, kind: str, call: OperatorCall, says: str, fix: str) -> None:
        """Note a finding, unless one of its kind is there."""
        if all(each.kind != kind for each in self.report.findings):
            self.report.findings.append(Finding(kind=kind, sample=str(call), says=says, fix=fix))

    def family(self, example: OperatorCall, count: int) -> list[OperatorCall]:
        """Look at the example and at calls like it; return those that the operator takes."""
        against = self._look(example)
        if against is not None:
            raise OpCheckError(f"{self.name} refuses the example {example}: {against}")
        accepted: list[OperatorCall] = []
        for call in calls_like(example):
            if len(accepted) == count:
                break
            if self._look(call) is None:
                accepted.append(call)
            else:
                self.report.num_refused += 1
        self.report.num_inputs += len(accepted)
        return accepted

    def _look(self, call: OperatorCall) -> str | None:
        """Compare one call with its fake and with what is declared; return why the operator refuses it."""
        fake = self._fake(call)
        named = {**dict(zip(self.arguments, call.args, strict=False)), **call.kwargs}
        tensors = {name: tensors_in(value) for name, value in named.items()}
        before = {name: [_bytes(each) for each in held] for name, held in tensors.items()}
        try:
            with torch.no_grad():
                result = self.overload(*call.args, **call.kwargs)
        except Exception as error:  # noqa: BLE001 - whatever it raises, the input is none of its own
            if "may not alias" in str(error):  # torch's own check of a result of `custom_op`
                self._find_alias(call, "a result", "an argument or another result")
                return None
            return f"{type(error).__name__}: {_first_line(error)}"
        declared = {_storage(each) for name in self.written for each in tensors.get(name, ())}
        for name, held in tensors.items():
            if all(map(torch.equal, before[name], map(_bytes, held))):
                continue
            if name not in self.written and not declared & set(map(_storage, held)):
                self.find(
                    f"write {name}",
                    call,
                    f"{self.name} writes to {name!r}, which mutates_args does not name",
                    f"add it: mutates_args={tuple(sorted(self.written | {name}))!r}, or work on "
                    f"{name}.clone()",
                )
        if not any(each.alias_info is not None for each in self.overload._schema.returns):
            owners = {_storage(each): repr(n) for n, held in tensors.items() for each in held}
            for number, output in enumerate(tensors_in(result)):
                other = owners.setdefault(_storage(output), f"result {number}")
                if other != f"result {number}":
                    self._find_alias(call, f"result {number}", other)
        self._compare(call, tensors_in(result), fake)
        return None

    def _find_alias(self, call: OperatorCall, one: str, other: str) -> None:
        self.find(
            "alias",
            call,
            f"{one} of {self.name} shares memory with {other}",
            "results must be new tensors whatever the input: return a clone() there",
        )

    def _fake(self, call: OperatorCall) -> list[Tensor] | Exception:
        mode = fake_mode()
        faked = call.with_tensors([mode.from_tensor(each) for each in call.tensors])
        try:
            with mode, torch.no_grad():
                return tensors_in(self.overload(*faked.args, **faked.kwargs))
        except Exception as error:  # noqa: BLE001 - a fake may raise anything
            return error

    def _compare(
        self, call: OperatorCall, results: list[Tensor], fake: list[Tensor] | Exception
    ) -> None:
        if isinstance(fake, Exception):
            self.find(
                "fake raises",
                call,
                f"the fake of {self.name} raises on an input that the operator takes: {_first_line(fake)}",
                "a fake has to take all that its operator takes",
            )
            return
        if len(results) != len(fake):
            says = f"{self.name} returns {len(results)} tensors, its fake {len(fake)}"
            self.find("fake count", call, says, "return as many from the fake")
        for number, (real, like) in enumerate(zip(results, fake, strict=False)):
            for what, ours, theirs in _differences(real, like):
                self.find(
                    f"fake {what} {number}",
                    call,
                    f"result {number} of {self.name} has {what} {ours}, its fake says {theirs}",
                    _FIXES.get(what, f"give the fake's result the operator's {what}"),
                )

    def branches(self, example: OperatorCall, accepted: Sequence[OperatorCall]) -> None:
        """Find decisions of the fake by a size that another input takes the other way."""
        varying = [[size > 1 for size in tensor.shape] for tensor in example.tensors]
        try:
            guards = size_guards(self.overload, example.args, example.kwargs, varying)
        except Exception:  # noqa: BLE001 - a fake that raises is found by the runs on plain sizes
            return
        for guard in guards:
            other = next((call for call in accepted if _contradicts(guard, example, call)), None)
            if other is not None:
                self.find(
                    "branch",
                    example,
                    f"the fake of {self.name} decides by a size: {guard.text} ({guard.where}), which "
                    f"does not hold for {other}",
                    "a fake's result has to follow from its arguments' sizes by formulas; decide in "
                    "the operator, or make two operators",
                )

    def gradient(self, example: OperatorCall) -> None:
        """Compare backward with finite differences, in float64."""
        doubled = [
            each.detach().double().requires_grad_() if each.is_floating_point() else each.detach()
            for each in example.tensors
        ]
        if self.written or not any(each.requires_grad for each in doubled):
            return

        def forward(*tensors: Tensor) -> tuple[Tensor, ...]:
            call = example.with_tensors(tensors)
            results = tensors_in(self.overload(*call.args, **call.kwargs))
            return tuple(each for each in results if each.is_floating_point())

        try:
            with torch.no_grad():
                forward(*doubled)
        except Exception:  # noqa: BLE001 - the operator takes no such input
            self.report.notes.append(f"the gradient is not checked: {self.name} takes no float64")
            return
        try:
            torch.autograd.gradcheck(forward, tuple(doubled), fast_mode=True)
        except Exception as error:  # noqa: BLE001 - a backward may raise anything
            self.find(
                "gradient",
                example.with_tensors(doubled),
                f"backward of {self.name} does not match finite differences: {_first_line(error)}",
                "compare the formula in register_autograd with the operator's own",
            )

    def by_torch(self, example: OperatorCall, *, gradients: bool, compiled: bool) -> None:
        """Run torch's own check on the example."""
        wanted = {"test_autograd_registration": gradients, "test_aot_dispatch_dynamic": compiled}
        utils = [name for name in _OPCHECK if wanted.get(name, True)]
        told = torch.library.opcheck(
            self.overload,
            tuple(example.args),
            example.kwargs,
            test_utils=utils,
            raise_exception=False,
        )
        for name, error in told.items():
            if error != "SUCCESS":
                kind, says, fix = _OPCHECK[name]
                self.find(kind, example, f"{self.name} {says}: {_first_line(error)}", fix)


_OPCHECK = {
    "test_schema": (
        "schema",
        "writes or returns arguments otherwise than its schema says",
        "name all that it writes in mutates_args, and return new tensors",
    ),
    "test_autograd_registration": (
        "gradient",
        "has a backward where autograd does not look for it",
        "register it by register_autograd",
    ),
    "test_aot_dispatch_dynamic": (
        "compiled",
        "cannot be compiled, or gives other values compiled than eager",
        "see the other findings; an operator that draws random numbers or keeps a state differs, too",
    ),
}
"""What opcheck tries: kind of the finding, what is wrong, what to do."""
_FIXES = {
    "shape": "compute the fake's sizes from those of its arguments, with no number of the example",
    "stride": "make the fake's result as the operator does: new_empty() is contiguous, empty_like() "
    "keeps the strides of its argument",
}


def _differences(real: Tensor, fake: Tensor) -> Iterator[tuple[str, Any, Any]]:
    for what in ("shape", "dtype", "device", "layout"):
        ours, theirs = getattr(real, what), getattr(fake, what)
        if ours != theirs:
            yield (what, tuple(ours), tuple(theirs)) if what == "shape" else (what, ours, theirs)
    if real.layout == fake.layout == torch.strided and real.shape == fake.shape and real.numel():
        ours, theirs = real.stride(), fake.stride()
        sizes = zip(real.shape, ours, theirs, strict=True)
        if any(one != other for size, one, other in sizes if size > 1):
            yield "stride", ours, theirs


def _contradicts(guard: SizeGuard, example: OperatorCall, call: OperatorCall) -> bool:
    """Return whether a call has sizes for which a guard does not hold."""
    sizes: dict[float, float] = {}
    for one, other in zip(example.tensors, call.tensors, strict=True):
        for before, after in zip(one.shape, other.shape, strict=True):
            if sizes.setdefault(before, after) != after:
                return False  # sizes that are one symbol have become two
    return guard.hints <= sizes.keys() and not guard.holds(sizes)


def _has_backward(op: Any, overload: Any) -> bool:
    defined = getattr(op, "defined", op)
    if hasattr(defined, "_backward_fn"):
        return defined._backward_fn is not None
    return has_autograd_kernel(overload)


def _first_line(error: object) -> str:
    """Return the first line of what an error says, or its class."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _bytes(tensor: Tensor) -> Tensor:
    """Return a copy of all bytes of a tensor's memory, those around a slice included."""
    storage = tensor.detach().untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage).clone()
