"""Entries of a store: a program as plain data and names of objects, and made runnable again."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchloom.pieces.shell import Shell
from torchloom.serve.call.assemble import assembled
from torchloom.serve.call.eager import why_enforced
from torchloom.serve.call.padded import Padded
from torchloom.serve.call.program import OutOfRange, Program
from torchloom.serve.call.stitching import Stitching
from torchloom.serve.call.variant import Variant
from torchloom.serve.call.weight_checks import looks_from, with_weight_check
from torchloom.serve.contract.box import Box
from torchloom.serve.contract.contract import Contract
from torchloom.serve.counter import counter
from torchloom.serve.model.fingerprint import Fingerprint
from torchloom.serve.model.target import Target
from torchloom.serve.store.folder import Store
from torchloom.serve.store.stored_pieces import loaded_piece, object_names


def program_from(
    store: Store,
    name: str,
    entry: Mapping[str, Any],
    target: Target,
    contract: Contract,
    fingerprints: Iterable[Fingerprint],
    out_of_range: OutOfRange,
) -> Program:
    """Make a stored program ready to run; nothing is compiled.

    Args:
        store: where it is.
        name: of its entry.
        entry: what it is made of, as it was signed.
        target: the model.
        contract: what arguments look like.
        fingerprints: of its variants.
        out_of_range: what a call outside of the contract does.

    Raises:
        ArtifactError: a part of it is missing or damaged.
    """
    if enforced := why_enforced():
        return Program(target, contract, [], out_of_range=out_of_range, key=name, enforced=enforced)
    started = time.perf_counter()
    done: dict[str, Any] = {}

    def call(stored: Mapping[str, Any]) -> Any:
        known = json.dumps(stored, sort_keys=True)
        if known not in done:
            done[known] = loaded_piece(stored, store)
        return done[known]

    variants = []
    for stored, fingerprint in zip(entry["variants"], fingerprints, strict=True):
        calls = [call(piece) for piece in stored["pieces"]]
        variants.append(_variant_from(stored, store, calls, target, contract, fingerprint))
    counter.num_loads += 1
    return Program(
        target,
        contract,
        variants,
        out_of_range=out_of_range,
        key=name,
        origin="loaded",
        seconds=time.perf_counter() - started,
    )


def _variant_from(
    stored: Mapping[str, Any],
    store: Store,
    calls: Sequence[Any],
    target: Target,
    contract: Contract,
    fingerprint: Fingerprint,
) -> Variant:
    """Return the program for one box, as `entry_part` wrote it, around its loaded pieces."""
    shell = Shell.from_bytes(store.get(stored["shell"]))
    stitching = Stitching.from_json(stored["stitching"])
    compiled, recorded = assembled(
        stitching, calls, stored["recorded"], stored["fixed"], stored["written"]
    )
    looks = looks_from(stored["looks"])
    run = shell.around(with_weight_check(compiled, looks), target.call)
    if padded := stored["padded"]:
        axes = {path: tuple(axis) for path, axis in padded["axes"].items()}
        run = Padded(run, target, contract, contract.dims[padded["dim"]], padded["size"], axes)
    return Variant(
        Box.from_json(stored["box"]),
        frozenset(stored["without"]),
        run,
        fingerprint,
        pieces=tuple(stored["digests"]),
        num_calls=len(stitching.steps),
        writes=stored["writes"],
        recorded=recorded,
        told=tuple(stored["verdicts"]),
        checks=tuple(stored["checks"]),
        asked=stored["asked"],
        looks=looks,
    )


def entry_part(variant: Variant, store: Store) -> dict[str, Any]:
    """Store the objects of a program for one box, and return what an entry says of it."""
    return {
        "box": variant.box.to_json(),
        "traced": variant.stored["traced"],
        "graph": variant.stored["graph"],
        "checks": list(variant.checks),
        "asked": [list(line) for line in variant.asked],
        "without": sorted(variant.without),
        "fingerprint": store.put(variant.fingerprint.to_bytes()),
        "digests": list(variant.pieces),
        "shell": store.put(variant.stored["shell"]),
        "stitching": variant.stored["stitching"],
        "pieces": variant.stored["pieces"],
        "padded": variant.stored.get("padded"),
        "recorded": variant.stored["recorded"],
        "writes": variant.writes,
        "fixed": variant.stored["fixed"],
        "written": variant.stored["written"],
        "verdicts": list(variant.assumed),
        "looks": [list(look) for look in variant.looks],
    }


def faults_of(entry: Mapping[str, Any], store: Store) -> list[str]:
    """Say which parts of a program cannot be used."""
    return [text for digest in sorted(_objects(entry)) if (text := store.fault(digest))]


def _objects(entry: Mapping[str, Any]) -> set[str]:
    """Return the names of all objects that a program is made of."""
    found = set()
    for stored in entry["variants"]:
        found |= {stored["shell"], stored["fingerprint"]}
        for piece in stored["pieces"]:
            found |= object_names(piece)
    return found


def describe_entry(entry: Mapping[str, Any], store: Store) -> tuple[list[str], list[str]]:
    """Say what an entry of unknown origin is made of, and what of it is damaged; nothing of it is followed."""
    try:
        factors = entry["factors"]
        machine = ", ".join(f"{name} {value}" for name, value in factors["machine"].items())
        names = _objects(entry)
        faults = faults_of(entry, store)
    except (KeyError, TypeError, AttributeError) as error:
        return ["no program of this version"], [f"its entry is incomplete ({error!r})"]
    kinds = {".py": "generated sources", ".so": "shared objects", "": "pickles and tensors"}
    counts = [
        f"{sum(Path(name).suffix == suffix for name in names)} {words}"
        for suffix, words in kinds.items()
    ]
    return [f"{factors['model']} for {machine}", ", ".join(counts)], faults
