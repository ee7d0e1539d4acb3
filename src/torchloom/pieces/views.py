"""Results that are inputs or views of inputs, as Python that makes them of the inputs of each call.

    result   keys[1, :, 2:]    keys: input 3, with sizes (2, n, 8, 4), where n is input 0
    text     a3.as_strided((a0, 6, 4), (32, 4, 1), a3.storage_offset() + 32*a0 + 8)

A compiled graph returns memory of the right sizes, but only a view that torch makes has the input's version counter, and
a graph that writes to an input may return what lies in a buffer of its own. torch's wrappers make these views anew by
the sizes and the offset of what was returned; sizes, strides and offset of the trace are those of eager code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from torchloom._torch.shapes import size_text
from torchloom._torch.standalone import Returned
from torchloom.pieces.reduced import NotPlainError


def result_texts(
    graph_module: fx.GraphModule, returned: Sequence[Returned | None]
) -> tuple[str, ...] | None:
    """Return the Python of each result, None if all were computed.

    Args:
        graph_module: a graph of Dynamo, or a piece of one.
        returned: for each result, the input that it is or views; None for one that was computed.

    Returns:
        `out` stands for what the compiled graph returns, `a0`, `a1`, ... for its inputs.

    Raises:
        NotPlainError: a result is a view that sizes, strides and an offset do not describe.
    """
    if not any(returned):
        return None
    inputs = [n.meta["example_value"] for n in graph_module.graph.find_nodes(op="placeholder")]
    results: Any = graph_module.graph.output_node().args[0]
    texts = []
    for place, (node, each) in enumerate(zip(results, returned, strict=True)):
        if each is None:
            texts.append(f"out[{place}]")
        elif each.is_view:
            texts.append(_view_text(node.meta["example_value"], each.place, inputs))
        else:
            texts.append(f"a{each.place}")
    return tuple(texts)


def _view_text(view: torch.Tensor, place: int, inputs: Sequence[Any]) -> str:
    base = inputs[place]
    is_strided = view.layout is base.layout is torch.strided
    if not is_strided or _kind(view) != _kind(base):
        raise NotPlainError("a result views an input as another dtype or layout")
    if view.untyped_storage()._cdata != base.untyped_storage()._cdata:
        raise NotPlainError("a result views an input in a way that its trace does not show")
    if torch.is_grad_enabled() and base.requires_grad:
        raise NotPlainError("a result is a view of an input that may need gradients")
    symbols = _symbols(inputs)

    def row(sizes: Sequence[Any]) -> str:
        return f"({''.join(f'{text(size)}, ' for size in sizes)})"

    def text(size: Any) -> str:
        found = size_text(size, symbols)
        if found is None:
            raise NotPlainError(f"no input tells the size {size} of a view that it returns")
        return found

    offset = text(view.storage_offset() - base.storage_offset())
    start = f"a{place}.storage_offset() + {offset}"
    return f"a{place}.as_strided({row(view.shape)}, {row(view.stride())}, {start})"


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.is_conj(), tensor.is_neg()


def _symbols(inputs: Sequence[Any]) -> dict[str, str]:
    """Return the Python by which the inputs tell each symbol."""
    found: dict[str, str] = {}
    for place, value in enumerate(inputs):
        known: dict[str, Any] = {f"a{place}": value}
        if isinstance(value, torch.Tensor):
            known = {f"a{place}.size({dim})": size for dim, size in enumerate(value.shape)}
            known |= {f"a{place}.stride({dim})": step for dim, step in enumerate(value.stride())}
            known[f"a{place}.storage_offset()"] = value.storage_offset()
        for text, size in known.items():
            if isinstance(size, torch.SymInt):
                found.setdefault(str(size), text)
    return found
