"""The program for one box of sizes, and what calls and stores need to know of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torchloom.serve.call.conditions import Asked
from torchloom.serve.call.cuda_graphs import Recorded
from torchloom.serve.call.entry import Run
from torchloom.serve.call.weight_checks import Look
from torchloom.serve.contract.box import Box
from torchloom.serve.model.facts import Facts
from torchloom.serve.model.fingerprint import Fingerprint

if TYPE_CHECKING:
    from torchloom.serve.builder.prove import ProofVerdict


@dataclass
class Variant:
    """The program for a box of sizes."""

    box: Box
    without: frozenset[str]
    """Paths of optional tensors that are None."""
    run: Run
    """Takes what the model's forward takes, the model first."""
    fingerprint: Fingerprint
    verdicts: tuple[ProofVerdict, ...] = ()
    """What was assumed of sizes, and that it holds; none for a program that was loaded."""
    pieces: tuple[str, ...] = ()
    """Digests of the graphs that it calls, equal ones once."""
    num_calls: int = 1
    """How many graphs run in a call."""
    writes: bool = False
    """Whether it may write to its arguments or to buffers."""
    recorded: Sequence[Recorded] = ()
    """What of it runs as CUDA graphs."""
    checks: tuple[str, ...] = ()
    """What of that was tried for some sizes only and is asked at each call, as Python: `n_batch < 9`."""
    asked: Asked = ()
    """What it relies on of arguments beside their tensors."""
    looks: Sequence[Look] = ()
    """What it was compiled to find in the model: dtypes, sizes and strides of weights."""
    told: tuple[str, ...] = ()
    """What the verdicts were, for a program that was loaded."""
    stored: dict[str, Any] = field(default_factory=dict)
    """What a store needs to make it again."""
    why_not_stored: str = ""

    def forget_recordings(self) -> None:
        """Drop CUDA graphs for arguments at addresses: of a build's own examples, which are gone."""
        for each in self.recorded:
            each.forget()

    @property
    def facts(self) -> Facts:
        """What calls compare of the model."""
        return self.fingerprint.facts

    @property
    def assumed(self) -> tuple[str, ...]:
        """What was assumed of sizes, in words."""
        return self.told or tuple(map(str, self.verdicts))


def shown_variant(variant: Variant) -> str:
    """Return the sizes that a program is for, and which tensors are None in it."""
    without = f", without {', '.join(sorted(variant.without))}" if variant.without else ""
    return f"{variant.box}{without}"
