"""The operator library `torchloom::` and the one way to define an operator in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchloom._torch.untraced import never_compile
from torchloom.graph.edit import know_fake

# The dispatcher keeps a definition only as long as the Library object that made it lives.
LIBRARY = torch.library.Library("torchloom", "DEF")


def define(
    schema: str, fake: Callable[..., Any] = lambda *_: None, *, is_composite: bool = False
) -> Any:
    """Define `torchloom::<schema>` with its fake and return the operator overload.

    Args:
        schema: an ATen schema without namespace, e.g. `"gather(Tensor shard) -> Tensor"`.
        fake: computes outputs of the right shape, dtype and device without data; default: there are none.
        is_composite: `fake` is all of the operator, made of other operators that have derivatives.
    """
    name = LIBRARY.define(schema)
    never_compile(fake.__code__, with_called=True)  # behind a graph break, too
    if is_composite:
        LIBRARY.impl(name, fake, "CompositeImplicitAutograd")
    else:
        torch.library.register_fake(f"torchloom::{name}", fake, lib=LIBRARY)
    op = getattr(torch.ops.torchloom, name).default
    if not is_composite:
        know_fake(op, fake)
    return op
