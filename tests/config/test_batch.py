"""The batch triple: what follows from what, and what an error offers."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchloom.config import check_config, load_config

TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
ACCUM = "gradient_accumulation_steps"
SIZES = st.integers(1, 64)


def triple(config) -> tuple[int, int, int]:
    batch = config.batch
    return batch.train_batch_size, batch.micro_batch_size, batch.accumulation_steps


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({}, (4, 1, 1)),
        ({MICRO: 3}, (12, 3, 1)),
        ({TRAIN: 16}, (16, 4, 1)),
        ({ACCUM: 2}, (8, 1, 2)),
        ({TRAIN: 16, MICRO: 2}, (16, 2, 2)),
        ({TRAIN: 16, ACCUM: 2}, (16, 2, 2)),
        ({MICRO: 2, ACCUM: 3}, (24, 2, 3)),
        ({TRAIN: 24, MICRO: 2, ACCUM: 3}, (24, 2, 3)),
        ({TRAIN: "auto", MICRO: 2, ACCUM: "auto"}, (8, 2, 1)),
        ({TRAIN: 16, MICRO: "auto", ACCUM: None}, (16, 4, 1)),
    ],
)
def test_what_is_missing_is_derived(document, expected):
    assert triple(load_config(document, world_size=4)) == expected


@given(micro=SIZES, accum=SIZES, ranks=SIZES, kept=st.sets(st.sampled_from([TRAIN, MICRO, ACCUM])))
def test_any_part_of_a_consistent_triple_gives_a_consistent_triple(micro, accum, ranks, kept):
    full = {TRAIN: micro * accum * ranks, MICRO: micro, ACCUM: accum}
    part = {name: value for name, value in full.items() if name in kept}

    train, solved_micro, solved_accum = triple(load_config(part, world_size=ranks))

    assert train == solved_micro * solved_accum * ranks
    solved = {TRAIN: train, MICRO: solved_micro, ACCUM: solved_accum}
    assert part.items() <= solved.items()
    if len(part) >= 2:
        assert solved == full


@given(train=st.integers(1, 4096), micro=SIZES, accum=SIZES, ranks=SIZES)
def test_a_contradiction_names_all_values_and_each_correction_works(train, micro, accum, ranks):
    document = {TRAIN: train, MICRO: micro, ACCUM: accum}

    checked = check_config(document, world_size=ranks)

    if train == micro * accum * ranks:
        assert not checked.errors
        return
    (error,) = checked.errors
    assert error.path == TRAIN
    for word in (f"{train} is", f"{MICRO} {micro}", f"{ACCUM} {accum}", f"world size {ranks}"):
        assert word in error.what
    for name in (TRAIN, MICRO, ACCUM):
        assert name in error.fix
    for name, value in re.findall(r"(\w+) to (\d+)", error.fix):
        assert not check_config({**document, name: int(value)}, world_size=ranks).errors


@given(train=st.integers(1, 512), ranks=st.integers(2, 16), other=st.sampled_from([MICRO, ACCUM]))
def test_two_values_that_do_not_divide_offer_a_size_that_does(train, ranks, other):
    document = {TRAIN: train, other: 3}

    checked = check_config(document, world_size=ranks)

    if train % (3 * ranks):
        offered = re.search(r"to (\d+)", checked.errors[0].fix)
        assert not check_config({**document, TRAIN: int(offered[1])}, world_size=ranks).errors


def test_auto_without_any_size_is_one_with_a_warning():
    config = load_config({TRAIN: "auto", MICRO: "auto", ACCUM: "auto"}, world_size=2)

    assert triple(config) == (2, 1, 1)
    assert (MICRO, "warning") in [(note.path, note.level) for note in config.notes]


def test_a_bad_value_hides_the_triple_instead_of_a_second_error():
    checked = check_config({TRAIN: "x", MICRO: 3, ACCUM: 2}, world_size=4)

    assert [error.path for error in checked.errors] == [TRAIN]
