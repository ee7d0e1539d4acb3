"""Warms a program up: records CUDA graphs before the first call, and measures the memory of the largest one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchloom.errors import ContractError
from torchloom.serve.call.entry import Run
from torchloom.serve.call.variant import Variant
from torchloom.serve.contract.conditions import argument_at
from torchloom.serve.contract.contract import Contract
from torchloom.serve.model.snapshot import ModelSnapshot, generators_kept
from torchloom.serve.model.target import Target, gradient_mode_of


def record_sizes(
    target: Target, contract: Contract, variants: Sequence[Variant], given: Mapping[str, Any]
) -> None:
    """Run each program that is recorded once, on arguments of its size; what that writes is taken back.

    The largest comes first: the others use its memory.

    Args:
        target: the model.
        contract: what arguments look like.
        variants: the programs.
        given: arguments to use in the place of made ones.

    Raises:
        ContractError: a name is in no contract.
    """
    for name in given:
        if name not in contract.args:
            raise ContractError(f"{name!r} is in no contract, which has {', '.join(contract.args)}")
    found = [
        argument_at(given, path) for path, _ in contract.tensors() if path.split(".")[0] in given
    ]
    tensors = [tensor for tensor in found if isinstance(tensor, Tensor)]
    first = () if target.owner is None else (target.owner,)
    recorded = [variant for variant in variants if variant.recorded]
    for variant in sorted(recorded, key=_num_elements, reverse=True):
        args = {**contract.example(variant.box.largest, without=variant.without), **given}
        places, rest = target.divided(args)
        before = ModelSnapshot(target)
        held = [tensor.clone() for tensor in tensors]
        with generators_kept(), gradient_mode_of(contract):
            variant.run(*first, *places, **rest)
        before.restore()
        with torch.no_grad():
            for tensor, was in zip(tensors, held, strict=True):
                tensor.copy_(was)


def _num_elements(variant: Variant) -> int:
    return math.prod(variant.box.largest.values())


def peak_of(target: Target, contract: Contract, call: Run) -> int:
    """Run a program once at its largest sizes; return the most bytes that the call held.

    What was there before does not count: parameters, buffers, arguments.

    Args:
        target: the model.
        contract: what arguments look like.
        call: the program.
    """
    from torchloom.memory.measure import measure_peak

    args = contract.example()
    with gradient_mode_of(contract):
        if "cuda" not in target.device_types(contract):
            return measure_peak(lambda: call(**args)).peak_bytes
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call(**args)
        return torch.cuda.max_memory_allocated() - before
