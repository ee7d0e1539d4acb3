"""Compare the optimizer's learning rates and other numbers between ranks.

A schedule that reads a local value (ReduceLROnPlateau on each rank's own loss) lets ranks step their shards
of one weight at different rates. Nothing would fail, but the weights would be wrong.
"""

from __future__ import annotations

import functools
import inspect
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from torchloom.position import POSITION, Rates

_SHOWN = 3


def note_rates(optimizer: Optimizer | None) -> None:
    """Add the optimizer's rates and other numbers to the position that ranks compare.

    Numbers are compared in single precision: a schedule that ranks on different hosts compute with
    different libraries may differ in the last bit.
    """
    if optimizer is None:
        return
    numbers: list[float] = []
    known = getattr(optimizer, "defaults", {})  # not every one is of torch's class
    for group in optimizer.param_groups:
        for key, value in group.items():
            if known and key not in known:  # what a program keeps there for itself
                continue
            kind = type(value)
            if kind is float or kind is int or kind is bool:
                numbers.append(value)
            elif key != "params":
                numbers.extend(_numbers(value))
    try:
        packed = struct.pack(f"{len(numbers)}f", *numbers)
    except OverflowError:  # beyond single precision
        packed = struct.pack(f"{len(numbers)}d", *numbers)
    key = zlib.crc32(packed)
    if key != POSITION.rates.key:
        groups = [
            {k: v for k, v in group.items() if k != "params" and (k in known or not known)}
            for group in optimizer.param_groups
        ]
        POSITION.rates = Rates(key, functools.partial(_words, type(optimizer), groups))


def _numbers(value: object) -> Iterator[float]:
    if isinstance(value, (bool, int, float)):
        yield float(value)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _numbers(each)
    elif isinstance(value, Tensor) and value.numel() == 1 and value.device.type == "cpu":
        yield float(value.detach())


def _words(kind: type[Optimizer], groups: Sequence[Mapping[str, Any]]) -> str:
    """Return each group's rate, and what else is not torch's default."""
    defaults = _defaults(kind)
    told = list(dict.fromkeys(_group(group, defaults) for group in groups))
    more = f" and {len(told) - _SHOWN} more" if len(told) > _SHOWN else ""
    return f"{kind.__name__}: {'; '.join(told[:_SHOWN])}{more}"


def _group(group: Mapping[str, Any], defaults: Mapping[str, object]) -> str:
    told = {
        key: value
        for key, value in group.items()
        if key == "lr"
        or (key != "params" and list(_numbers(value)) != list(_numbers(defaults.get(key))))
    }
    return ", ".join(f"{key}={_short(value)}" for key, value in told.items())


def _short(value: object) -> str:
    if isinstance(value, bool):
        return str(value)
    numbers = [f"{number:.7g}" for number in _numbers(value)]
    return numbers[0] if len(numbers) == 1 else f"({', '.join(numbers)})"


@functools.cache
def _defaults(kind: type[Optimizer]) -> dict[str, object]:
    try:
        found = inspect.signature(kind).parameters
    except (TypeError, ValueError):  # classes of other libraries need not have one
        return {}
    return {name: each.default for name, each in found.items()}
