"""The shapes of 107 public ZeRO-3 files: how many can be used, and what the refused ones are told."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Iterator, Mapping

import pytest
import typer
from typer.testing import CliRunner

from support.stage3_files import OTHERS, SHAPES, Shape, Tree, filled
from torchloom.cli.check import check
from torchloom.config import check_config, load_config

WORLD_SIZE = 8
USABLE = [shape for shape in SHAPES if not shape.refused]
REFUSED = [shape for shape in (*SHAPES, *OTHERS) if shape.refused]
BATCHES = [shape for shape in REFUSED if shape.refused == "train_batch_size"]

app = typer.Typer()
app.command()(check)


def name(shape: Shape) -> str:
    return shape.name


def values_of(tree: object) -> Iterator[object]:
    inner = tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, list) else None
    if inner is None:
        yield tree
    else:
        for each in inner:
            yield from values_of(each)


def is_open(tree: object) -> bool:
    return "auto" in values_of(tree)


def kind_of(config: Tree) -> str:
    """Return who completes a file of this shape."""
    if not is_open(config):
        return "whole"
    if "optimizer" not in config:
        return "optimizer of the program"
    if not is_open(config["optimizer"]):
        return "own optimizer, the rest open"
    return "optimizer and schedule open" if "scheduler" in config else "optimizer open"


def offloads(config: Tree, part: str) -> bool:
    zero = config["zero_optimization"]
    return zero.get(part, {}).get("device") == "cpu"


def files(*, where) -> int:
    return sum(shape.files for shape in SHAPES if where(shape))


def warns_of(path: str):
    """Return a test of shapes: can it be used, with a warning about this key?"""

    def where(shape: Shape) -> bool:
        if shape.refused:
            return False
        config = load_config(shape.config, world_size=WORLD_SIZE, auto=filled(shape.config))
        return path in {note.path for note in config.notes if note.level == "warning"}

    return where


def leaves_open(path: str):
    return lambda shape: path in check_config(shape.config, world_size=WORLD_SIZE).open


def test_totals_are_those_of_the_survey():
    found = {
        "all": files(where=lambda shape: True),
        "auto": files(where=lambda shape: is_open(shape.config)),
        "offload_param": files(where=lambda shape: offloads(shape.config, "offload_param")),
        "some offload": files(
            where=lambda shape: (
                offloads(shape.config, "offload_param")
                or offloads(shape.config, "offload_optimizer")
                or shape.config["zero_optimization"].get("cpu_offload")
            )
        ),
        "optimizer.params.lr": files(where=leaves_open("optimizer.params.lr")),
        "scheduler.params.warmup_num_steps": files(
            where=leaves_open("scheduler.params.warmup_num_steps")
        ),
        "scheduler.params.total_num_steps": files(
            where=leaves_open("scheduler.params.total_num_steps")
        ),
        "scheduler.params.warmup_max_lr": files(
            where=leaves_open("scheduler.params.warmup_max_lr")
        ),
        "overlap_comm": files(where=warns_of("zero_optimization.overlap_comm")),
        "same_network": files(where=warns_of("same_network")),
    }
    assert found == {
        "all": 107,
        "auto": 99,
        "offload_param": 46,
        "some offload": 52,
        "optimizer.params.lr": 48,
        "scheduler.params.warmup_num_steps": 38,
        "scheduler.params.total_num_steps": 14,
        "scheduler.params.warmup_max_lr": 2,
        "overlap_comm": 16,
        "same_network": 5,
    }


def test_kinds():
    found: Counter[str] = Counter()
    for shape in SHAPES:
        found[kind_of(shape.config)] += shape.files

    assert found == {
        "optimizer and schedule open": 37,
        "optimizer open": 12,
        "optimizer of the program": 44,
        "own optimizer, the rest open": 6,
        "whole": 8,
    }
    assert len({json.dumps(shape.config, sort_keys=True) for shape in SHAPES}) == len(SHAPES)


def test_at_least_92_percent_can_be_used():
    passed = sum(
        shape.files
        for shape in SHAPES
        if not check_config(shape.config, world_size=WORLD_SIZE, auto=filled(shape.config)).errors
    )

    assert passed == files(where=lambda shape: not shape.refused)
    assert passed / files(where=lambda shape: True) >= 0.92


@pytest.mark.parametrize("shape", USABLE, ids=name)
def test_usable_shapes_load_and_check(shape, tmp_path):
    config = load_config(shape.config, world_size=WORLD_SIZE, auto=filled(shape.config))
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(shape.config))
    found = CliRunner().invoke(app, [str(path), "--world-size", str(WORLD_SIZE)])

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
