"""How much device memory a step may use, as users write it.

    42949672960   "40GB"   "40GiB"   0.8   "80%"   "auto"

GB is 10^9 bytes and GiB is 2^30, as in data sheets. A fraction is a fraction of the device's memory;
"auto" means 0.9 of it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from numbers import Integral, Real

from torchloom.config.kinds import RefusedError, show
from torchloom.errors import ConfigError

AUTO_FRACTION = 0.9
"""DeepCompile uses the same fraction. It assumes that allocator and libraries need the rest."""

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS |= {_letter: 1000**_power, f"{_letter}B": 1000**_power, f"{_letter}IB": 1024**_power}
_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][0-9]+)?)\s*([A-Za-z]*|%)\s*")
_FIX = 'write bytes, "40GB", "40GiB", a fraction such as 0.8 or "80%", or "auto"'


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """A limit on device memory, in bytes or as a fraction of the device."""

    num_bytes: int | None = None
    fraction: float | None = None
    """Fraction of the device's memory, if `num_bytes` is not given."""

    def resolve(self, total_bytes: int) -> int:
        """Return the bound in bytes on a device with `total_bytes`.

        Example:
            >>> parse_budget("80%").resolve(1000)
            800
        """
        if self.num_bytes is not None:
            return self.num_bytes
        return int((AUTO_FRACTION if self.fraction is None else self.fraction) * total_bytes)

    def __str__(self) -> str:
        return f"{self.num_bytes} B" if self.num_bytes is not None else f"{self.fraction:g} of it"


def parse_budget(value: object) -> MemoryBudget:
    """Read a memory budget.

    Raises:
        RefusedError: the value is none of the forms above, or is not positive.

    Example:
        >>> parse_budget("40GB").num_bytes
        40000000000
    """
    if isinstance(value, MemoryBudget):
        return value
    if isinstance(value, str):
        return _from_text(value)
    if isinstance(value, bool) or not isinstance(value, Real):
        raise RefusedError(f"{show(value)} is not a memory budget", _FIX)
    if isinstance(value, Integral):
        return _of_bytes(float(value), value)
    return _of_number(float(value), value)


def parse_bytes(value: object, name: str) -> int:
    """Read a number of bytes: an integer, or text with a unit.

    Args:
        value: such as 1000000, "5GB" or "5GiB".
        name: of what it is, for the error.

    Raises:
        ConfigError: it is no positive number of bytes.

    Example:
        >>> parse_bytes("1.5KiB", "max_shard_size")
        1536
    """
    try:
        found = None if isinstance(value, float) else parse_budget(value).num_bytes
    except RefusedError:
        found = None
    if found is None:
        raise ConfigError(f'{name}={value!r} is no number of bytes: write one, or "5GB" or "5GiB"')
    return found


def _from_text(text: str) -> MemoryBudget:
    if text.strip().lower() == "auto":
        return MemoryBudget(fraction=AUTO_FRACTION)
    found = _SIZE.fullmatch(text)
    unit = found.group(2).upper() if found else ""
    if found is None or (unit != "%" and unit not in _UNITS):
        raise RefusedError(f"{show(text)} is not a memory budget", _FIX)
    number = float(found.group(1))
    if unit == "%":
        return _of_fraction(number / 100, text)
    return _of_number(number, text) if unit == "" else _of_bytes(number * _UNITS[unit], text)


def _of_number(number: float, value: object) -> MemoryBudget:
    return _of_fraction(number, value) if number <= 1 else _of_bytes(number, value)


def _of_fraction(fraction: float, value: object) -> MemoryBudget:
    if not 0 < fraction <= 1:
        raise RefusedError(f"{show(value)} is not a part of a device's memory", _FIX)
    return MemoryBudget(fraction=fraction)


def _of_bytes(number: float, value: object) -> MemoryBudget:
    if not 1 <= number < 2**60:
        raise RefusedError(f"{show(value)} is not a possible number of bytes", _FIX)
    return MemoryBudget(num_bytes=int(number))
