"""Let calls of a model go through a session: at the start, and when a schedule or a plan changes."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from torchloom._torch.inductor import load_inductor, why_cache_is_open
from torchloom._torch.module_calls import compile_in_place
from torchloom.graph import GraphPass
from torchloom.log import get_logger
from torchloom.pipeline import CompileSession
from torchloom.shard import detach_hooks
from torchloom.shard.regather import around_compiled

logger = get_logger(__name__)


def start_compiled(
    model: nn.Module,
    session: CompileSession,
    passes: tuple[GraphPass, ...] | None = None,
    **kwargs: Any,
) -> None:
    """Let calls of a sharded model go through a session from now on.

    Args:
        model: sharded.
        session: what compiles its graphs.
        passes: the passes to run from now on; None: the session's passes.
        kwargs: more arguments of `torch.compile`.
    """
    if session.backend == "inductor":
        load_inductor()
        if (reason := why_cache_is_open()) and session.announce:
            logger.warning("%s", reason)
    around = partial(around_compiled, regather=session.regather, before=session.before_forward)
    compile_in_place(model, session.begin(passes), around=around, **kwargs)
    detach_hooks(model)  # last, so that a failure above leaves the model unchanged
