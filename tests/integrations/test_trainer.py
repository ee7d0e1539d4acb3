"""Hugging Face's Trainer on torchloom: the losses, norms, files and resumes of its own DDP run."""

from __future__ import annotations

import dataclasses
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from support import ranks
from support.frameworks import (
    LOOM,
    accelerate_alone,
    arguments,
    assert_same_run,
    curve,
    loom,
    rows,
    skip_without,
    tiny_llama,
)
from support.pool import run_ranks
from torchloom.errors import ConfigError, TorchloomError
from torchloom.pipeline import PRESETS

skip_without("transformers", "accelerate")


def ddp(
    model: Any, folder: Path, own: dict[str, Any] | None = None, **changes: Any
) -> dict[str, Any]:
    """Train with the Trainer's own DistributedDataParallel."""
    from transformers import Trainer, TrainingArguments

    own = {"train_dataset": rows(), "eval_dataset": rows(10), **(own or {})}
    with accelerate_alone():
        trainer = Trainer(
            model=model, args=TrainingArguments(**arguments(folder, **changes)), **own
        )
        trainer.train()
        return summary(trainer)


def trainer_of(model: Any, folder: Path, config: Any = LOOM, **rest: Any) -> Any:
    """Return torchloom's Trainer; `own` are arguments of the Trainer itself, others of its arguments."""
    from torchloom.integrations.transformers import TorchloomArguments, TorchloomTrainer

    own = {"train_dataset": rows(), "eval_dataset": rows(10), **(rest.pop("own", None) or {})}
    args = TorchloomArguments(torchloom=config, **arguments(folder, **rest))
    return TorchloomTrainer(model=model, args=args, **own)


def sharded(
    model: Any, folder: Path, config: Any = LOOM, resume: str | None = None, **rest: Any
) -> dict[str, Any]:
    """Train with torchloom."""
    with accelerate_alone():
        trainer = trainer_of(model, folder, config, **rest)
        trainer.train(resume_from_checkpoint=resume)
        graphs = trainer.compile_session.report.graphs if trainer.compile_session else []
        return {
            **summary(trainer),
            "graphs": [graph.fallback for graph in graphs],
            "told": {name for row in trainer.state.log_history for name in row if "/" in name},
            "heard": curve(trainer, "torchloom/collectives"),
            "notes": [note for graph in graphs for each in graph.passes for note in each.notes],
        }


def summary(trainer: Any) -> dict[str, Any]:
    names = ("loss", "grad_norm", "eval_loss", "total_flos")
    return {name: curve(trainer, name) for name in names}


def test_a_run_equals_ddp_and_goes_on_from_its_files(tmp_path) -> None:
    steps = {"save_strategy": "steps", "save_steps": 6, "eval_strategy": "steps", "eval_steps": 6}

    def run(rank: int) -> dict[str, Any]:
        return {
            "expected": ddp(tiny_llama(), tmp_path / "ddp", **steps),
            "found": sharded(tiny_llama(), tmp_path / "loom", **steps),
            "resumed": sharded(
                tiny_llama(seed=9),
                tmp_path / "again",
                resume=str(tmp_path / "loom/checkpoint-6"),
                **steps,
            ),
        }

    first, _ = run_ranks(2, run)
    expected, found, resumed = first["expected"], first["found"], first["resumed"]
    assert_same_run(found, expected)
    torch.testing.assert_close(found["eval_loss"], expected["eval_loss"], rtol=1e-6, atol=0)
    assert found["total_flos"] == expected["total_flos"]
    assert found["graphs"] == [None, None]  # training and evaluation
    assert len(found["heard"]) == 12  # trackers get them with each loss
    assert min(found["heard"]) > 0
    assert "torchloom/peak_bytes" not in found["told"]  # that of the whole process
    assert resumed["loss"][-6:] == found["loss"][-6:]  # exactly
    assert resumed["grad_norm"][-6:] == found["grad_norm"][-6:]
    assert_files_are_those_of_ddp(tmp_path)


