"""cast_gathers: which weights travel in the dtype that they are read in."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from support.graphs import CONTEXT, NO_OPTIONS, Tied, TwoLayers, apply, captured
from torchloom import ops
from torchloom.graph import SharedWeights, args_of, find, graph_text

X = torch.randn(4, 6)
IDS = torch.arange(10)
BEFORE = ["dedupe_gathers", "elide_copies"]


class Autocast(nn.Module):
    """A model under autocast of its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.model(x).float()


class Reads(nn.Module):
    """One square weight, read as a function says."""

    def __init__(self, read) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.weight, x)


def dtypes(gm: fx.GraphModule) -> dict[str, torch.dtype]:
    return {args_of(node)[5]: args_of(node)[2] for node in find(gm.graph, ops.gather)}


def after(
    model: nn.Module, x: Tensor, context=CONTEXT, options=NO_OPTIONS
) -> dict[str, fx.GraphModule]:
    names = [*BEFORE, "cast_gathers", "zero3"]
    return captured(model, [x], names, context=context, options=options)


def test_golden(golden) -> None:
    graphs = captured(Autocast(TwoLayers()), [X], [*BEFORE, "cast_gathers"])
    golden("cast_gathers.two_layers", graph_text(graphs["joint"].graph))


def test_weights_of_products_are_cast_first_in_forward_and_backward() -> None:
    graphs = after(Autocast(TwoLayers()), X)
    names = {"model.first.weight", "model.second.weight"}
    assert dtypes(graphs["forward"]) == dict.fromkeys(names, torch.bfloat16)
    assert dtypes(graphs["backward"]) == {"model.second.weight": torch.bfloat16}
    reduced = {args_of(n)[-1]: n for n in find(graphs["backward"].graph, ops.reduce)}
    assert reduced.keys() == names
    for node in reduced.values():  # what is reduced, and in which dtypes, stays as it was
        assert node.args[0].meta["val"].dtype == node.args[2] == node.args[3] == torch.float32
    assert apply(graphs["joint"], ["cast_gathers"]).passes[0].num_edits == 0


def test_a_table_that_is_also_looked_up_stays_whole() -> None:
    found = dtypes(after(Autocast(Tied()), IDS)["forward"])
    assert found == {"model.table.weight": torch.float32}


@pytest.mark.parametrize(
    ("read", "travels"),
    [
        (lambda w, x: x.bfloat16() @ w.t().bfloat16(), torch.bfloat16),
        (lambda w, x: (x.bfloat16() @ w.bfloat16()) @ w.t().bfloat16(), torch.bfloat16),
        (lambda w, x: x.bfloat16() @ w.t().reshape(-1).bfloat16()[:6], torch.float32),
        (lambda w, x: (x.half() @ w.half()).float() + x.bfloat16() @ w.bfloat16(), torch.float32),
        (lambda w, x: F.layer_norm(x, (6,), w[0]) @ w.bfloat16().float(), torch.float32),
        (lambda w, x: x.bfloat16() @ w.bfloat16() * w.bfloat16().float().norm(), torch.bfloat16),
        (lambda w, x: x + w.to(torch.float8_e4m3fn).float().sum(), torch.float32),
    ],
)
def test_every_reader_counts(read, travels: torch.dtype) -> None:
    found = set(dtypes(after(Reads(lambda w, x: read(w, x).float().sum()), X)["forward"]).values())
    assert found == {travels}


def test_parameters_that_may_not_be_cast_stay() -> None:
    options = {"cast_gathers": {"params": ("model.first.weight",)}}
    found = dtypes(after(Autocast(TwoLayers()), X, options=options)["forward"])
    assert found == {"model.first.weight": torch.bfloat16, "model.second.weight": torch.float32}


def test_weights_in_shared_memory_are_read_where_they_are() -> None:
    shared = SharedWeights(
        name="s", handle="2x1#test", params=(("model.first.weight", torch.float32),)
    )
    found = dtypes(
        after(Autocast(TwoLayers()), X, dataclasses.replace(CONTEXT, shared_weights=shared))[
            "forward"
        ]
    )
    assert found == {"model.first.weight": torch.float32, "model.second.weight": torch.bfloat16}
