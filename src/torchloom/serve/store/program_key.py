"""What tells one program from another before anything is traced: the factors of its key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchloom.pieces.machine import machine_of
from torchloom.serve.contract.contract import Contract
from torchloom.serve.model.target import Target


def key_of(
    target: Target, contract: Contract, options: Mapping[str, Any], name: str = ""
) -> dict[str, Any]:
    """Return what tells one program from another before anything is traced.

    Args:
        target: the model.
        contract: what arguments look like.
        options: of the build, as plain data.
        name: of the program.

    Returns:
        Factors by name, as plain data.
    """
    return {
        "name": name,
        "model": target.name,
        "structure": target.structure_digest(),
        "contract": contract.to_json(),
        "options": dict(options),
        "machine": machine_of(sorted(target.device_types(contract))),
    }


def differences(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Say in what the factors of two keys differ, one line each.

    Example:
        >>> differences({"torch": "2.13.0", "isa": "avx2"}, {"torch": "2.12.1", "isa": "avx2"})
        ["torch: '2.13.0' here, '2.12.1' there"]
    """
    lines = []
    for name in sorted(wanted.keys() | found.keys()):
        here, there = wanted.get(name), found.get(name)
        if isinstance(here, Mapping) and isinstance(there, Mapping):
            lines += [f"{name}, {line}" for line in differences(here, there)]
        elif here != there:
            lines.append(f"{name}: {_shown(here)} here, {_shown(there)} there")
    return lines


def _shown(value: Any) -> str:
    return "nothing" if value is None else repr(value)
