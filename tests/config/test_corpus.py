"""Configurations in the shapes that people use: the good load, the refused name what they ask."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.stage3_files import filled
from torchloom.config import check_config, load_config

CORPUS = Path(__file__).parent / "corpus"
GOOD = sorted((CORPUS / "good").glob("*.json"))
REFUSED = sorted((CORPUS / "refused").glob("*.json"))


def name(path: Path) -> str:
    return path.stem


@pytest.mark.parametrize("path", GOOD, ids=name)
def test_good_configurations_load(path):
    config = load_config(path, world_size=8, auto=filled({}))

    batch = config.batch
    assert batch.train_batch_size == batch.micro_batch_size * batch.accumulation_steps * 8
    assert json.loads(json.dumps(config.to_dict())) == config.to_dict()


@pytest.mark.parametrize("path", REFUSED, ids=name)
def test_refused_configurations_name_each_path(path):
    expected = path.read_text().splitlines()[0].removeprefix("// errors: ").split()

    checked = check_config(path, world_size=8)

    assert sorted(error.path for error in checked.errors) == expected
    assert all(error.what and error.fix for error in checked.errors)


def good(stem: str, **kwargs):
    kwargs.setdefault("auto", filled({}))
    return load_config(CORPUS / "good" / f"{stem}.json", world_size=8, **kwargs)


def warnings(config) -> dict[str, str]:
    return {note.path: note.message for note in config.notes if note.level == "warning"}


def test_an_auto_file_takes_the_trainers_values():
    config = good("hf_auto_zero3")

    assert (config.batch.train_batch_size, config.batch.micro_batch_size) == (64, 4)
    assert config.precision.dtype == "bf16"
    assert config.optimizer.params["lr"] == 5e-5
    assert config.scheduler.params["warmup_num_steps"] == 10
    assert config.zero.param_persistence_threshold == 640
    assert config.zero.gather_16bit_weights_on_model_save


def test_features_without_effect_warn_once_each():
    assert set(warnings(good("monitors_on"))) == {"flops_profiler", "activation_checkpointing"}
    assert good("monitors_on").monitors.sections == ("tensorboard", "wandb")


def test_unknown_keys_warn_with_the_nearest_key():
    told = warnings(good("unknown_keys"))

    assert "gradient_clipping?" in told["gradient_clip"]
    assert "zero_optimization.stage3_gather_1d_weights" in told
    assert "spelling" in told["my_own_notes"]


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ({"zero_optimisation": {"stage": 3}}, "zero_optimization"),
        (
            {"zero_optimization": {"stage": 3, "overlap_com": True}},
            "zero_optimization.overlap_comm",
        ),
        ({"zero_optimization": {"offload_param": {"devcie": "cpu"}}}, "offload_param.device"),
        ({"bf16": {"enable": True}}, "bf16.enabled"),
        ({"optimzer": {"type": "AdamW"}}, "optimizer"),
    ],
)
def test_a_misspelt_key_is_an_error_that_names_the_right_one(written, meant):
    (error,) = check_config(written).errors

    assert error.what == "unknown key" and error.fix.endswith(f"{meant}?")


def test_dotted_keys_warn_with_the_nested_form():
    config = good("dotted_keys")

    told = warnings(config)["zero_optimization.reduce_bucket_size"]
    assert '{"zero_optimization": {"reduce_bucket_size": 1048576}}' in told
    assert config.zero.param_persistence_threshold is None


def test_deprecated_names_warn_and_plain_aliases_do_not():
    config = good("old_names")

    assert list(warnings(config)) == ["zero_optimization.stage3_gather_fp16_weights_on_model_save"]
    assert config.zero.param_persistence_threshold == 100_000
    assert config.zero.gather_16bit_weights_on_model_save


def test_hints_say_asked_and_used():
    hints = {hint.path: hint for hint in good("huge_knobs").hints}

    reduce = hints["zero_optimization.reduce_bucket_size"]
    assert (reduce.asked, reduce.used) == (1_000_000_000, 1_000_000_000)
    assert "over gloo 64 MiB at most" in reduce.why
    assert hints["zero_optimization.sub_group_size"].used is None


def test_stage_marks_mean_the_preset_of_the_stage():
    options = good("deepcompile_full").compile

    assert options.deepcompile
    assert not options.enabled
    assert options.passes is None
    assert options.strict
    assert options.dump_graphs == "graphs"
    assert "free_activation" in options.extra_passes
    assert options.pass_options["free_saved"]["min_bytes"] == 1 << 20
    offload = good("deepcompile_full").offload
    assert offload.double_buffer
    assert not (offload.opt_states or offload.parameters)
    assert not warnings(good("deepcompile_full"))


def test_deepspeeds_offload_sections_mean_the_host():
    config = good("offload_cpu_both")

    assert config.offload.opt_states
    assert config.offload.parameters
    assert "offload_activation" not in config.compile.extra_passes
    assert not warnings(config)
    told = {note.path: note.message for note in config.notes}
    assert "runs on the device" in told["zero_optimization.offload_optimizer"]
    assert "offload_parameters" in told["zero_optimization.offload_param"]


@pytest.mark.parametrize(
    ("stage", "more", "fix"), [(1, {}, "stage to 3"), (3, {"symmetric_memory": True}, "one of")]
)
def test_pieces_on_the_host_need_pieces_of_ones_own(stage, more, fix):
    document = {
        "zero_optimization": {"stage": stage},
        "compile": {"offload_parameters": True, **more},
    }

    (error,) = check_config(document).errors

    assert error.path == "compile.offload_parameters"
    assert fix in str(error)