def test_an_optimizer_of_whole_matrices_equals_ddp(tmp_path) -> None:
    def run(rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
        more = {"optim": "adafactor", "save_strategy": "steps", "save_steps": 6}
        expected = ddp(tiny_llama(), tmp_path / "ddp", **more)
        found = sharded(tiny_llama(), tmp_path / "loom", **more)
        half = str(tmp_path / "loom/checkpoint-6")
        resumed = sharded(tiny_llama(seed=9), tmp_path / "again", resume=half, **more)
        return expected, found, resumed

    (expected, found, resumed), _ = run_ranks(2, run)
    assert_same_run(found, expected)
    assert resumed["loss"][-6:] == found["loss"][-6:]


def test_an_optimizer_given_to_the_trainer_equals_ddp(tmp_path) -> None:
    """By its class, and as an object over the model that the Trainer shards after it."""

    def given(model: Any, way: str) -> dict[str, Any]:
        if way == "class":
            return {"optimizer_cls_and_kwargs": (torch.optim.Adafactor, {"lr": 1e-2})}
        return {"optimizers": (torch.optim.Adafactor(model.parameters(), lr=1e-2), None)}

    def run(rank: int) -> list[Any]:
        found = []
        for way in ("class", "object"):
            one, other = tiny_llama(), tiny_llama()
            expected = ddp(one, tmp_path / f"ddp {way}", own=given(one, way))
            found.append(
                (sharded(other, tmp_path / f"loom {way}", own=given(other, way)), expected)
            )
        return found

    for found, expected in run_ranks(2, run)[0]:
        assert_same_run(found, expected)


def assert_files_are_those_of_ddp(folder: Path) -> None:
    """Load both checkpoints, of AdamW, without torchloom.

    AdamW moves a weight whose gradients are all rounding as far as any other. DDP itself, run twice with
    `ATEN_CPU_CAPABILITY` "avx512" and "default", ends with weights that differ by 7.6e-5; a step that is
    missing or wrong shows as about the learning rate, 1e-2.
    """
    from transformers import LlamaForCausalLM

    models = [
        LlamaForCausalLM.from_pretrained(folder / n / "checkpoint-12") for n in ("ddp", "loom")
    ]
    for expected, found in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    states = [
        torch.load(folder / name / "checkpoint-12/optimizer.pt", weights_only=True)
        for name in ("ddp", "loom")
    ]
    assert states[1]["param_groups"] == states[0]["param_groups"]
    for index, state in states[0]["state"].items():
        for key, value in state.items():
            torch.testing.assert_close(states[1]["state"][index][key], value, rtol=1e-3, atol=1e-6)


CASES = {
    "accumulation": (3, {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 1}),
    "checkpointing and tied weights": (3, {"activation_checkpointing": True}),
    "stage 2": (2, {}),
    "stage 1": (1, {}),
    "stage 0": (0, {"max_grad_norm": 0.0}),
}


@pytest.mark.parametrize("case", CASES)
def test_other_runs_equal_ddp(tmp_path, case) -> None:
    stage, changes = CASES[case]
    changes = {"max_steps": 4, **changes}

    def run(rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
        tied = "tied" in case
        expected = ddp(tiny_llama(tied=tied), tmp_path / "ddp", **changes)
        found = sharded(tiny_llama(tied=tied), tmp_path / "loom", loom(stage), **changes)
        return expected, found

    expected, found = run_ranks(2, run)[0]
    assert_same_run(found, expected)
    assert found["graphs"] == [None]


def test_bf16_computes_in_bf16_and_keeps_fp32(tmp_path) -> None:
    """By casts of weights and inputs, and by autocast, which rounds as DDP's does."""
    autocast = {**LOOM, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}}

    def run(rank: int) -> tuple[list[dict[str, Any]], set[Any]]:
        model, few = tiny_llama(), {"max_steps": 4}
        runs = [
            ddp(tiny_llama(), tmp_path / "ddp", bf16=True, **few),
            sharded(tiny_llama(), tmp_path / "exact", **few),
            sharded(model, tmp_path / "cast", bf16=True, **few),
            sharded(tiny_llama(), tmp_path / "autocast", autocast, bf16=True, **few),
        ]
        return runs, {param.dtype for param in model.parameters()}

    (expected, exact, cast, under_autocast), dtypes = run_ranks(2, run)[0]
    assert cast["loss"] != exact["loss"]
    assert dtypes == {torch.float32}
    for found, rtol in ((cast, 5e-3), (under_autocast, 1e-3)):
        torch.testing.assert_close(found["loss"], expected["loss"], rtol=rtol, atol=0)
    for found, rtol in ((cast, 5e-2), (under_autocast, 5e-3)):
        torch.testing.assert_close(found["grad_norm"], expected["grad_norm"], rtol=rtol, atol=0)


def test_adapters_train_and_are_all_that_is_saved(tmp_path) -> None:
    peft = pytest.importorskip("peft")

    def with_adapters() -> Any:
        model = tiny_llama()
        torch.manual_seed(1)
        with warnings.catch_warnings():  # PEFT 0.21 asks transformers 5.23 by an older name
            warnings.filterwarnings("ignore", ".*is_gradient_checkpointing.*", FutureWarning)
            return peft.get_peft_model(
                model, peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
            )

    def run(rank: int) -> list[dict[str, Any]]:
        steps = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}
        resume = str(tmp_path / "loom/checkpoint-3")
        return [
            ddp(with_adapters(), tmp_path / "ddp", **steps),
            sharded(with_adapters(), tmp_path / "loom", **steps),
            sharded(with_adapters(), tmp_path / "again", resume=resume, **steps),
        ]

    expected, found, resumed = run_ranks(2, run)[0]
    assert_same_run(found, expected)
    assert found["graphs"] == [None]
    assert resumed["loss"][3:] == found["loss"][3:]
    from safetensors.torch import load_file

    files = [tmp_path / n / "checkpoint-6/adapter_model.safetensors" for n in ("ddp", "loom")]
    of_ddp, own = map(load_file, files)
    assert own.keys() == of_ddp.keys()
    for key, value in of_ddp.items():
        torch.testing.assert_close(own[key], value, rtol=0, atol=1e-6)
    assert not list((tmp_path / "loom/checkpoint-6").glob("model*.safetensors"))


