"""What was woven, kept beside the compiler's caches.

On a cache hit no pass runs and nothing is planned, so nothing could say which collectives the graphs
hold and what was decided. Both are written where the compiled graphs are, under what tells those
apart, and read back on a warm start.

Each woven graph has a file of its own. Inductor caches forward and backward one by one, and a rank
that comes late finds the one that a quicker rank has just finished, without weaving it: what it
knows is then less than all, and must not replace what the other rank wrote.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchloom._torch.inductor import inductor_cache_dir
from torchloom.files import write_whole
from torchloom.log import get_logger
from torchloom.memory import PeakContents
from torchloom.plan import GraphPlan

logger = get_logger(__name__)


class Decided(NamedTuple):
    """What was decided for one captured graph."""

    plan: GraphPlan | None
    wants_another: bool = False
    """Whether another plan was tried after this one."""
    peak: PeakContents | None = None
    """What is alive at the peak, where that was found."""


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


def save(key: str, decided: Decided) -> None:
    """Remember what was decided; a full disk costs a warning, not the run."""
    plan = None if decided.plan is None else asdict(decided.plan)
    peak = None if decided.peak is None else decided.peak.to_dict()
    known = {"plan": plan, "wants_another": decided.wants_another, "peak": peak}
    _write(_path(key), known)


def load(key: str) -> Decided | None:
    """Return what was decided for a graph that came from the caches, None when nothing is known."""
    try:
        found = json.loads(_path(key).read_text())
        plan = found["plan"]
        known = None if plan is None else GraphPlan.from_dict(plan)
        peak = found.get("peak")  # older files have none
        alive = None if peak is None else PeakContents.from_dict(peak)
        return Decided(known, bool(found["wants_another"]), alive)
    except (
        OSError,
        ArithmeticError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        RecursionError,
    ):
        return None


def save_collectives(key: str, kind: str, counts: Mapping[str, int]) -> None:
    """Remember the collectives of one woven graph, e.g. of the "forward" one.

    Args:
        key: the compile's own key.
        kind: "forward" or "backward".
        counts: number of collectives by operator.
    """
    _write(_path(f"{key}-{kind}"), dict(counts))


def load_collectives(key: str, kind: str) -> dict[str, int]:
    """Return the collectives of a woven graph that came from the caches, none if not known."""
    try:
        found = json.loads(_path(f"{key}-{kind}").read_text())
        return {str(name): int(count) for name, count in found.items()}
    except (OSError, ArithmeticError, ValueError, TypeError, AttributeError, RecursionError):
        return {}


def _write(path: Path, data: Mapping[str, Any]) -> None:
    try:
        write_whole(path, json.dumps(data, sort_keys=True, default=sorted))  # sets
    except OSError as error:
        logger.warning("the record of a woven graph cannot be written to %s: %s", path, error)


def _path(key: str) -> Path:
    return Path(inductor_cache_dir()) / "torchloom" / f"{key}.json"
