"""Files beside the compiler's caches that record what was woven and planned.

On a cache hit no pass runs and no plan is made, so reports could not say which collectives the graphs
call and what the plan was. So both are written next to the compiled graphs, under the same keys, and read
back on a warm start.

Each woven graph has its own file. Inductor caches forward and backward separately, and a slower rank may
take from the cache a graph that a faster rank has just finished. It did not weave that graph, so it must
not overwrite what the other rank wrote about it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchloom._torch.inductor import inductor_cache_dir
from torchloom.costs.timeline import Timeline
from torchloom.files import from_plain, write_whole
from torchloom.log import get_logger
from torchloom.memory import PeakContents
from torchloom.plan import GraphPlan

logger = get_logger(__name__)

_DAMAGE = (
    OSError,
    ArithmeticError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    RecursionError,
)
"""What reading a file that is missing or damaged may raise."""


@dataclass(frozen=True, slots=True)
class Decided:
    """What was decided for one captured graph."""

    plan: GraphPlan | None
    wants_another: bool = False
    """Whether another plan may be better than this one."""
    peak: PeakContents | None = None
    """What is alive at the peak, where that was found."""
    times: Timeline | None = None
    """Predicted, where the peak was."""


def calling_text(example_inputs: Sequence[Any]) -> str:
    """Describe a call of a captured graph by all that selects different compiled code.

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
    """Save what was decided; if the disk is full, only a warning is logged."""
    _write(_path(key), asdict(decided))


def load(key: str) -> Decided | None:
    """Return what was decided for a graph that came from the caches, None when nothing is known."""
    try:
        return from_plain(Decided, json.loads(_path(key).read_text()), is_exact=True)
    except _DAMAGE:
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
    except _DAMAGE:
        return {}


def _write(path: Path, data: Mapping[str, Any]) -> None:
    try:
        write_whole(path, json.dumps(data, sort_keys=True, default=sorted))  # sets
    except OSError as error:
        logger.warning("the record of a woven graph cannot be written to %s: %s", path, error)


def _path(key: str) -> Path:
    return Path(inductor_cache_dir()) / "torchloom" / f"{key}.json"