def test_ranks_generate_other_lengths_and_train_on(tmp_path) -> None:
    def run(rank: int) -> tuple[Any, ...]:
        with accelerate_alone():
            trainer = trainer_of(tiny_llama(), tmp_path, max_steps=2)
            trainer.train()
            prompt = torch.arange(3 + 2 * rank)[None]
            lengths = {"max_new_tokens": 4 + 5 * rank, "do_sample": False, "pad_token_id": 0}
            found = trainer.model.generate(prompt, **lengths)
            whole = tiny_llama()
            from torchloom.shard import full_state_dict

            whole.load_state_dict(full_state_dict(trainer.model))
            trainer.train()
            report = trainer.compile_session.report
            return found, whole.eval().generate(prompt, **lengths), len(report.graphs)

    for rank, (found, expected, num_graphs) in enumerate(run_ranks(2, run)):
        assert found.shape == (1, 3 + 2 * rank + 4 + 5 * rank)
        assert torch.equal(found, expected)
        assert num_graphs == 1  # generation runs without the compiler


def test_seq2seq_predicts_with_generate(tmp_path) -> None:
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config
    from transformers import T5ForConditionalGeneration as T5

    from torchloom.integrations.transformers import TorchloomOptions, TorchloomSeq2SeqTrainer

    generates = {"predict_with_generate": True, "generation_max_length": 9, "max_steps": 2}

    def run(rank: int) -> list[torch.Tensor]:
        @dataclasses.dataclass
        class Arguments(TorchloomOptions, Seq2SeqTrainingArguments):
            pass

        found = []
        for kind in ("ddp", "loom"):
            torch.manual_seed(0)
            sizes = {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 4, "d_kv": 8}
            model = T5(T5Config(vocab_size=64, decoder_start_token_id=0, dropout_rate=0.0, **sizes))
            common = arguments(tmp_path / kind, **generates)
            with accelerate_alone():
                if kind == "ddp":
                    made, args = Seq2SeqTrainer, Seq2SeqTrainingArguments(**common)
                else:
                    made, args = TorchloomSeq2SeqTrainer, Arguments(torchloom=LOOM, **common)
                trainer = made(model=model, args=args, train_dataset=rows())
                trainer.train()
                found.append(torch.tensor(trainer.predict(rows(10)).predictions))
        return found

    expected, found = run_ranks(2, run)[0]
    assert torch.equal(found, expected)


def test_only_rank_0_loads_and_others_hold_nothing_before(tmp_path) -> None:
    tiny_llama(tied=True).save_pretrained(tmp_path / "model")

    def run(rank: int) -> tuple[list[bool], dict[str, Any], dict[str, Any]]:
        from transformers import AutoModelForCausalLM, LlamaForCausalLM

        from torchloom.integrations.transformers import from_pretrained

        metas, found = [], []
        for kind in (AutoModelForCausalLM, LlamaForCausalLM):
            model = from_pretrained(kind, str(tmp_path / "model"))
            metas.append(all(param.is_meta for param in model.parameters()))
            found.append(sharded(model, tmp_path / "loom", max_steps=3))
        return metas, found[1], ddp(tiny_llama(tied=True), tmp_path / "ddp", max_steps=3)

    (first, found, expected), (second, *_) = run_ranks(2, run)
    assert first == [False, False]
    assert second == [True, True]
    assert_same_run(found, expected)


def test_a_file_of_autos_is_filled_in_from_the_arguments(tmp_path) -> None:
    config = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "warmup_min_lr": "auto",
                "warmup_max_lr": "auto",
                "warmup_num_steps": "auto",
                "total_num_steps": "auto",
                "warmup_type": "linear",
            },
        },
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
        },
        "compile": LOOM["compile"],
    }
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(config))

    def run(rank: int) -> tuple[list[float], Any]:
        with accelerate_alone():
            trainer = trainer_of(tiny_llama(), tmp_path, str(path), max_steps=6, warmup_steps=2)
            trainer.train()
            return curve(trainer, "learning_rate"), trainer.accelerator.preparation.config

    rates, settings = run_ranks(2, run)[0]
    assert rates == pytest.approx([0.0, 0.0, 0.005, 0.01, 0.0075, 0.005])
    assert settings.zero.param_persistence_threshold == 320
    assert settings.batch.train_batch_size == 4
    assert settings.gradient_clipping == 0.5


