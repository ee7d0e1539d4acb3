"""Why a stored program does not fit: its key, changed constants and code, missing objects."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torchloom.pieces.machine import machine_of
from torchloom.pieces.places import value_at
from torchloom.serve.contract.contract import Contract
from torchloom.serve.model.code import Codes
from torchloom.serve.model.facts import changed_facts
from torchloom.serve.model.target import Target
from torchloom.serve.store.entries import box_from, faults_of
from torchloom.serve.store.folder import Store
from torchloom.serve.store.program_key import differences, key_of


def why_miss(
    store: Store, target: Target, contract: Contract | None = None, name: str | None = None
) -> list[str]:
    """Say why nothing in a store fits a model, one line each; nothing if something does.

    Args:
        store: where programs are.
        target: the model.
        contract: what the calls look like; that of each program if left out.
        name: of the program; any if left out.
    """
    broken, entries = store.look()
    nearest = [f"{store.root} holds no program"]
    for number, entry in enumerate(entries.values()):
        its = contract or Contract.from_json(entry["factors"]["contract"])
        lines = [
            *key_differences(entry, target, its, name),
            *changes_since(entry, target, its),
            *faults_of(entry, store),
        ]
        if not lines:
            return []
        if number == 0 or len(lines) < len(nearest):
            nearest = lines
    if broken and not entries:
        return [*broken, *_unlike(store, target)]
    return [*broken, *nearest]


def _unlike(store: Store, target: Target) -> list[str]:
    """Say in what programs that may not be used differ from what would be asked, as far as that is plain data."""
    machine = machine_of(sorted(target.device_types(None)))
    now = {"model": target.name, "machine": machine}
    lines: list[str] = []
    for entry in store.unverified()[0].values():
        factors = entry.get("factors")
        stored = dict(factors) if isinstance(factors, Mapping) else {}
        there = stored.get("machine")
        if isinstance(there, Mapping):  # names that are not ours could hold anything
            stored["machine"] = {name: there.get(name) for name in machine}
        found = differences(now, {name: stored.get(name) for name in now})
        lines += [line for line in found if line not in lines]
    return lines


def key_differences(
    entry: Mapping[str, Any], target: Target, contract: Contract, name: str | None
) -> list[str]:
    """Say in what the key of a program differs from what is asked.

    Args:
        entry: of the program.
        target: the model.
        contract: what arguments look like.
        name: that is asked for; any if None.
    """
    stored = entry["factors"]
    its = stored["name"] if name is None else name
    now = key_of(target, contract, stored["options"], its)
    lines = differences(now, stored)
    if now["structure"] == stored["structure"]:
        return lines
    tensors = differences(target.structure(), entry["structure"])
    return [line for line in lines if not line.startswith("structure")] + [
        f"tensor {line}" for line in tensors[:8]
    ]


def changes_since(entry: Mapping[str, Any], target: Target, contract: Contract) -> list[str]:
    """Say which sources and constants are no longer what they were.

    Args:
        entry: of the program.
        target: the model.
        contract: what arguments look like.
    """
    lines: list[str] = []
    for stored in entry["variants"]:
        found: list[str] = []
        try:
            without = frozenset(stored["without"])
            scope = target.scope(contract.blank(box_from(stored["box"]).largest, without))
            found += Codes.from_json(stored["codes"]).changed(partial(value_at, scope=scope))
            found += changed_facts(stored["facts"], scope)
        except (TypeError, KeyError) as error:  # another signature, other dims
            found.append(f"the call: {error}")
        lines += [line for line in found if line not in lines]
    return lines
