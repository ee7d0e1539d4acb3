"""Several models in one process, such as a teacher and a student, or an ensemble.

A communicator keeps, counts and compares gathered weights by name. So each living model gets its own
communicator over the same groups, and names and counts of two models do not mix.
"""

from __future__ import annotations

from torchloom.exchange import Agreement
from torchloom.runtime import Communicator, for_model, lookup
from torchloom.shard import living_layouts


def communicator_of(
    comm: Communicator, agreement: Agreement, divide_factor: float | None = None
) -> Communicator:
    """Return the communicator for a model that is about to be sharded. All ranks must call it.

    Args:
        comm: over the groups that it will be sharded over.
        agreement: between all ranks, which may have freed earlier models at different times.
        divide_factor: what sums of the model's gradients are divided by; None: by the number of ranks.
    """
    others = (lookup(layout.handle) for layout in living_layouts())
    taken = {other.model for other in others if other.first_handle == comm.first_handle}
    # Not the first free number: ranks may have freed different ones of several earlier models.
    free = max(taken, default=-1) + 1
    found = for_model(comm, agreement.most("the number of models over the same ranks", free))
    found.divide_factor = divide_factor  # also where an earlier model had another one
    return found
