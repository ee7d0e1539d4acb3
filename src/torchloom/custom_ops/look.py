"""One call of an operator, looked at from all sides: what it wrote, what it returned, what its fake says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchloom._torch.tensors import fake_mode
from torchloom.custom_ops.samples import Sample
from torchloom.custom_ops.target import CheckedOperator, storage_of, strides_of, tensors_in


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One broken promise, on the simplest input that shows it."""

    kind: str
    """fake, write, alias, branch, gradient or compiled; with what of it differs."""
    sample: str
    says: str
    """What differs."""
    fix: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.says}\n    on {self.sample}\n    {self.fix}"


def look(target: CheckedOperator, sample: Sample) -> list[Finding] | None:
    """Return what is wrong on one input, None if the operator refuses it."""
    args, kwargs = sample.make()
    inputs = target.named(args, kwargs)
    before = {name: [_bytes(t) for t in tensors_in(value)] for name, value in inputs.items()}
    storages = {
        storage_of(tensor): name for name, value in inputs.items() for tensor in tensors_in(value)
    }
    try:
        result, written = target.run(args, kwargs)
    except Exception:  # noqa: BLE001 - the input is none of the operator's
        return None
    found: list[Finding] = []

    def find(kind: str, says: str, fix: str) -> None:
        found.append(Finding(kind=kind, sample=str(sample), says=says, fix=fix))

    changed = {storages[each] for each in written if each in storages}
    for name, value in inputs.items():
        now = [_bytes(tensor) for tensor in tensors_in(value)]
        if not all(torch.equal(a, b) for a, b in zip(before[name], now, strict=True)):
            changed.add(name)
    if sample.shares:
        changed -= {n for n in changed if any(inputs[m] is inputs[n] for m in target.mutates)}
    for name in sorted(changed - target.mutates):
        find(
            f"write {name}",
            f"{target.name} writes to {name!r}, which mutates_args does not name",
            f"add it: mutates_args={tuple(sorted(target.mutates | {name}))!r}, or work on {name}.clone()",
        )
    outputs = tensors_in(result)
    if not target.returns_inputs:
        for number, output in enumerate(outputs):
            other = storages.get(storage_of(output))
            if other is not None:
                find(
                    f"alias {number}",
                    f"result {number} of {target.name} shares memory with {other!r}",
                    "results must be new tensors whatever the input: return a clone() there",
                )
        for number, output in enumerate(outputs):
            twins = [i for i in range(number) if storage_of(outputs[i]) == storage_of(output)]
            if twins:
                find(
                    f"alias {number}",
                    f"results {twins[0]} and {number} of {target.name} share memory",
                    "results must be tensors of their own: return a clone() of one",
                )
    found += _compare_fake(target, sample, result)
    return found


def _compare_fake(target: CheckedOperator, sample: Sample, result: Any) -> list[Finding]:
    args, kwargs = sample.make()
    mode = fake_mode()
    fake_args = [_faked(mode, value) for value in args]
    fake_kwargs = {name: _faked(mode, value) for name, value in kwargs.items()}

    def finding(what: str, says: str, fix: str) -> Finding:
        return Finding(kind=f"fake {what}", sample=str(sample), says=says, fix=fix)

    try:
        with mode, torch.no_grad():
            fake = target.call(*fake_args, **fake_kwargs)
    except Exception as error:  # noqa: BLE001 - a fake may raise anything
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return [
            finding(
                "raises",
                f"the fake of {target.name} raises on an input that the operator takes: {reason}",
                "a fake has to take all that its operator takes",
            )
        ]
    reals, fakes = tensors_in(result), tensors_in(fake)
    if len(reals) != len(fakes):
        says = f"{target.name} returns {len(reals)} tensors, its fake {len(fakes)}"
        return [finding("count", says, "return as many from the fake")]
    found = []
    for number, (real, like) in enumerate(zip(reals, fakes, strict=True)):
        for what, ours, theirs in _differences(real, like):
            found.append(
                finding(
                    f"{what} {number}",
                    f"result {number} of {target.name} has {what} {ours}, its fake says {theirs}",
                    _FIXES[what],
                )
            )
    return found


_FIXES = {
    "shape": "compute the fake's sizes from those of its arguments, with no number of the example",
    "stride": "make the fake's result as the operator does: new_empty() is contiguous, empty_like() "
    "keeps the strides of its argument",
    "dtype": "give the fake's result the dtype that the operator returns for this input",
    "device": "give the fake's result the device that the operator returns for this input",
    "layout": "give the fake's result the layout that the operator returns",
}


def _differences(real: Tensor, fake: Tensor) -> list[tuple[str, Any, Any]]:
    sizes = tuple(real.shape)
    pairs: list[tuple[str, Any, Any]] = [
        ("shape", sizes, tuple(map(int, fake.shape))),
        ("dtype", real.dtype, fake.dtype),
        ("device", real.device, fake.device),
        ("layout", real.layout, fake.layout),
    ]
    comparable = real.layout == fake.layout == torch.strided and sizes == tuple(fake.shape)
    if comparable and strides_of(real) != strides_of(fake):
        pairs.append(("stride", tuple(real.stride()), tuple(fake.stride())))
    return [each for each in pairs if each[1] != each[2]]


def _faked(mode: Any, value: Any) -> Any:
    if isinstance(value, Tensor):
        return mode.from_tensor(value)
    if isinstance(value, list):
        return [_faked(mode, each) for each in value]
    return value


def _bytes(tensor: Tensor) -> Tensor:
    """Return a copy of all bytes of a tensor's memory, those around a slice included."""
    storage = tensor.detach().untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage).clone()
