"""One mistake each: the error names the path, what is wrong and what to do."""

from __future__ import annotations

import copy
import math

import pytest

from torchloom.config import check_config, load_config
from torchloom.errors import ConfigError

BASE = {
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-4}},
    "compile": {"deepcompile": True},
}
ZERO = "zero_optimization"

# path in the document, value put there, path of the error (None: the same), words of the message
BAD = [
    (f"{ZERO}.stage", 4, None, "from 0 to 3"),
    (f"{ZERO}.stage", 1.5, None, "not a whole number"),
    (f"{ZERO}.reduce_bucket_size", -1, None, "at least 0"),
    ("wall_clock_breakdown", "maybe", None, "without quotes"),
    (f"{ZERO}.offload_param", {"device": "nvme"}, f"{ZERO}.offload_param.device", "NVMe"),
    (f"{ZERO}.offload_param", {"device": "disk"}, f"{ZERO}.offload_param.device", '"nvme"'),
    (f"{ZERO}.mics_shard_size", 8, None, "shard_size"),
    (f"{ZERO}.zero_quantized_weights", True, None, "ZeRO++"),
    (f"{ZERO}.shard_size", 3, None, "use one of 1, 2, 4"),
    ("train_batch_size", 7, None, "set train_batch_size to 8"),
    ("gradient_clipping", -1.0, None, "at least 0"),
    ("gradient_clipping", math.nan, None, "finite"),
    ("steps_per_print", 0, None, "above 0"),
    ("fp16", {"enabled": True}, "bf16.enabled", "set one of them to false"),
    ("fp16", {"initial_scale_power": 200}, "fp16.initial_scale_power", "from 0 to 127"),
    ("fp16", {"fp16_master_weights_and_grads": True}, "fp16.fp16_master_weights_and_grads", "fp32"),
    ("bf16", "auto", None, "not an object"),
    ("communication_data_type", "int8", None, '"bf16"'),
    ("optimizer.type", "AdamX", None, "nearest: Adam"),
    ("optimizer.params.lr", -1, None, "at least 0"),
    ("optimizer.params.betas", [0.9, 1.0], None, "out of range"),
    ("optimizer.params.weight_deacy", 0.1, None, "weight_decay?"),
    ("optimizer.params.max_grad_norm", 1.0, None, "gradient_clipping: 1.0"),
    ("optimizer.params.bias_correction", False, None, "always corrects"),
    ("scheduler.type", "WarmupLr2", None, "WarmupLR?"),
    ("scheduler.type", "WarmupDecayLR", "scheduler.params.total_num_steps", "needs it"),
    ("scheduler.params.warmup_type", "cubic", None, '"linear"'),
    ("compile.passes", ["z1"], None, "stage to 1"),
    ("compile.passes", ["autotp"], None, "tensor parallelism"),
    ("compile.passes", ["prefetch", "prefetch"], None, "twice"),
    ("compile.schedule", [[-5, ["zero3"]]], "compile.schedule[0][0]", "at least 0"),
    ("compile.schedule", [[5, ["zero2"]]], "compile.schedule[0][1]", "stage to 2"),
    ("compile.schedule", [[5, [["a", "2 cows"]]]], "compile.schedule[0][1][0][1]", "40GB"),
    ("compile.schedule", [[0, []], [0, []]], "compile.schedule[1][0]", "each step once"),
    ("compile.offload_activation", "cpu", None, "true or false"),
    ("compile.memory_budget", "lots", None, "40GB"),
    ("compile.kwargs", {"fulgraph": True}, "compile.kwargs.fulgraph", "fullgraph?"),
    ("compile.kwargs", {"backend": "eager"}, "compile.kwargs.backend", "compile.backend"),
    ("compile.backend", "", None, "write a string"),
    ("amp", {"enabled": True}, None, "bf16.enabled"),
    ("torch_autocast", {"enabled": True}, "torch_autocast.enabled", "bf16"),
    (
        "torch_autocast",
        {"lower_precision_safe_modules": [3]},
        "torch_autocast.lower_precision_safe_modules",
        "list of names",
    ),
    ("elasticity", {"enabled": True}, None, "batch sizes"),
    ("sequence_parallel_size", 2, None, "stage 3"),
    ("sparse_gradients", True, None, "sparse=False"),
    ("gradient_allreduce_op", "sum", None, "multiply the loss by the number of ranks"),
    (f"{ZERO}.zenflow", {"topk_ratio": 0.05}, None, "ZenFlow"),
    (f"{ZERO}.load_from_fp32_weights", False, None, "fp32 master shards"),
    ("data_types", {"grad_accum_dtype": "bf16"}, "data_types.grad_accum_dtype", "fp32"),
    ("data_types", {"param_dtype": "fp16"}, "data_types.param_dtype", "fp16.enabled"),
    ("torch_autocast", {"dtype": "torch.float64"}, "torch_autocast.dtype", "not a floating type"),
    (
        "compression_training",
        {"weight_quantization": {"shared_parameters": {"enabled": True}}},
        None,
        "compression",
    ),
]


def put(path: str, value: object) -> dict:
    document = copy.deepcopy(BASE)
    *parents, last = path.split(".")
    place = document
    for part in parents:
        place = place[part]
    place[last] = value
    return document


@pytest.mark.parametrize(("path", "value", "where", "words"), BAD)
def test_each_mistake_is_one_clear_error(path, value, where, words):
    checked = check_config(put(path, value), world_size=4)

    assert [error.path for error in checked.errors] == [where or path]
    assert words in str(checked.errors[0])
    assert checked.config is None


def test_the_base_is_good():
    assert check_config(BASE, world_size=4).errors == ()


def test_all_errors_are_raised_at_once_one_line_each():
    with pytest.raises(ConfigError) as caught:
        load_config({"zero_optimization": {"stage": 4}, "seed": "x", "optimizer": {"type": "Lion"}})

    first, *lines = str(caught.value).splitlines()
    assert first == "3 errors in the configuration:"
    assert {line.split(":")[0].strip() for line in lines} == {
        "zero_optimization.stage",
        "seed",
        "optimizer.type",
    }


def test_two_names_for_one_setting_must_agree():
    zero = {"stage": 3, "prefetch_bucket_size": 1, "stage3_prefetch_bucket_size": 2}

    assert "two names" in check_config({"zero_optimization": zero}).errors[0].what


def test_passes_and_schedule_exclude_each_other():
    section = {"passes": ["prefetch"], "schedule": [[0, ["prefetch"]]]}

    assert check_config({"compile": section}).errors[0].path == "compile.schedule"
