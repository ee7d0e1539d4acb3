"""Models of one process whose parameters share names: a teacher and a student, members of an ensemble.

Gathered weights are remembered, counted and compared between ranks by name. Where two living models
share a name, each gets a communicator of its own over the same groups.
"""

from __future__ import annotations

from torch import nn

from torchloom.engine.agreement import Agreement
from torchloom.runtime import Communicator, for_model, lookup
from torchloom.shard import living_layouts


def communicator_of(model: nn.Module, comm: Communicator, agreement: Agreement) -> Communicator:
    """Return the communicator for a model that is about to be sharded. All ranks must call it.

    Args:
        model: not sharded yet.
        comm: over the groups that it will be sharded over.
        agreement: between all ranks, which may have freed earlier models at different times.
    """
    names = {name for name, _ in model.named_parameters()}
    taken = set()
    for layout in living_layouts():
        other = lookup(layout.handle)
        if other.shard is comm.shard and not names.isdisjoint(spec.name for spec in layout):
            taken.add(other.model)
    # Not the first free number: ranks may have freed different ones of several earlier models.
    free = max(taken, default=-1) + 1
    return for_model(comm, agreement.most("the number of models with equal names", free))
