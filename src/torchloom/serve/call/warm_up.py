"""Record the CUDA graphs of all exact sizes before the first call, the largest first: the others use its memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from torchloom.errors import ContractError
from torchloom.serve.call.entry import Run
from torchloom.serve.contract.box import Box
from torchloom.serve.contract.conditions import argument_at
from torchloom.serve.contract.contract import Contract
from torchloom.serve.model.snapshot import ModelSnapshot, generators_kept
from torchloom.serve.model.target import Target, gradient_mode_of


class Sized(Protocol):
    """The program for some sizes."""

    box: Box
    without: frozenset[str]
    run: Run

    @property
    def recorded(self) -> Sequence[object]:
        """What of it runs as CUDA graphs."""
        ...


def record_sizes(
    target: Target, contract: Contract, variants: Sequence[Sized], given: Mapping[str, Any]
) -> None:
    """Run each program that is recorded once, on arguments of its size; what that writes is taken back.

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


def _num_elements(variant: Sized) -> int:
    return math.prod(variant.box.largest.values())
