"""The shapes of public ZeRO-3 files: which can be used, and what the refused ones are told."""

from __future__ import annotations

import functools
import json

import pytest

from support.commands import invoke
from support.stage3_files import SHAPES, Shape, filled
from torchloom.cli.check import check
from torchloom.config import check_config, load_config

WORLD_SIZE = 8
USABLE = [shape for shape in SHAPES if not shape.refused]
REFUSED = [shape for shape in SHAPES if shape.refused]
BATCHES = [shape for shape in REFUSED if shape.refused == "train_batch_size"]


def name(shape: Shape) -> str:
    return shape.name


@pytest.mark.parametrize("shape", USABLE, ids=name)
def test_usable_shapes_load_and_check(shape, tmp_path):
    config = load_config(shape.config, world_size=WORLD_SIZE, auto=filled(shape.config))
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(shape.config))
    found = invoke(check, path, "--world-size", WORLD_SIZE)

    batch = config.batch
    assert batch.train_batch_size == batch.micro_batch_size * batch.accumulation_steps * WORLD_SIZE
    assert config.zero.stage == 3
    assert found.exit_code == 0, found.output


@pytest.mark.parametrize("shape", REFUSED, ids=name)
def test_refused_shapes_name_the_key_that_was_written(shape):
    checked = check_config(shape.config, world_size=WORLD_SIZE, auto=filled(shape.config))

    assert shape.refused in {error.path for error in checked.errors}
    for error in checked.errors:
        *sections, key = error.path.split(".")
        at = functools.reduce(lambda tree, section: tree[section], sections, shape.config)
        assert key in at or error.what.startswith("not given")
        assert error.fix


@pytest.mark.parametrize("shape", BATCHES, ids=name)
def test_a_batch_of_other_ranks_says_which(shape):
    values = filled(shape.config)
    (error,) = check_config(shape.config, world_size=WORLD_SIZE, auto=values).errors

    fits = str(error).rpartition("as written it fits a world size of ")[2]
    if not fits.isdigit():  # two values, of which the third has to follow
        assert "fewer" in shape.name
        assert "set train_batch_size to" in str(error)
        return
    assert not check_config(shape.config, world_size=int(fits), auto=values).errors
