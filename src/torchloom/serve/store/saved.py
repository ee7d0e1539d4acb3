"""Save a program in a store, and load the one that fits a model."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchloom import envs
from torchloom.errors import ArtifactError
from torchloom.pieces.places import TEXT_HASHES
from torchloom.serve.call.program import OutOfRange, Program
from torchloom.serve.contract.contract import Contract
from torchloom.serve.counter import counter
from torchloom.serve.model.target import Target
from torchloom.serve.store.entries import entry_part, program_from
from torchloom.serve.store.folder import Store
from torchloom.serve.store.misses import changes_since, key_differences, why_miss

log = logging.getLogger(__name__)

_HASH_SEED = "PYTHONHASHSEED"


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
        """Return the program, None where there is none that fits.

        Args:
            target: the model.
            contract: what arguments look like.
            out_of_range: what a call outside of the contract does.
        """
        broken, entries = self.store.look()
        for line in broken:
            log.warning("%s", line)
        for name, entry in entries.items():
            if not name.startswith(f"{self.key}-") or changes_since(entry, target, contract):
                continue
            try:
                return program_from(self.store, name, entry, target, contract, out_of_range)
            except ArtifactError as error:
                log.warning("%s is not used: %s", name, error)
            except Exception as error:  # noqa: BLE001 - unpickling and the user's modules may raise anything
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
            "variants": [entry_part(variant, self.store) for variant in program.variants],
        }
        text = json.dumps(
            [[each["facts"], each["codes"]] for each in entry["variants"]],
            sort_keys=True,
        )
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        self.store.save(f"{self.key}-{digest}", entry)
        facts = [
            (name, *fact.get("ask", ())) for v in program.variants for name, fact in v.facts.items()
        ]
        relies = any(TEXT_HASHES in each or "order" in each[1:] for each in facts)
        if relies and not envs.get_str(_HASH_SEED, ""):
            log.warning(
                "%s is stored for this process alone: its code depends on the order of a set or on the hash of a text, "
                "which differ between processes; sort the set, or set %s for all of them",
                program.target.name,
                _HASH_SEED,
            )
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
        if not key_differences(entry, target, its, name) and not changes_since(entry, target, its):
            try:
                return program_from(store, key, entry, target, its, out_of_range)
            except ArtifactError:
                raise
            except Exception as error:  # unpickling and the user's modules may raise anything
                raise ArtifactError(f"{store.root}: {_cannot_be_made(error)}") from error
    reasons = why_miss(store, target, contract, name)
    raise ArtifactError(
        f"{store.root} holds no program for {target.name}: {'; '.join(reasons[:6])}. Build it again"
    )


def _cannot_be_made(error: Exception) -> str:
    return f"the program for it cannot be made in this process ({type(error).__name__}: {error}): build it again"


def _newest_first(store: Store) -> list[tuple[str, dict[str, Any]]]:
    entries = store.entries()
    return sorted(entries.items(), key=lambda item: store.saved_at(item[0]), reverse=True)
