"""Why a stored program does not fit: its key, changed constants and code, missing objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torchloom.errors import ArtifactError
from torchloom.pieces.machine import machine_of
from torchloom.serve.contract.box import Box
from torchloom.serve.contract.contract import Contract
from torchloom.serve.model.code import CodeReader
from torchloom.serve.model.fingerprint import Fingerprint
from torchloom.serve.model.target import Target
from torchloom.serve.store.entries import faults_of
from torchloom.serve.store.folder import Store
from torchloom.serve.store.program_key import differences, key_of


@dataclass
class Fit:
    """How a stored program fits a model."""

    fingerprints: list[Fingerprint] = field(default_factory=list)
    """What its variants rely on of the model, where it fits."""
    changes: list[str] = field(default_factory=list)
    """What is another thing now, one line each."""


Compare = Callable[[Store, Mapping[str, Any], Target, Contract], Fit]


def why_miss(
    store: Store,
    target: Target,
    contract: Contract | None = None,
    name: str | None = None,
    compare: Compare | None = None,
) -> list[str]:
    """Say why nothing in a store fits a model, one line each; nothing if something does.

    Args:
        store: where programs are.
        target: the model.
        contract: what the calls look like; that of each program if left out.
        name: of the program; any if left out.
        compare: a program with its model now; `fit_of` if left out.
    """
    broken, entries = store.look()
    nearest = [f"{store.root} holds no program"]
    for number, entry in enumerate(entries.values()):
        its = contract or Contract.from_json(entry["factors"]["contract"])
        lines = [
            *key_differences(entry, target, its, name),
            *(compare or fit_of)(store, entry, target, its).changes,
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


def fit_of(store: Store, entry: Mapping[str, Any], target: Target, contract: Contract) -> Fit:
    """Compare what a program relied on with what the model is now; nothing is traced.

    Args:
        store: where the program is.
        entry: of the program.
        target: the model.
        contract: what arguments look like.
    """
    known: dict[str, Fingerprint] = {}
    fit, reader = Fit(), CodeReader()
    for stored in entry["variants"]:
        name = stored["fingerprint"]
        try:
            if name not in known:
                without = frozenset(stored["without"])
                box = Box.from_json(stored["box"])
                scope = target.scope(contract.blank(box.largest, without))
                known[name] = Fingerprint.from_bytes(store.get(name))
                fit.changes += known[name].changed(scope, target, reader)
            fit.fingerprints.append(known[name])
        except (TypeError, KeyError) as error:  # another signature, other dims
            fit.changes.append(f"the call: {error}")
        except ArtifactError as error:
            fit.changes.append(str(error))
    fit.changes = list(dict.fromkeys(fit.changes))
    return fit
