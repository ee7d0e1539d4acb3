"""Contracts: what they check, what they make, what of them is kept."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from torchloom.errors import ContractError
from torchloom.serve import Box, Contract, Dim, maybe, record, tensor
from torchloom.serve.contract.box import exact_boxes, first_boxes

BATCH, LENGTH = Dim("batch", 1, 8), Dim("length", 2, 16)


@dataclass
class Pair:
    """Two tensors."""

    one: Tensor
    two: Tensor


FULL = Contract(
    {
        "ids": tensor(BATCH, LENGTH, dtype=torch.int64, below=100),
        "mask": maybe(BATCH, LENGTH, dtype=torch.bool),
        "pair": record(Pair, one=(BATCH, 4), two=(BATCH,)),
    },
    fixed={"causal": True, "scale": 0.5},
)


def test_examples_have_the_sizes_that_are_asked_for():
    args = FULL.example({"batch": 3, "length": 5})
    assert args["ids"].shape == (3, 5)
    assert int(args["ids"].max()) < 100
    assert args["pair"].two.shape == (3,)


def test_examples_are_equal_for_equal_seeds_and_none_where_asked():
    one, two = (FULL.example({"batch": 2, "length": 3}, without=["mask"]) for _ in range(2))
    assert torch.equal(one["ids"], two["ids"])
    assert one["mask"] is None
    assert FULL.blank(without=["mask"])["ids"].shape == (8, 16)


def test_a_contract_is_the_same_after_json():
    again = Contract.from_json(json.loads(json.dumps(FULL.to_json())))
    assert again.to_json() == FULL.to_json()
    assert again.example()["ids"].shape == (8, 16)


def test_values_that_cannot_be_written_down_need_the_contract():
    contract = Contract({"x": (BATCH,)}, fixed={"cache": object()})
    with pytest.raises(ContractError, match="give the contract"):
        Contract.from_json(contract.to_json())


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Dim("a b", 1, 2), "no name of a size"),
        (lambda: Dim("n", 3, 2), "3 to 2"),
        (lambda: tensor(Dim("n", -1, 2)), "it may be -1"),
        (lambda: tensor(-1), "-1 is no size"),
        (lambda: Contract({"x": 3}), "'x' is described by 3"),
        (lambda: Contract({"x": (Dim("n", 1, 2), Dim("n", 1, 3))}), "stands for two ranges"),
        (lambda: Contract({"x": (3,)}, fixed={"x": 1}), "both an argument that varies and fixed"),
        (lambda: Contract({"x": (3,)}, grad="maybe"), "'maybe'"),
    ],
)
def test_a_contract_that_contradicts_itself_says_how(make, text):
    with pytest.raises(ContractError, match=text):
        make()


def test_hints_are_large_and_never_alike():
    box = Box.of([Dim("a", 1, 8), Dim("b", 1, 8), Dim("c", 8, 9), Dim("d", 3, 3)])
    hints = box.hints()
    assert hints["d"] == 3
    assert len({hints[name] for name in "abc"}) == 3
    assert all(hints[dim.name] in dim for dim in box.dims)
    with pytest.raises(ContractError, match="no size of its own"):
        Box.of([Dim("a", 1, 2), Dim("b", 1, 2), Dim("c", 1, 2)]).hints()


def test_edges_hold_the_ends_and_the_sizes_that_are_special():
    edges = list(Box.of([Dim("a", 0, 64), Dim("b", 1, 9)]).edges())
    assert {sizes["a"] for sizes in edges} >= {0, 1, 2, 64}
    assert {"a": 0, "b": 1} in edges
    assert {"a": 64, "b": 9} in edges
    assert len(edges) == len({tuple(sizes.items()) for sizes in edges})


def test_boxes_cover_a_contract_once():
    contract = Contract({"x": (BATCH, LENGTH)})
    boxes = first_boxes(contract, {"batch": [(1, 3), (4, 8)], "length": [(2, 16)]})
    for batch in range(1, 9):
        for length in range(2, 17):
            sizes = {"batch": batch, "length": length}
            assert sum(sizes in box for box in boxes) == 1
    with pytest.raises(ContractError, match="needs names because 2 sizes vary"):
        exact_boxes(contract, [1, 2])
    with pytest.raises(ContractError, match="names 9 for 'batch'"):
        exact_boxes(contract, {"batch": [9]})
    with pytest.raises(ContractError, match="names 'width'"):
        exact_boxes(contract, {"width": [9]})


def test_examples_of_one_shape_hold_values_of_their_own():
    """Equal ones would hide that a program takes one argument for another."""
    rows = Dim("rows", 2, 8)
    contract = Contract({"x": (rows, 3), "pair": {"a": (rows, 3), "b": (rows, 3)}})
    args = contract.example({"rows": 4})
    again = contract.example({"rows": 4})
    tensors = [args["x"], args["pair"]["a"], args["pair"]["b"]]
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(tensors, 2))
    assert torch.equal(args["pair"]["b"], again["pair"]["b"])
