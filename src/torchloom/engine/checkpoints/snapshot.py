"""What a checkpoint keeps of an engine, as parts of tensors and plain values.

    model/<param>               every rank its shard, as boxes of the whole, or one rank the whole
    optim/<param>/<state>       likewise, of each state that has an element per element
    grad/<param>                likewise, in the middle of an accumulation
    rank<k>/grad/<param>        gradients that are not averaged yet: each rank's own
    buffer/<name>               persistent buffers
    values                      all the rest: see `plain`

Values, buffers among them, are expected to be equal on all ranks. Where one is not, each rank that
differs from rank 0 keeps its own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from torchloom.engine.checkpoints import names, rng
from torchloom.engine.checkpoints.foreign import kind_of
from torchloom.engine.checkpoints.parts import Writers, gradients_of, states_of, weights_of
from torchloom.engine.checkpoints.payload import PayloadPart
from torchloom.engine.checkpoints.trained import Counters, Trained
from torchloom.engine.checkpoints.values import Value, values_of
from torchloom.engine.checkpoints.weight_files import config_of
from torchloom.shard import layout_of


@dataclass
class EngineSnapshot:
    """The state that one rank saves; see `take`."""

    parts: list[PayloadPart]
    values: dict[str, Value]
    pieces: str
    """A hash of what divided states there are, which must be equal on all ranks."""
    facts: dict[str, Any]
    generators: bytes
    tied: dict[str, str]
    """Other names of parameters and buffers in `state_dict()`, with the names that they are kept under."""

    def staged(self, copy: Callable[[str, Tensor], Tensor]) -> EngineSnapshot:
        """Return the same of copies, which training does not change."""
        parts = [replace(part, tensor=copy(part.key, part.tensor)) for part in self.parts]
        values = {
            name: Value(value.tree, {key: copy(key, each) for key, each in value.tensors.items()})
            for name, value in self.values.items()
        }
        return replace(self, parts=parts, values=values)


def take(
    engine: Trained, counters: Counters, client_state: Mapping[str, Any], *, exclude_frozen: bool
) -> EngineSnapshot:
    """Collect what a checkpoint keeps; tensors are the engine's own, not copies.

    Args:
        engine: what is saved.
        counters: where the run stands.
        client_state: the caller's own plain data.
        exclude_frozen: whether to leave out parameters that are not trained.

    Raises:
        CheckpointError: something cannot be kept; it is named.
    """
    layout = layout_of(engine.module)
    writers = Writers(engine.world, layout)
    of_params = {id(each.param): each.spec.name for each in engine.local}
    values = dict(values_of(engine, counters, client_state, of_params))
    parts = list(weights_of(engine, layout, writers, exclude_frozen))
    states = list(states_of(engine, writers))
    for name, value, of_param in states:
        values[name] = value
        parts += of_param
    gradients = list(gradients_of(engine, writers))
    values["gradients"] = Value({name: kind for name, kind, _ in gradients})
    parts += [part for *_, found in gradients for part in found]
    shared = [(n, v.tree) for n, v, _ in states] + [(n, k) for n, k, _ in gradients if k != "local"]
    facts = {
        "stage": layout.stage,
        "world_size": engine.world.world_size,
        "params": {spec.name: list(spec.shape) for spec in layout},
        "global_steps": counters.global_steps,
        "global_samples": counters.global_samples,
        "accumulation_steps": engine.gradient_accumulation_steps(),
        "has_optimizer": engine.optimizer is not None,
        "scales_loss": engine.scaler.config is not None,
        "optimizer": kind_of(engine.optimizer),
        "scheduler": kind_of(engine.lr_scheduler),
        "frozen_left_out": exclude_frozen,
        "model_config": config_of(engine.module),
    }
    # Each rank's list of divided states, without their values: a rank that lacks one would leave a
    # hole in the stored tensor.
    pieces = json.dumps([(name, _kinds(tree)) for name, tree in shared])
    digest = hashlib.sha256(pieces.encode()).hexdigest()[:16]
    return EngineSnapshot(
        parts, values, digest, facts, rng.capture(), names.tied_names(engine.module)
    )


def _kinds(tree: Any) -> Any:
    return [[key, kind] for key, kind, _ in tree] if isinstance(tree, list) else tree
