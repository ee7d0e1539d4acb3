"""What differs between versions of torch though no name does: the rows `FACTS` of `table`, as questions."""

from __future__ import annotations

import torch
from torch.torch_version import TorchVersion


def keeps_tangents() -> bool:
    """Return whether autograd's frame holds the gradients of results through the whole of backward."""
    return TorchVersion(torch.__version__) < "2.13"


def guards_requires_grad() -> bool:
    """Return whether Dynamo puts guards on `requires_grad` of a module's parameters."""
    return TorchVersion(torch.__version__) >= "2.12"


def lowers_calls() -> bool:
    """Return whether Inductor is known to generate one function for several calls of a subgraph."""
    return TorchVersion(torch.__version__) >= "2.13"
