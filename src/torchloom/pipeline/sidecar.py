"""What was woven, kept beside the compiler's caches.

On a cache hit no pass runs and nothing is planned, so nothing could say which collectives the graphs
hold and what was decided. Both are written where the compiled graphs are, under what tells those
apart, and read back on a warm start.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchloom import _torch
from torchloom.files import write_whole
from torchloom.log import get_logger
from torchloom.plan import GraphPlan

logger = get_logger(__name__)


class Woven(NamedTuple):
    """What is remembered of one graph."""

    collectives: dict[str, int]
    plan: GraphPlan | None
    wants_another: bool = False
    """Whether another plan was tried after this one."""


def calling_text(example_inputs: Sequence[Any]) -> str:
    """Describe a call of a captured graph as far as compiled code differs by it.

    One captured graph becomes several: for each shape of the batch, with and without gradients,
    under autocast.
    """
    modes = [torch.is_grad_enabled(), torch.is_inference_mode_enabled()]
    modes += [torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")]
    return f"{modes} {[_input_text(each) for each in example_inputs]}"


def _input_text(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__  # numbers, and sizes that vary: named by the graph itself
    return f"{value.dtype} {value.device.type} {list(value.shape)} {value.requires_grad}"


def save(key: str, woven: Woven) -> None:
    """Remember a woven graph; a full disk costs a warning, not the run."""
    path = _path(key)
    data = {
        "collectives": woven.collectives,
        "plan": None if woven.plan is None else asdict(woven.plan),
        "wants_another": woven.wants_another,
    }
    try:
        write_whole(path, json.dumps(data, sort_keys=True, default=sorted))  # sets
    except OSError as error:
        logger.warning("the record of a woven graph cannot be written to %s: %s", path, error)


def load(key: str) -> Woven | None:
    """Return what is known of a graph that came from the caches, None when nothing is."""
    try:
        found = json.loads(_path(key).read_text())
        collectives = {str(name): int(count) for name, count in found["collectives"].items()}
        plan = found["plan"]
        known = None if plan is None else GraphPlan.from_dict(plan)
        return Woven(collectives, known, bool(found["wants_another"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _path(key: str) -> Path:
    return Path(_torch.inductor_cache_dir()) / "torchloom" / f"{key}.json"
