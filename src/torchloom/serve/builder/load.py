"""Loads the stored program of a model, saves one, and captures a model again to check that a program is its own."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torchloom.errors import ArtifactError, ServeError
from torchloom.serve.call.program import OutOfRange, Program
from torchloom.serve.contract.box import Box
from torchloom.serve.contract.contract import Contract
from torchloom.serve.counter import counter
from torchloom.serve.model.target import Target
from torchloom.serve.store.entries import entry_part, program_from
from torchloom.serve.store.folder import Store
from torchloom.serve.store.misses import Compare, Fit, fit_of, key_differences, why_miss

log = logging.getLogger(__name__)


def load(
    path: str | Path | Store,
    model: Callable[..., Any],
    contract: Contract | None = None,
    *,
    name: str | None = None,
    out_of_range: OutOfRange = "raise",
    check: Literal["fingerprint", "trace"] = "fingerprint",
) -> Program:
    """Return a stored program of a model; nothing is compiled.

    Args:
        path: the store.
        model: what was given to `build`, with any weights.
        contract: what was given to `build`; the stored one if left out, which is possible where all that
            it fixes are numbers and texts.
        name: what was given to `build`; of any name if left out.
        out_of_range: as in `build`.
        check: "fingerprint" compares what the program relied on, and traces nothing; "trace" captures the model
            again and compares the graphs, whatever was edited.

    Raises:
        ArtifactError: the store holds none that fits; the text says what differs.
    """
    store = path if isinstance(path, Store) else Store(path)
    target = Target(model)
    compare = fit_in_trace if check == "trace" else fit_of
    for key, entry in _newest_first(store):
        its = contract or Contract.from_text(entry["contract"])
        if key_differences(entry, target, its, name):
            continue
        fit = compare(store, entry, target, its)
        if not fit.changes:
            return program_from(store, key, entry, target, its, fit.fingerprints, out_of_range)
    reasons = why_miss(store, target, contract, name, compare)
    raise ArtifactError(
        f"{store.root} holds no program for {target.name}: {'; '.join(reasons[:6])}. Build it again"
    )


def fit_in_trace(store: Store, entry: Mapping[str, Any], target: Target, contract: Contract) -> Fit:
    """Capture a model as a program's traces did, and compare the graphs.

    Args:
        store: where the program is.
        entry: of the program.
        target: the model.
        contract: what arguments look like.
    """
    # Here, and not above: a program that is found by its fingerprint needs no Dynamo.
    from torchloom.serve.builder.trace import Traced, trace

    unbacked, fit = entry["factors"]["options"]["unbacked"], Fit()
    done: dict[str, Traced] = {}
    for stored in entry["variants"]:
        box, without = Box.from_json(stored["traced"]), frozenset(stored["without"])
        name = f"{box}{sorted(without)}"
        try:
            if name not in done:
                done[name] = trace(target, contract, box, unbacked=unbacked, without=without)
        except ServeError as error:
            return Fit(changes=[str(error)])
        fit.fingerprints.append(done[name].fingerprint)
        if done[name].digest != stored["graph"]:
            fit.changes.append(f"the graph of {target.name} for {box} is another one")
    return fit


def _newest_first(store: Store) -> list[tuple[str, dict[str, Any]]]:
    entries = store.entries()
    return sorted(entries.items(), key=lambda item: store.saved_at(item[0]), reverse=True)


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
            "contract": program.contract.to_text(),
            "variants": [entry_part(variant, self.store) for variant in program.variants],
        }
        text = json.dumps([each["fingerprint"] for each in entry["variants"]], sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        self.store.save(f"{self.key}-{digest}", entry)
        counter.num_saves += 1
        return ""
