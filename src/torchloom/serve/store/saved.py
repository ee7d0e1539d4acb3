"""The place of a program in a store: saved there, and found again where it fits a model."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchloom.errors import ArtifactError
from torchloom.serve.call.program import OutOfRange, Program
from torchloom.serve.contract.contract import Contract
from torchloom.serve.counter import counter
from torchloom.serve.model.target import Target
from torchloom.serve.store.entries import entry_part, program_from
from torchloom.serve.store.folder import Store
from torchloom.serve.store.misses import Compare, fit_of

log = logging.getLogger(__name__)


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

    def load(
        self,
        target: Target,
        contract: Contract,
        out_of_range: OutOfRange,
        compare: Compare = fit_of,
    ) -> Program | None:
        """Return the program, None where there is none that fits.

        Args:
            target: the model.
            contract: what arguments look like.
            out_of_range: what a call outside of the contract does.
            compare: a program with its model now.
        """
        broken, entries = self.store.look()
        for line in broken:
            log.warning("%s", line)
        for name, entry in entries.items():
            if not name.startswith(f"{self.key}-"):
                continue
            fit = compare(self.store, entry, target, contract)
            try:
                if not fit.changes:
                    return program_from(
                        self.store, name, entry, target, contract, fit.fingerprints, out_of_range
                    )
            except ArtifactError as error:
                log.warning("%s is not used: %s", name, error)
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
        text = json.dumps([each["fingerprint"] for each in entry["variants"]], sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        self.store.save(f"{self.key}-{digest}", entry)
        counter.num_saves += 1
        return ""
