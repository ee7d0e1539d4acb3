"""Says whether Dynamo works here, whether it is about to capture again, and what differs between versions of torch (`FACTS`)."""

from __future__ import annotations

import torch
from torch.torch_version import TorchVersion


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


def keeps_tangents() -> bool:
    """Return whether autograd's frame holds the gradients of results through the whole of backward."""
    return TorchVersion(torch.__version__) < "2.13"


def guards_requires_grad() -> bool:
    """Return whether Dynamo puts guards on `requires_grad` of a module's parameters."""
    return TorchVersion(torch.__version__) >= "2.12"
