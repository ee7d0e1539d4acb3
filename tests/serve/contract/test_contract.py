"""Contracts: what they check, what they make, what of them is kept."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from torchloom.errors import ContractError
from torchloom.serve import Contract, Dim, maybe, record, tensor
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
        (lambda: tensor(Dim("n", -1, 2)), "it may be -1"),
        (lambda: Contract({"x": (Dim("n", 1, 2), Dim("n", 1, 3))}), "stands for two ranges"),
        (lambda: Contract({"x": (3,)}, fixed={"x": 1}), "both an argument that varies and fixed"),
    ],
)
def test_a_contract_that_contradicts_itself_says_how(make, text):
    with pytest.raises(ContractError, match=text):
        make()


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
