"""Load a checkpoint on all ranks, or leave all of them as they are."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from torchloom.engine.checkpoints import restore
from torchloom.engine.checkpoints.choose import choose
from torchloom.engine.checkpoints.contents import read_contents
from torchloom.engine.checkpoints.exchange import SaveExchange, answers, attempt
from torchloom.engine.checkpoints.restore import LoadOptions, Prepared
from torchloom.engine.checkpoints.trained import Counters, Trained
from torchloom.engine.checkpoints.weights import load_by_function, whole_weights
from torchloom.errors import CheckpointError
from torchloom.log import get_logger

logger = get_logger(__name__)


@dataclass(frozen=True)
class Loaded:
    """What a load came to."""

    path: str
    client_state: dict[str, Any]
    counters: Counters | None
    """None where only the model was loaded."""


def load(
    engine: Trained, root: Path, tag: str | None, options: LoadOptions, ranks: SaveExchange
) -> Loaded:
    """Verify, read on all ranks, then write into the engine; see `Engine.load_checkpoint`.

    Args:
        engine: receives the weights and states.
        root: folder of all checkpoints.
        tag: which one; None takes the newest that verifies.
        options: what to take from it.
        ranks: the exchange of this load between all ranks.

    Raises:
        CheckpointError: there is none, or one rank cannot load it; the engine is as it was.
        PeerLostError: a rank has ended.
    """
    path = choose(root, tag, ranks)
    failure = f"checkpoint {path.name!r} in {str(root)!r} cannot be loaded"
    ready: list[Prepared] = []
    source: dict[str, Tensor] = {}
    function = options.custom_load_fn

    def prepare() -> None:
        contents = read_contents(path, ranks.rank, ranks.world_size)
        ready.append(restore.prepare(engine, contents, options))
        if function is not None:
            source.update(whole_weights(engine, contents))

    def run_function() -> None:
        assert function is not None
        ready[0].writes += load_by_function(engine, source, function)

    ranks.together(failure, prepare)
    if function is not None:
        # Weights are gathered for it: no rank may be missing, so nothing is read here.
        ranks.together(failure, run_function)
    prepared = ready[0]
    mine = attempt(lambda: restore.call_foreign(prepared))
    texts = ranks.texts("what others' code took", mine)
    try:
        answers(failure, texts)
    except CheckpointError:
        if "ok" in json.loads(mine):
            restore.undo_foreign(prepared)
        raise
    restore.apply(prepared)
    if ranks.rank == 0:
        for note in prepared.notes:
            logger.warning("%s", note)
    return Loaded(str(path), prepared.client_state, prepared.counters)
