"""Tandem repeats in sequences of labels."""

from __future__ import annotations

import random
from typing import Any

import pytest

from torchloom.regions.find import Stretch, longest_stretch


def labels(text: str) -> list[int]:
    return [ord(each) for each in text]


def stretch(text: str, min_repeats: int = 3, min_period: int = 1) -> Stretch | None:
    return longest_stretch(labels(text), 0, len(text), min_repeats, min_period)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("abcxyxyxyd", (3, 9, 2)),
        ("xyxyxy", (0, 6, 2)),
        ("xyxyxyx", (0, 7, 2)),
        ("xyxyzxy", None),
        ("", None),
        ("abcdef", None),
        # Two kinds of layers in turn: the period is the pair.
        ("-aabcaabdaabcaabdaabcaabd-", (1, 25, 8)),
        # Of an encoder and a decoder the larger one.
        ("ababab/cdecdecde", (7, 16, 3)),
    ],
)
def test_what_follows_upon_itself_is_found(text: str, expected: Any) -> None:
    assert stretch(text) == (expected and Stretch(*expected))


def test_layers_of_many_equal_operators_are_found() -> None:
    """Operators that stand many times in each layer must not hide the period."""
    layer = "".join(random.Random(0).choices("abc", k=40)) + "S"
    found = stretch("".join(["embed", layer * 9, "head"]), min_repeats=4)
    assert found is not None
    assert found.period == 41
    assert found.num_repeats == 9


@pytest.mark.parametrize("seed", range(5))
def test_a_stretch_repeats(seed: int) -> None:
    rng = random.Random(seed)
    unit = rng.choices(range(5), k=rng.randint(3, 30))
    around = [rng.choices(range(5, 60), k=rng.randint(0, 30)) for _ in range(2)]
    num = rng.randint(4, 9)
    sequence = [*around[0], *unit * num, *around[1]]
    found = longest_stretch(sequence, 0, len(sequence), 4, 1)
    assert found is not None
    begin, end, period = found
    assert all(sequence[i] == sequence[i + period] for i in range(begin, end - period))
    assert end - begin >= len(unit) * num
