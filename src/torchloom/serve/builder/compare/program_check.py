"""Is a program the model for its sizes? Compared at the edges of its box, and where floats vary at values of these.

Where a program differs, either the size is one at which the model behaves in its own way, and gets a program of its
own, or there is another cause, which is told: forward changes what it reads, or it draws random numbers.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from torchloom.errors import ProofError
from torchloom.serve.builder.compare.compare import differences_at, is_random
from torchloom.serve.builder.compare.differences import Difference
from torchloom.serve.builder.compare.state_changes import refuse_changed
from torchloom.serve.builder.prove import show_sizes
from torchloom.serve.call.variant import Variant
from torchloom.serve.contract.box import Box
from torchloom.serve.contract.contract import Contract
from torchloom.serve.model.target import Target, gradient_mode_of


def difference_in_box(
    target: Target, contract: Contract, variant: Variant
) -> tuple[dict[str, Any], Difference] | None:
    """Return the first sizes at which a program differs from the model, and in what; None if there are none.

    Args:
        target: the model; it is what it was before.
        contract: what arguments look like.
        variant: the program.

    Raises:
        ServeError: the model fails, or changes what it reads.
        ProofError: the model draws random numbers.
    """
    for sizes in _trials(contract, variant.box):
        with gradient_mode_of(contract):
            found = differences_at(target, contract, variant.run, sizes, variant.without)
        if found is None:
            continue
        refuse_changed(target, contract, variant)
        with gradient_mode_of(contract):
            draws = found.is_of_values and is_random(target, contract, sizes, variant.without)
        if draws:
            raise ProofError(
                f"compiled for {variant.box}, {target.name} differs from itself run eagerly at "
                f"{show_sizes([sizes])}: {found}. It draws random numbers (as dropout does in training), and compiled "
                "code draws others than eager code for the same seed: options={'fallback_random': True} lets it draw "
                "the same ones, check='off' leaves the comparison out"
            )
        return sizes, found
    return None


def may_share_tensors(target: Target, contract: Contract, variant: Variant) -> bool:
    """Say whether tensors that look alike may be one object: whether the model then does the same.

    Args:
        target: the model; it is what it was before.
        contract: what arguments look like.
        variant: the program.
    """
    if variant.writes or ["apart"] in variant.asked:
        return True  # calls are asked already
    filled = {path for path, spec in contract.tensors() if spec.fill is not None}
    groups = contract.alike(variant.without)
    if any(filled & set(group) for group in groups):
        return False  # the values of one may be none of another's
    try:
        with gradient_mode_of(contract):
            return not any(
                differences_at(
                    *(target, contract, variant.run, variant.box.largest, variant.without),
                    one_object=group,
                )
                for group in groups
            )
    except Exception:  # noqa: BLE001 - forward may raise anything for one tensor in two arguments
        return False


def _trials(contract: Contract, box: Box) -> Iterator[dict[str, Any]]:
    """Yield sizes, and floats that vary, at which a program is compared with the model."""
    floats, draw = contract.floats(), random.Random(0)
    if not floats:
        yield from box.edges()
        return
    values = [each.trials(draw) for each in floats]
    edges = list(box.edges())
    for number in range(max(len(edges), *map(len, values))):
        chosen = {
            each.path: its[number % len(its)] for each, its in zip(floats, values, strict=True)
        }
        yield {**edges[number % len(edges)], **chosen}