REFUSED: list[tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = [
    (
        {},
        {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_clipping": 1.0,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": 0.1}},
        },
        (
            "train_micro_batch_size_per_gpu is 4, and per_device_train_batch_size is 2",
            "gradient_clipping is 1.0, and max_grad_norm is 0.5",
            "bf16.enabled is True, and bf16 is False",
            "optimizer.params.weight_decay is 0.1, and weight_decay is 0.0",
            "TorchloomTrainer",
        ),
    ),
    ({"auto_find_batch_size": True}, {}, ("auto_find_batch_size=True",)),
    ({"bf16_full_eval": True}, {}, ("bf16_full_eval=True",)),
    ({"torch_compile_mode": "max-autotune"}, {}, ("torch_compile_mode='max-autotune'",)),
    ({"fsdp": "full_shard"}, {}, ("fsdp='full_shard' and torchloom",)),
    ({"deepspeed": {"fp16": {}}}, {}, ("deepspeed={'fp16': {}} and torchloom",)),
    ({}, {"fp16": {"enabled": True}}, ("fp16.enabled is True",)),
    ({}, {"optimizer": {"type": "SGD", "params": {}}}, ("set optim='sgd'",)),
    ({}, {"compile": {"offload_opt_states": True}}, ("compile.offload_opt_states",)),
    ({}, {"zero_optimization": {"stage": 4}}, ("zero_optimization.stage",)),
]


def test_what_cannot_be_right_is_refused_by_name(tmp_path) -> None:
    def run(rank: int) -> list[str]:
        found = []
        for changes, config, _ in REFUSED:
            with accelerate_alone(), pytest.raises(ConfigError) as told:
                trainer = trainer_of(tiny_llama(), tmp_path, {**LOOM, **config}, **changes)
                trainer.create_optimizer()
            found.append(str(told.value))
        return found

    for told, (*_, words) in zip(ranks.run_ranks(1, run)[0], REFUSED, strict=True):
        for each in words:
            assert each in told


def test_a_save_on_rank_0_alone_says_so(tmp_path) -> None:
    def run(rank: int) -> str:
        with accelerate_alone():
            trainer = trainer_of(tiny_llama(), tmp_path, max_steps=1)
            trainer.train()
            tokens = rows()[0]["input_ids"][None]
            with pytest.raises(TorchloomError) as told:
                if trainer.is_world_process_zero():
                    trainer.save_model()
                else:
                    trainer.model(input_ids=tokens, labels=tokens)
        return str(told.value)

    for told in ranks.run_ranks(2, run):
        assert "a call that only some make" in told


def test_two_ranks_then_one_then_two(tmp_path) -> None:
    """Twelve steps with one global batch, of which one rank takes steps 5 to 8."""

    def part(rank: int, last: int, resume: str | None, micro: int) -> dict[str, Any]:
        return sharded(
            tiny_llama(),
            tmp_path / f"to{last}",
            resume=resume,
            per_device_train_batch_size=micro,
            save_strategy="steps",
            save_steps=4,
            max_steps=last,
            lr_scheduler_type="constant",
        )

    def whole(rank: int) -> dict[str, Any]:
        return ddp(tiny_llama(), tmp_path / "ddp", lr_scheduler_type="constant")

    expected = run_ranks(2, whole)[0]
    run_ranks(2, part, 4, None, 2)
    ranks.run_ranks(1, part, 8, str(tmp_path / "to4/checkpoint-4"), 4)
    found = run_ranks(2, part, 12, str(tmp_path / "to8/checkpoint-8"), 2)[0]
    assert_same_run(found, expected, rtol=2e-6)


def test_a_loss_in_chunks_equals_ddp_and_evaluation_has_its_logits(tmp_path) -> None:
    chunk = ["chunk_loss", {"chunk_bytes": 4096}]
    config = loom(schedule=[[0, [chunk, *PRESETS[3][1:]]]])
    steps = {"max_steps": 6, "eval_strategy": "steps", "eval_steps": 3}

    def run(rank: int) -> list[dict[str, Any]]:
        return [
            ddp(tiny_llama(tied=True), tmp_path / "ddp", **steps),
            sharded(tiny_llama(tied=True), tmp_path / "loom", config, **steps),
        ]

    for expected, found in run_ranks(2, run, timeout_s=300):
        assert_same_run(found, expected)
        torch.testing.assert_close(found["eval_loss"], expected["eval_loss"], rtol=1e-6, atol=0)
        assert any(note.endswith("in parts") for note in found["notes"])
