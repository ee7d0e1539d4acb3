"""Says whether Dynamo works here, and whether it is about to capture again."""

from __future__ import annotations


def why_no_dynamo() -> str | None:
    """Return what keeps torch.compile from working on this Python and platform, or None."""
    from torch._dynamo.eval_frame import check_if_dynamo_supported

    try:
        check_if_dynamo_supported()
    except RuntimeError as error:
        return str(error)
    return None


def is_restart(error: BaseException) -> bool:
    """Say whether Dynamo is about to capture the same code again, having learnt something."""
    from torch._dynamo.exc import RestartAnalysis

    return isinstance(error, RestartAnalysis)


def forget_compiled() -> None:
    """Drop the entries that Dynamo has compiled in this process; what is called again is compiled again."""
    import torch

    torch._dynamo.reset()
