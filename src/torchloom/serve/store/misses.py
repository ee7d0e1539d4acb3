"""Tells one stored program from another, and says why none fits: its key, the machine, changes of the model, lost objects."""

from __future__ import annotations

import functools
import hashlib
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from torchloom.errors import ArtifactError
from torchloom.serve.contract.box import Box
from torchloom.serve.contract.contract import Contract
from torchloom.serve.model.code import CodeReader
from torchloom.serve.model.fingerprint import Fingerprint
from torchloom.serve.model.target import Target
from torchloom.serve.store.entries import faults_of
from torchloom.serve.store.folder import Store


def machine_of(device_types: Sequence[str]) -> dict[str, str]:
    """Return what compiled code depends on: versions, sources, the processor, the number of threads, the GPU.

    Inductor compiles for the very processor (`-march=native`) and writes the number of threads into its loops.

    Args:
        device_types: the types of the devices that it runs on, such as "cpu".
    """
    facts = {"torch": torch.__version__, "python": platform.python_version()}
    facts["torchloom"] = _sources_digest()
    facts["machine"] = platform.machine()
    facts["vector instructions"] = torch.backends.cpu.get_cpu_capability()
    facts["processor"] = _processor()
    facts["threads"] = str(torch.get_num_threads())
    for kind in sorted(set(device_types) - {"cpu"}):
        module = torch.get_device_module(kind)
        facts[kind] = str(module.get_device_properties(0)) if module.is_available() else "none"
    return facts


_BUILDING = ("_torch", "custom_ops", "graph", "ops", "pieces", "regions", "serve")
"""Rooms whose code decides what a program is, whole, so that no new file is forgotten."""


@functools.cache
def _sources_digest() -> str:
    """Return a hash of the sources that build programs; read once: what runs is what was imported."""
    house = Path(__file__).parents[2]
    digest = hashlib.blake2b(digest_size=6)
    for path in sorted(path for room in _BUILDING for path in (house / room).rglob("*.py")):
        digest.update(str(path.relative_to(house)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


@functools.cache
def _processor() -> str:
    """Return the processor's name with a hash of all that it can do."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    said = dict(
        reversed([[part.strip() for part in line.split(":", 1)] for line in lines if ":" in line])
    )
    flags = said.get("flags", said.get("Features", ""))
    digest = hashlib.sha256(" ".join(sorted(flags.split())).encode()).hexdigest()[:12]
    return f"{said.get('model name', platform.processor())} ({digest})"


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
        its = contract or Contract.from_text(entry["contract"])
        lines = [
            *key_differences(entry, target, its, name),
            *(compare or fit_of)(store, entry, target, its).changes,
            *faults_of(entry, store),
        ]
        if not lines:
            return []
        if number == 0 or len(lines) < len(nearest):
            nearest = lines
    return broken if broken and not entries else [*broken, *nearest]


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
