"""Each section's translation to the record that the engine reads."""

from __future__ import annotations

import pytest

from torchloom.config import check_config, load_config
from torchloom.config.budget import MemoryBudget
from torchloom.errors import ConfigError


def optimizer(kind: str, **params):
    return load_config({"optimizer": {"type": kind, "params": params}})


def scheduler(kind: str, **params):
    return load_config({"scheduler": {"type": kind, "params": params}})


def warned(config) -> list[str]:
    return [note.path for note in config.notes if note.level == "warning"]


@pytest.mark.parametrize(
    ("kind", "params", "name"),
    [
        ("Adam", {}, "adamw"),
        ("adam", {"adam_w_mode": True}, "adamw"),
        ("Adam", {"adam_w_mode": False}, "adam"),
        ("Adam", {"torch_adam": True, "adam_w_mode": False}, "adam"),
        ("AdamW", {"adam_w_mode": False}, "adamw"),
        ("sgd", {}, "sgd"),
    ],
)
def test_which_optimizer_is_meant(kind, params, name):
    config = optimizer(kind, lr=0.1, **params)

    assert config.optimizer.name == name
    assert not {"torch_adam", "adam_w_mode"} & set(config.optimizer.params)


@pytest.mark.parametrize(
    ("params", "decay"), [({}, 0.0), ({"torch_adam": True}, 0.01), ({"weight_decay": 0.2}, 0.2)]
)
def test_weight_decay_is_what_the_section_means_in_deepspeed(params, decay):
    assert optimizer("AdamW", lr=1, **params).optimizer.params["weight_decay"] == decay


@pytest.mark.parametrize(
    ("params", "fused"), [({}, True), ({"foreach": True}, None), ({"fused": False}, False)]
)
def test_fused_kernels_unless_something_else_is_asked(params, fused):
    assert optimizer("SGD", lr=1, **params).optimizer.params.get("fused") == fused


def test_warmup_defaults_are_written_out():
    assert dict(scheduler("WarmupDecayLR", total_num_steps=9).scheduler.params) == {
        "total_num_steps": 9,
        "warmup_min_lr": 0.0,
        "warmup_max_lr": 0.001,
        "warmup_num_steps": 1000,
        "warmup_type": "log",
    }


@pytest.mark.parametrize(
    ("name", "given", "kept", "warns"),
    [
        ("WarmupLR", {}, None, False),  # the optimizer's rate, as in DeepSpeed
        ("WarmupDecayLR", {"total_num_steps": 2000}, 1e-3, True),
        ("WarmupDecayLR", {"total_num_steps": 2000, "warmup_max_lr": None}, None, False),
        ("WarmupDecayLR", {"total_num_steps": 2000, "warmup_max_lr": [1, 2]}, (1, 2), False),
    ],
)
def test_the_rate_above_a_warmup_is_the_optimizers_or_deepspeeds(name, given, kept, warns):
    config = load_config(
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 5e-5}},
            "scheduler": {"type": name, "params": given},
        }
    )
    assert config.scheduler.params.get("warmup_max_lr") == kept
    assert warned(config) == (["scheduler.params.warmup_max_lr"] if warns else [])


def test_a_warmup_longer_than_the_run_warns():
    config = scheduler("WarmupDecayLR", total_num_steps=10, warmup_num_steps=20)

    assert warned(config) == ["scheduler.params.total_num_steps"]


def test_bucket_sizes_are_elements_of_the_type_that_travels():
    zero = {"stage": 3, "reduce_bucket_size": 1e6, "allgather_bucket_size": 1e6}
    config = load_config({"bf16": {"enabled": True}, "zero_optimization": zero})

    assert config.zero.gather_bucket_bytes == 2_000_000
    assert config.zero.reduce_bucket_bytes == 4_000_000
    assert config.zero.prefetch_bytes is None


def test_shard_groups_need_something_to_divide():
    (error,) = check_config({"zero_optimization": {"stage": 0, "shard_size": 2}}).errors

    assert error.path == "zero_optimization.shard_size"


def test_loss_scaling():
    fp16 = {"enabled": True, "loss_scale": 128, "loss_scale_window": 5e2, "hysteresis": 4}
    scale = load_config({"fp16": fp16}).precision.loss_scale

    assert (scale.static_scale, scale.window, scale.hysteresis) == (128.0, 500, 4)
    assert scale.initial_scale_power == 16


@pytest.mark.parametrize(
    ("word", "dtype"), [("fp16", "fp16"), ("bfloat16", "bf16"), (None, "fp32")]
)
def test_reduction_type(word, dtype):
    assert load_config({"communication_data_type": word}).precision.reduce_dtype == dtype


def test_phases_of_offloading_are_left_out_with_a_note():
    section = {"passes": ["offload_activation_floor", "zero2_compile", "prefetch"]}
    config = load_config({"zero_optimization": {"stage": 2}, "compile": section})

    assert config.compile.passes == ("zero2_compile", "prefetch")
    assert "offload_activation_floor" in str(config.notes)


def test_a_schedule_has_steps_and_budgets():
    entries = [[0, ["zero2_compile"]], [5, [["prefetch", "2GB"], "z2"]]]
    config = load_config({"zero_optimization": {"stage": 2}, "compile": {"schedule": entries}})

    assert config.compile.passes is None
    assert config.compile.schedule == (
        (0, ("zero2_compile",)),
        (5, (("prefetch", MemoryBudget(2 * 10**9)), "zero2")),
    )
    assert not warned(config)


def test_a_schedule_out_of_order_is_refused():
    section = {"schedule": [[5, ["z2"]], [0, ["zero2_compile"]]]}
    with pytest.raises(ConfigError, match="step 0 comes behind step 5"):
        load_config({"zero_optimization": {"stage": 2}, "compile": section})


def test_keys_in_the_wrong_place_are_shown_their_home():
    told = {note.path: note.message for note in load_config({"lr": 1, "stage": 3}).notes}

    assert "optimizer.params.lr?" in told["lr"]
    assert "zero_optimization.stage?" in told["stage"]


def test_autocast_has_a_dtype_and_modules():
    assert load_config({"torch_autocast": {"enabled": True}}).precision.autocast.dtype == "bf16"
    section = {
        "enabled": True,
        "dtype": "float16",
        "lower_precision_safe_modules": ["torch.nn.Linear"],
    }
    found = load_config({"torch_autocast": section}).precision
    assert found.autocast.dtype == "fp16"
    assert found.autocast.modules == ("torch.nn.Linear",)
    assert found.scales_loss
    assert not load_config({"torch_autocast": {"enabled": True}}).precision.scales_loss


def test_a_raise_at_the_first_overflow_is_warned_of_where_autocast_scales():
    section = {"enabled": True, "dtype": "fp16"}
    notes = load_config({"torch_autocast": section, "non_finite": "raise"}).notes
    assert "non_finite" in [note.path for note in notes if note.level == "warning"]
