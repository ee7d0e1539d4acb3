"""The records: frozen, plain to print, hashed alike on every rank, free of torch."""

from __future__ import annotations

import dataclasses
import importlib
import json
import pkgutil

import pytest

import torchloom.config
from torchloom.config import FrozenMap, load_config, thaw

FULL = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95]}},
    "scheduler": {"type": "MultiStepLR", "params": {"milestones": [1, 2]}},
    "compile": {"kwargs": {"options": {"a": [1, {"b": 2}]}}},
    "zero_optimization": {"stage": 3, "overlap_comm": True},
    "tensorboard": {"enabled": True},
    "wandb": {"enabled": True},
}


def records(value: object):
    if dataclasses.is_dataclass(value):
        yield value
        for field in dataclasses.fields(value):
            yield from records(getattr(value, field.name))


def test_every_record_is_frozen():
    for record in records(load_config(FULL)):
        name = dataclasses.fields(record)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(record, name, None)


def test_mappings_inside_are_frozen_all_the_way_down():
    config = load_config(FULL)

    with pytest.raises(TypeError):
        config.optimizer.params["lr"] = 1
    with pytest.raises(TypeError):
        config.compile.kwargs["options"]["a"] = 1
    with pytest.raises(TypeError):
        config.source["zero_optimization"]["stage"] = 1
    assert config.compile.kwargs["options"]["a"] == (1, FrozenMap({"b": 2}))
    assert dict(**config.optimizer.params)["betas"] == (0.9, 0.95)


def test_to_dict_is_plain_json():
    config = load_config(FULL)

    assert json.loads(json.dumps(config.to_dict())) == config.to_dict()
    assert config.to_dict()["optimizer"]["params"]["betas"] == [0.9, 0.95]
    assert thaw(config.source) == FULL


def test_the_digest_is_that_of_the_meaning():
    digest = load_config(FULL).digest()

    assert digest == load_config(dict(reversed(FULL.items()))).digest()
    assert digest == load_config({**FULL, "steps_per_print": float("inf"), "typo": 1}).digest()
    assert digest == load_config({**FULL, "wall_clock_breakdown": True}).digest()
    assert digest != load_config({**FULL, "gradient_clipping": 1.0}).digest()
    assert digest != load_config(FULL, world_size=2).digest()
    assert len(digest) == 16


def test_examples_in_docstrings():
    import doctest

    for module in pkgutil.iter_modules(torchloom.config.__path__, "torchloom.config."):
        result = doctest.testmod(importlib.import_module(module.name))
        assert result.failed == 0, module.name
