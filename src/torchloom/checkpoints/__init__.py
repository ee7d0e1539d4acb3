"""Keeps checkpoints that any number of ranks and any stage can load, and refuses damaged ones.

    <dir>/<tag>/             appears under this name only when complete
        manifest.json        every file with size and digests
        engine.json          facts and plain values: counters, schedule, groups, client state
        index.json           where each tensor is
        __0_0.distcp ...     tensors, one file per rank
        .metadata            the index once more, for torch.distributed.checkpoint
        rank_0.json ...      what each rank has of its own, states of random number generators among it
    <dir>/latest             the newest tag

`snapshot` collects the state, `write` and `restore` move it, `manifest` and `choose` verify it.
Every tensor of weights and states is stored without padding under its whole shape, so what is stored does not
depend on how many ranks held it.
"""

from __future__ import annotations

from torchloom.checkpoints.engine_values import Counters
from torchloom.checkpoints.restore import LoadOptions
from torchloom.checkpoints.service import Checkpoints

__all__ = ["Checkpoints", "Counters", "LoadOptions"]
