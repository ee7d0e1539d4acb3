"""What "auto" becomes: the caller's value, a documented default, or an error."""

from __future__ import annotations

import re

import pytest

from torchloom.config import check_config, load_config
from torchloom.errors import ConfigError


def message(config, path: str) -> str:
    return next(note.message for note in config.notes if note.path == path)


def test_the_callers_value_comes_first_and_is_noted():
    config = load_config({"gradient_clipping": "auto"}, auto={"gradient_clipping": 0.5})

    assert config.gradient_clipping == 0.5
    assert "given by the caller" in message(config, "gradient_clipping")


def test_a_value_does_not_replace_what_is_written():
    config = load_config({"gradient_clipping": 2.0}, auto={"gradient_clipping": 0.5})

    assert config.gradient_clipping == 2.0


def test_documented_defaults():
    config = load_config(
        {
            "gradient_clipping": "auto",
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": "auto"},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": "auto"}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}},
        }
    )

    assert config.gradient_clipping == 1.0
    assert config.zero.param_persistence_threshold is None  # by the size of the model
    assert "not set" in message(config, "zero_optimization.stage3_param_persistence_threshold")
    assert config.optimizer.params["weight_decay"] == 0.0
    assert config.scheduler.params["warmup_max_lr"] == 1e-4


@pytest.mark.parametrize(
    ("document", "path"),
    [
        ({"optimizer": {"type": "SGD", "params": {"lr": "auto"}}}, "optimizer.params.lr"),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}}},
            "scheduler.params.warmup_max_lr",
        ),
        (
            {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}},
            "scheduler.params.total_num_steps",
        ),
    ],
)
def test_what_has_no_default_is_filled_in_by_the_caller_or_an_error_of_a_load(document, path):
    checked = check_config(document)

    assert (checked.open, checked.errors) == ((path,), ())
    with pytest.raises(ConfigError, match=re.escape(f'{path}: "auto" has no value')) as caught:
        load_config(document)
    assert f'auto={{"{path}": ...}}' in str(caught.value)
    values = {"total_num_steps": 2000}
    load_config(document, auto={path: values.get(path.rpartition(".")[2], 1e-3)})


def test_sections_that_the_caller_replaces_do_not_count():
    document = {
        "optimizer": {"type": "Nonsense", "params": {"lr": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}},
    }
    with pytest.raises(ConfigError, match=r"(?s)optimizer.type.*warmup_max_lr"):
        load_config(document)
    config = load_config(document, replaced=("optimizer", "scheduler"))

    assert (config.optimizer, config.scheduler) == (None, None)
    told = [note.message for note in config.notes if note.path == "optimizer"]
    assert told == ["not used: the optimizer that the caller gives takes its place"]


@pytest.mark.parametrize(
    ("fp16", "bf16", "dtype"), [(0, 1, "bf16"), (1, 0, "fp16"), (0, 0, "fp32")]
)
def test_both_precisions_auto_take_the_callers_choice(fp16, bf16, dtype):
    document = {"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}
    auto = {"fp16.enabled": bool(fp16), "bf16.enabled": bool(bf16)}

    assert load_config(document, auto=auto).precision.dtype == dtype


def test_a_value_for_an_unknown_path_warns():
    config = load_config({}, auto={"train_batch_sise": 8})

    assert "train_batch_size?" in message(config, "train_batch_sise")
