"""Programs in a store: under which key, with what they relied on, and why one does not fit."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torchloom.errors import ArtifactError
from torchloom.pieces.machine import machine_of
from torchloom.pieces.places import value_at
from torchloom.pieces.shell import Shell
from torchloom.serve.box import Box
from torchloom.serve.bucket import Padded
from torchloom.serve.code import Codes
from torchloom.serve.contract import Contract
from torchloom.serve.counter import counter
from torchloom.serve.cudagraph import Pool, assembled
from torchloom.serve.dims import Dim, dim_to_json
from torchloom.serve.facts import changed_facts
from torchloom.serve.inputs import looked_at, looks_from
from torchloom.serve.parts import loaded_piece, parts_of
from torchloom.serve.program import OutOfRange, Program, Variant
from torchloom.serve.stitch import Stitching
from torchloom.serve.store import Store, differences
from torchloom.serve.target import Target

log = logging.getLogger(__name__)


def key_of(
    target: Target, contract: Contract, options: Mapping[str, Any], name: str = ""
) -> dict[str, Any]:
    """Return what tells one program from another before anything is traced."""
    return {
        "name": name,
        "model": target.name,
        "structure": target.structure_digest(),
        "contract": contract.to_json(),
        "options": dict(options),
        "machine": machine_of(sorted(target.device_types(contract))),
    }


@dataclass
class Saved:
    """The place of a program in a store.

    Its key is made of `factors`. There may be several programs under it, for other constants or sources of
    the model: the one whose facts hold is taken.
    """

    store: Store
    factors: Mapping[str, Any]

    @property
    def key(self) -> str:
        """The hash of the factors."""
        text = json.dumps(self.factors, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def load(self, target: Target, contract: Contract, out_of_range: OutOfRange) -> Program | None:
        """Return the program, None where there is none that fits."""
        broken, entries = self.store.look()
        for line in broken:
            log.warning("%s", line)
        for name, entry in entries.items():
            if not name.startswith(f"{self.key}-") or _outdated(entry, target, contract):
                continue
            try:
                return _program(self.store, name, entry, target, contract, out_of_range)
            except ArtifactError as error:
                log.warning("%s is not used: %s", name, error)
            except Exception as error:  # noqa: BLE001 - its code refers to what this process has not
                log.warning("%s is not used: %s", name, _cannot_be_made(error))
        return None

    def save(self, program: Program) -> str:
        """Store a program; return why it was not stored, or nothing."""
        reasons = sorted({v.why_not_stored for v in program.variants if v.why_not_stored})
        if reasons:
            log.warning("%s is not stored: %s", program.target.name, "; ".join(reasons))
            return "; ".join(reasons)
        entry = {
            "factors": self.factors,
            "structure": program.target.structure(),
            "variants": [_stored(variant, self.store) for variant in program.variants],
        }
        text = json.dumps(
            [[each["facts"], each["codes"]] for each in entry["variants"]],
            sort_keys=True,
        )
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        self.store.save(f"{self.key}-{digest}", entry)
        counter.num_saves += 1
        return ""


def load(
    path: str | Path | Store,
    model: Callable[..., Any],
    contract: Contract | None = None,
    *,
    name: str | None = None,
    out_of_range: OutOfRange = "raise",
) -> Program:
    """Return a stored program of a model; nothing is traced or compiled.

    Args:
        path: the store.
        model: what was given to `build`, with any weights.
        contract: what was given to `build`; the stored one if left out, which is possible where all that
            it fixes are numbers and texts.
        name: what was given to `build`; of any name if left out.
        out_of_range: as in `build`.

    Raises:
        ArtifactError: the store holds none that fits; the text says what differs.
    """
    store = path if isinstance(path, Store) else Store(path)
    target = Target(model)
    for key, entry in _newest_first(store):
        its = contract or Contract.from_json(entry["factors"]["contract"])
        if not _differs(entry, target, its, name) and not _outdated(entry, target, its):
            try:
                return _program(store, key, entry, target, its, out_of_range)
            except ArtifactError:
                raise
            except Exception as error:
                raise ArtifactError(f"{store.root}: {_cannot_be_made(error)}") from error
    reasons = why_miss(store, target, contract, name)
    raise ArtifactError(
        f"{store.root} holds no program for {target.name}: {'; '.join(reasons[:6])}. Build it again"
    )


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
            *_differs(entry, target, its, name),
            *_outdated(entry, target, its),
            *faults_of(entry, store),
        ]
        if not lines:
            return []
        if number == 0 or len(lines) < len(nearest):
            nearest = lines
    if broken and not entries:
        return [*broken, *_unlike(store, target)]
    return [*broken, *nearest]


def _cannot_be_made(error: Exception) -> str:
    return f"the program for it cannot be made in this process ({type(error).__name__}: {error}): build it again"


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


def _newest_first(store: Store) -> list[tuple[str, dict[str, Any]]]:
    entries = store.entries()
    return sorted(entries.items(), key=lambda item: store.saved_at(item[0]), reverse=True)


def _differs(
    entry: Mapping[str, Any], target: Target, contract: Contract, name: str | None
) -> list[str]:
    """Say in what the key of a program differs from what is asked."""
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


def _outdated(entry: Mapping[str, Any], target: Target, contract: Contract) -> list[str]:
    """Say which sources and constants are no longer what they were."""
    lines: list[str] = []
    for stored in entry["variants"]:
        found: list[str] = []
        try:
            without = frozenset(stored["without"])
            scope = target.scope(contract.blank(_box(stored["box"]).largest, without))
            found += Codes.from_json(stored["codes"]).changed(partial(value_at, scope=scope))
            found += changed_facts(stored["facts"], scope)
        except (TypeError, KeyError) as error:  # another signature, other dims
            found.append(f"the call: {error}")
        lines += [line for line in found if line not in lines]
    return lines


def _program(
    store: Store,
    name: str,
    entry: Mapping[str, Any],
    target: Target,
    contract: Contract,
    out_of_range: OutOfRange,
) -> Program:
    started = time.perf_counter()
    done: dict[str, Any] = {}

    def call(stored: Mapping[str, Any]) -> Any:
        known = json.dumps(stored, sort_keys=True)
        if known not in done:
            done[known] = loaded_piece(stored, store)
        return done[known]

    variants, pool = [], Pool()
    for stored in entry["variants"]:
        shell = Shell.from_bytes(store.get(stored["shell"]))
        stitching = Stitching.from_json(stored["stitching"])
        calls = [call(piece) for piece in stored["pieces"]]
        compiled = assembled(
            stitching, calls, stored["recorded"], stored["fixed"], stored["written"], pool
        )
        looks = looks_from(stored["looks"])
        run = shell.around(looked_at(compiled, looks), target.call)
        if padded := stored["padded"]:
            axes = {path: tuple(axis) for path, axis in padded["axes"].items()}
            dim = contract.dims[padded["dim"]]
            run = Padded(run, target, contract, dim, padded["size"], axes)
        variants.append(
            Variant(
                _box(stored["box"]),
                frozenset(stored["without"]),
                run,
                stored["facts"],
                Codes.from_json(stored["codes"]),
                pieces=tuple(stored["digests"]),
                num_calls=len(stitching.steps),
                writes=stored["writes"],
                is_recorded=stored["recorded"] != "off",
                told=tuple(stored["verdicts"]),
                checks=tuple(stored["checks"]),
                asked=stored["asked"],
                looks=looks,
            )
        )
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


def _stored(variant: Variant, store: Store) -> dict[str, Any]:
    return {
        "box": [[dim.name, *dim_to_json(dim)] for dim in variant.box.dims],
        "checks": list(variant.checks),
        "asked": [list(line) for line in variant.asked],
        "without": sorted(variant.without),
        "facts": dict(variant.facts),
        "codes": variant.codes.to_json(),
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


def _box(stored: list[list[Any]]) -> Box:
    return Box(tuple(Dim(name, *ends) for name, *ends in stored))


def faults_of(entry: Mapping[str, Any], store: Store) -> list[str]:
    """Say which parts of a program cannot be used."""
    return [text for digest in sorted(_objects(entry)) if (text := store.fault(digest))]


def _objects(entry: Mapping[str, Any]) -> set[str]:
    """Return the names of all objects that a program is made of."""
    found = set()
    for stored in entry["variants"]:
        found.add(stored["shell"])
        for piece in stored["pieces"]:
            found |= parts_of(piece)
    return found


def held(entry: Mapping[str, Any], store: Store) -> tuple[list[str], list[str]]:
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
