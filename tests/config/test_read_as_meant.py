"""What DeepSpeed reads although it is written otherwise: numbers as text, old switches, keys that have no effect."""

from __future__ import annotations

import pytest

from torchloom.config import check_config, load_config


def warnings_of(document: dict) -> dict[str, str]:
    checked = check_config(document, world_size=2)
    assert checked.errors == ()
    return {note.path: note.message for note in checked.notes if note.level == "warning"}


@pytest.mark.parametrize(
    ("document", "path", "read"),
    [
        ({"gradient_clipping": "1.0"}, "gradient_clipping", '"1.0" is text, read as 1.0'),
        ({"steps_per_print": " 10 "}, "steps_per_print", '" 10 " is text, read as 10'),
        (
            {"zero_optimization": {"stage": "3", "stage3_param_persistence_threshold": 0}},
            "zero_optimization.stage",
            '"3" is text, read as 3',
        ),
        (
            {"zero_optimization": {"stage": 3, "param_persistence_threshold": "1e5"}},
            "zero_optimization.param_persistence_threshold",
            '"1e5" is text, read as 100000.0',
        ),
        (
            {"optimizer": {"type": "SGD", "params": {"lr": "5e-5"}}},
            "optimizer.params.lr",
            '"5e-5" is text, read as 5e-05',
        ),
    ],
)
def test_numbers_as_text_are_read_with_a_warning(document, path, read):
    told = warnings_of(document)

    assert told[path] == f"{read}: write it without quotes"
    assert isinstance(document[next(iter(document))], str | dict), "the caller's document stays"


def test_they_take_effect():
    config = load_config(
        {
            "gradient_clipping": "0.5",
            "zero_optimization": {"stage": "3", "param_persistence_threshold": "1e5"},
            "optimizer": {"type": "SGD", "params": {"lr": "5e-5"}},
        }
    )

    assert (config.gradient_clipping, config.zero.stage) == (0.5, 3)
    assert (config.zero.param_persistence_threshold, config.optimizer.params["lr"]) == (
        100_000,
        5e-5,
    )


@pytest.mark.parametrize("text", ["ten", "nan", "-1", "1.5", "", "0x10", "1_000"])
def test_other_texts_are_errors(text):
    checked = check_config(
        {"zero_optimization": {"stage": 3, "sub_group_size": text}, "seed": text}
    )

    assert "seed" in {error.path for error in checked.errors}


def test_the_old_switches_of_offloads_are_translated():
    document = {"zero_optimization": {"stage": 3, "cpu_offload": True, "cpu_offload_param": True}}
    told = warnings_of(document)
    config = load_config(document, world_size=2)

    assert 'write offload_optimizer: {"device": "cpu"}' in told["zero_optimization.cpu_offload"]
    assert 'write offload_param: {"device": "cpu"}' in told["zero_optimization.cpu_offload_param"]
    assert (config.offload.opt_states, config.offload.parameters) == (True, True)


@pytest.mark.parametrize("stage", [0, 1])
def test_parameters_of_stages_that_keep_them_whole_stay(stage):
    document = {"zero_optimization": {"stage": stage, "offload_param": {"device": "cpu"}}}

    assert f"stage {stage} keeps whole" in warnings_of(document)["zero_optimization.offload_param"]
    assert not load_config(document, world_size=2).offload.parameters


def test_a_refusal_names_the_key_that_was_written():
    zero = {"stage": 3, "offload_param": {"device": "cpu"}}
    document = {"zero_optimization": zero, "compile": {"symmetric_memory": True}}

    (error,) = check_config(document, world_size=2).errors
    assert error.path == "zero_optimization.offload_param"
    zero["cpu_offload_param"] = zero.pop("offload_param")["device"] == "cpu"
    (error,) = check_config(document, world_size=2).errors
    assert error.path == "zero_optimization.cpu_offload_param"


@pytest.mark.parametrize(
    ("written", "meant"),
    [("bfp16", "bf16"), ("fp61", "fp16"), ("bfloat", "bfloat16"), ("int8", None)],
)
def test_a_type_that_is_none_is_told_the_nearest(written, meant):
    (error,) = check_config({"communication_data_type": written}).errors

    assert error.path == "communication_data_type"
    assert error.fix.startswith(f'did you mean "{meant}"? ' if meant else "use ")


def test_a_decay_without_an_end_may_be_left_to_the_caller():
    document = {"scheduler": {"type": "WarmupDecayLR", "params": {}}}
    (error,) = check_config(document).errors
    document["scheduler"]["params"]["total_num_steps"] = "auto"

    assert "optimizer steps of the run" in error.fix
    assert '"auto"' in error.fix
    assert check_config(document).open == ("scheduler.params.total_num_steps",)


@pytest.mark.parametrize("on", [1, 1.0, "true", "True", "yes", "1"])
@pytest.mark.parametrize("section", ["bf16", "fp16", "torch_autocast", "wandb"])
def test_switches_as_numbers_and_words(on, section):
    off = {1: 0, "1": "0", "yes": "off"}.get(on, "false")
    assert load_config({section: {"enabled": on}}) == load_config({section: {"enabled": True}})
    told = warnings_of({section: {"enabled": off}})

    assert load_config({section: {"enabled": off}}) == load_config({})
    assert (f"{section}.enabled" in told) == isinstance(on, str)


def test_switches_of_features_that_are_refused_are_switches_as_well():
    for off in (0, 0.0, False):
        assert not check_config({"hybrid_engine": {"enabled": off}, "amp": {"enabled": off}}).errors
    assert check_config({"amp": {"enabled": 1}}).errors


@pytest.mark.parametrize("written", ["torch.bfloat16", "bfloat16", "bf16", "BF16", None])
def test_types_of_autocast(written):
    section = {"enabled": True, "dtype": written}
    assert load_config({"torch_autocast": section}).precision.autocast.dtype == "bf16"


@pytest.mark.parametrize("written", ["torch.float16", "float16", "fp16", "half"])
def test_half_types_of_autocast(written):
    section = {"enabled": True, "dtype": written}
    assert load_config({"torch_autocast": section}).precision.autocast.dtype == "fp16"
