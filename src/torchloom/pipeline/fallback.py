"""What happens when a pass or a plan fails: the graph runs eagerly sharded, and log and report say why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from torchloom import events
from torchloom.errors import own_error
from torchloom.log import get_logger
from torchloom.pipeline.report import GraphReport
from torchloom.pipeline.setup import CompileSetup
from torchloom.shard.regather import LIVE

logger = get_logger(__name__)


def fall_back(
    setup: CompileSetup, gm: fx.GraphModule, report: GraphReport, error: Exception
) -> Callable[..., Any]:
    """Return what runs a captured graph eagerly, with the sharded model's own gathers and reductions.

    Args:
        setup: the session; with its `strict` the error is raised instead, before this is called.
        gm: the graph as it was captured.
        report: of the graph; gets the reason.
        error: why it could not be woven.
    """
    cause = own_error(error) or error
    report.fallback = f"{type(cause).__name__}: {cause}"
    first_line = str(cause).splitlines()[0]
    if setup.announce and len(setup.report.fallbacks) == 1:
        logger.warning(
            "weaving failed, the model runs eagerly sharded (correct, slower): %s. "
            "Set compile.strict to make this an error",
            first_line,
        )
    events.emit(events.PassesSkipped(reason=first_line))
    if not setup.regather:
        return gm.forward

    def run(*args: Any) -> Any:
        with LIVE.forward_pass():
            return gm.forward(*args)

    return run
