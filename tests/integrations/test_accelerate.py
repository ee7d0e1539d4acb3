"""Accelerate on torchloom: the losses, norms, files and resumes of its own DDP loop."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from loop.test_ownership import newton_schulz_in_fp32
from support import ranks
from support.frameworks import (
    LOOM,
    accelerate_alone,
    assert_same_run,
    loom,
    rows,
    skip_without,
    tiny_llama,
)
from support.pool import run_ranks
from support.ports import free_port
from torchloom.errors import ConfigError

skip_without("accelerate", "transformers")


def accelerator(config: Any, **changes: Any) -> Any:
    """Return an Accelerator on the CPU: torchloom's, or Accelerate's own where the configuration is None."""
    from accelerate import Accelerator

    from torchloom.integrations.accelerate import TorchloomAccelerator

    common = {"cpu": True, **changes}
    return (
        Accelerator(**common)
        if config is None
        else TorchloomAccelerator(torchloom=config, **common)
    )


def loop(
    config: Any,
    *,
    steps: range = range(12),
    seed: int = 0,
    micro: int = 2,
    clip: Callable[[Any, Any], Any] | None = None,
    load: Path | None = None,
    save: Path | None = None,
    make: Callable[[Any], list[torch.optim.Optimizer]] = lambda params: [
        torch.optim.AdamW(params, lr=1e-2)
    ],
    **changes: Any,
) -> dict[str, Any]:
    """Train as Accelerate's documentation writes a loop; the same batches by step, on any number of ranks."""
    with accelerate_alone():
        accel = accelerator(config, **changes)
        model = tiny_llama(seed=seed)
        made = make(model.parameters())
        rates = [torch.optim.lr_scheduler.LambdaLR(each, lambda step: 0.97**step) for each in made]
        loader = DataLoader(rows(), batch_size=micro)
        model, loader, *stepped = accel.prepare(model, loader, *made, *rates)
        if load is not None:
            accel.load_state(str(load))
        found: dict[str, Any] = {"loss": [], "grad_norm": []}
        told: list[float] = []
        for index, batch in enumerate(loader):
            if index not in steps:
                continue
            with accel.accumulate(model):
                loss = model(**batch).loss
                accel.backward(loss)
                told.append(accel.gather(loss.detach()).mean().item())
                if accel.sync_gradients:
                    norm = accel.clip_grad_norm_(model.parameters(), 0.5)
                    found["grad_norm"].append(norm.item())
                for each in stepped:  # optimizers, then schedules
                    each.step()
                for each in stepped[: len(made)]:
                    each.zero_grad()
        found["loss"] = told
        if save is not None:
            accel.save_state(str(save))
        session = accel.session_of(model) if config is not None else None
        found["graphs"] = [graph.fallback for graph in session.report.graphs] if session else []
        weights = accel.get_state_dict(model)
        found["weights"] = {name: value.cpu().clone() for name, value in weights.items()}
        return found


def test_a_loop_equals_ddp_and_goes_on_from_its_files(tmp_path) -> None:
    def run(rank: int) -> Any:
        expected = loop(None, save=tmp_path / "ddp")
        found = loop(LOOM, save=tmp_path / "loom")
        loop(LOOM, steps=range(6), save=tmp_path / "half")
        resumed = loop(LOOM, steps=range(6, 12), seed=9, load=tmp_path / "half")
        return expected, found, resumed

    (expected, found, resumed), (_, other, _) = run_ranks(2, run)
    assert_same_run(found, expected)
    assert found["graphs"] == [None]
    assert resumed["loss"] == found["loss"][6:]  # exactly
    assert resumed["grad_norm"] == found["grad_norm"][6:]
    assert other["weights"] == {}  # the main process has them, as it is what writes
    for name, value in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], value, rtol=0, atol=1e-5)
    assert_files_are_those_of_ddp(tmp_path)


def muon_and_adamw(params: Any) -> list[torch.optim.Optimizer]:
    params = list(params)
    return [
        torch.optim.Muon([param for param in params if param.dim() == 2], lr=1e-2),
        torch.optim.AdamW([param for param in params if param.dim() != 2], lr=1e-2),
    ]


MAKES: dict[str, Any] = {
    "Adafactor": lambda params: [torch.optim.Adafactor(params, lr=1e-2)],
    "Muon and AdamW": muon_and_adamw,
}


@pytest.mark.parametrize("kind", MAKES)
def test_optimizers_of_whole_matrices_equal_ddp_and_go_on_from_files(tmp_path, kind: str) -> None:
    def run(rank: int) -> Any:
        whole = {"make": MAKES[kind]}
        with newton_schulz_in_fp32():
            expected = loop(None, **whole)
            found = loop(LOOM, **whole)
            loop(LOOM, steps=range(6), save=tmp_path / "half", **whole)
            resumed = loop(LOOM, steps=range(6, 12), seed=9, load=tmp_path / "half", **whole)
        return expected, found, resumed

    (expected, found, resumed), _ = run_ranks(2, run)
    assert_same_run(found, expected)
    assert resumed["loss"] == found["loss"][6:]
    for name, value in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], value, rtol=0, atol=1e-5)


def assert_files_are_those_of_ddp(folder: Path) -> None:
    """Load both folders without torchloom."""
    from safetensors.torch import load_file

    names = {path.name for path in (folder / "ddp").iterdir()}
    assert {path.name for path in (folder / "loom").iterdir()} == names
    weights = [load_file(folder / name / "model.safetensors") for name in ("ddp", "loom")]
    assert weights[1].keys() == weights[0].keys()
    tiny_llama().load_state_dict(weights[1])
    states = [
        torch.load(folder / name / "optimizer.bin", weights_only=True) for name in ("ddp", "loom")
    ]
    assert states[1]["param_groups"] == states[0]["param_groups"]
    for index, state in states[0]["state"].items():
        for key, value in state.items():
            torch.testing.assert_close(states[1]["state"][index][key], value, rtol=1e-3, atol=1e-6)


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "accumulation": (LOOM, {"gradient_accumulation_steps": 2}),
    "stage 2": (loom(2), {}),
    "stage 1": (loom(1), {}),
    "stage 0": (loom(0), {}),
    "not compiled": ({**LOOM, "compile": {"enabled": False}}, {}),
    "a budget": (loom(memory_budget="64MB"), {}),
}


@pytest.mark.parametrize("case", CASES)
def test_other_loops_equal_ddp(case) -> None:
    config, changes = CASES[case]

    def run(rank: int) -> Any:
        steps = range(6)
        return loop(None, steps=steps, **changes), loop(config, steps=steps, **changes)

    expected, found = run_ranks(2, run)[0]
    assert len(found["grad_norm"]) >= 3
    assert_same_run(found, expected)


def test_bf16_is_that_of_the_configuration() -> None:
    """`mixed_precision="bf16"` fills the section; weights that step stay fp32."""

    def run(rank: int) -> Any:
        config = {**LOOM, "bf16": {"enabled": "auto"}}
        return loop(None, mixed_precision="bf16"), loop(config, mixed_precision="bf16")

    expected, found = run_ranks(2, run)[0]
    torch.testing.assert_close(found["loss"], expected["loss"], rtol=2e-2, atol=0)
    assert found["loss"] != expected["loss"]  # torch's autocast rounds at other places
    assert all(weight.dtype == torch.float32 for weight in found["weights"].values())


def test_a_prepared_model_unwraps_saves_and_logs(tmp_path) -> None:
    def run(rank: int) -> Any:
        with accelerate_alone():
            accel = accelerator(LOOM, log_with="tensorboard", project_dir=str(tmp_path / "logs"))
            accel.init_trackers("mine")
            made = tiny_llama(tied=True)
            whole = {name: value.clone() for name, value in made.state_dict().items()}
            model, _ = accel.prepare(made, torch.optim.SGD(made.parameters(), lr=0.1))
            assert accel.unwrap_model(model) is made
            accel.log({"loss": 1.5}, step=1)
            with accel.no_sync(model):
                model(**{k: v[None] for k, v in rows()[0].items()}).loss.backward()
            accel.save_model(model, str(tmp_path / "weights"), max_shard_size="10KB")
            made.save_pretrained(
                str(tmp_path / "pretrained"),
                is_main_process=accel.is_main_process,
                state_dict=accel.get_state_dict(model),
                save_function=accel.save,
            )
            accel.wait_for_everyone()
            accel.end_training()
            return whole

    whole = run_ranks(2, run)[0]
    assert (tmp_path / "weights/model.safetensors.index.json").exists()
    from accelerate import load_checkpoint_in_model
    from transformers import LlamaForCausalLM

    again = tiny_llama(tied=True, seed=4)
    load_checkpoint_in_model(again, str(tmp_path / "weights"))
    pretrained = LlamaForCausalLM.from_pretrained(tmp_path / "pretrained")
    for name, value in whole.items():
        assert torch.equal(again.state_dict()[name], value), name
        assert torch.equal(pretrained.state_dict()[name], value), name
    assert list((tmp_path / "logs").rglob("*tfevents*"))


def test_two_models_and_an_evaluation_model(tmp_path) -> None:
    def run(rank: int) -> Any:
        with accelerate_alone():
            accel = accelerator(LOOM)
            models = [tiny_llama(seed=seed) for seed in (0, 1)]
            steps = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
            teacher = accel.prepare_model(tiny_llama(seed=2), evaluation_mode=True)
            first, second, *steps = accel.prepare(*models, *steps)
            batch = {k: v[None] for k, v in rows()[rank].items()}
            if rank == 0:  # it is whole, so ranks call it on their own
                teacher(**batch)
            loss = first(**batch).loss + second(**batch).loss
            accel.backward(loss)
            params = [*first.parameters(), *second.parameters()]
            norm = accel.clip_grad_norm_(params, 0.5).item()
            for step in steps:
                step.step()
            accel.save_state(str(tmp_path / "both"))
            accel.wait_for_everyone()  # as after any save, the main process writes
            accel.load_state(str(tmp_path / "both"))
            return norm, [accel.session_of(model) is not None for model in models]

    (norm, compiled), (other, _) = run_ranks(2, run)
    assert norm == other
    assert norm > 0.1
    assert compiled == [True, True]
    assert (tmp_path / "both/model_1.safetensors").exists()


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "fp16": (LOOM, {"mixed_precision": "fp16"}, "mixed_precision='fp16'"),
    "accumulation": (
        {**LOOM, "gradient_accumulation_steps": 4},
        {"gradient_accumulation_steps": 2},
        "gradient_accumulation_steps is 4, and gradient_accumulation_steps is 2",
    ),
    "bf16": ({**LOOM, "bf16": {"enabled": True}}, {}, "bf16.enabled is True"),
    "FSDP": (LOOM, {"fsdp_plugin": object()}, "asks for FSDP and for torchloom"),
    "DeepSpeed": (LOOM, {"deepspeed_plugin": object()}, "asks for DeepSpeed and for torchloom"),
    "a wrong value": (loom(5), {}, "zero_optimization.stage"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_contradictions_are_refused(case) -> None:
    config, changes, words = REFUSED[case]
    with accelerate_alone(), pytest.raises(ConfigError) as told:
        accelerator(config, **changes)
    assert words in str(told.value)


HF_FILE = {
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "reduce_bucket_size": "auto",
        "stage3_param_persistence_threshold": 100,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": 1.0,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}


def test_a_file_of_the_wild_runs_and_says_what_counts_for_nothing(caplog) -> None:
    import logging

    with accelerate_alone(), caplog.at_level(logging.WARNING, "torchloom"):
        accel = accelerator(HF_FILE)
    told = caplog.text
    for words in (
        "zero_optimization.offload_optimizer is left out",
        "optimizer counts for nothing with TorchloomAccelerator: pass the optimizer",
        "gradient_clipping counts for nothing with TorchloomAccelerator: call accelerator.clip_grad",
    ):
        assert told.count(words) == 1, words
    assert accel.preparation.config.zero.stage == 3


def test_ranks_that_accelerate_does_not_count_are_refused() -> None:
    """On a CPU, without `cpu=True`, each process would be the main one, with the whole data."""

    port = free_port()

    def run(rank: int) -> str:
        with accelerate_alone(), pytest.raises(ConfigError) as told:
            from torchloom.integrations.accelerate import TorchloomAccelerator

            torch.distributed.destroy_process_group()
            # Accelerate makes a group; at the old port a rank can still find the store of the ended one.
            os.environ["MASTER_PORT"] = str(port)
            TorchloomAccelerator(torchloom=LOOM)
        return str(told.value)

    if torch.cuda.is_available():
        pytest.skip("Accelerate counts ranks of GPUs by itself")
    for told in ranks.run_ranks(2, run):
        assert "2 ranks were launched" in told
        assert "pass cpu=True" in told


def test_a_model_of_transformers_on_meta_is_filled_as_transformers_does(tmp_path) -> None:
    pytest.importorskip("transformers")
    tiny_llama().save_pretrained(tmp_path)

    def run(rank: int) -> Any:
        from transformers import AutoModelForCausalLM

        from torchloom.integrations.transformers import from_pretrained

        with accelerate_alone():
            accel = accelerator(LOOM)
            made = from_pretrained(AutoModelForCausalLM, str(tmp_path))
            assert not made.training  # on each rank
            model = accel.prepare_model(made)
            optimizer = accel.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
            accel.backward(model(**{k: v[None] for k, v in rows()[rank].items()}).loss)
            optimizer.step()
            return {k: v.clone() for k, v in model.state_dict().items()}

    first, second = run_ranks(2, run)
    start = tiny_llama().state_dict()
    for name, value in first.items():
        assert torch.equal(second[name], value), name
    assert 0 < (first["lm_head.weight"] - start["lm_head.weight"]).abs().max() < 0.1


@pytest.mark.parametrize("stage", [1, 3])
def test_running_statistics_are_those_of_ddp(stage) -> None:
    def train(config: Any) -> Any:
        with accelerate_alone():
            accel = accelerator(config)
            torch.manual_seed(0)
            model = torch.nn.Sequential(
                torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 2)
            )
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model, optimizer = accel.prepare(model, optimizer)
            generator = torch.Generator().manual_seed(accel.process_index)
            for _ in range(4):
                accel.backward(model(torch.randn(5, 6, generator=generator)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            whole = accel.unwrap_model(model)
            model.eval()
            out = model(torch.ones(3, 6)).detach()  # DDP shares statistics before a forward
            return whole[1].running_mean.clone(), out

    def run(rank: int) -> Any:
        return train(None), train({**loom(stage), "compile": {"enabled": False}})

    results = run_ranks(2, run)
    for (mean, out), (found, found_out) in results:
        torch.testing.assert_close(found, mean)
        torch.testing.assert_close(found_out, out)
    assert torch.equal(results[0][1][0], results[1][1][0])


def test_a_models_own_generate_gets_the_callers_arguments_alone() -> None:
    def run(rank: int) -> Any:
        class Writer(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net = torch.nn.Linear(8, 8)

            def forward(self, x: Any) -> Any:
                return self.net(x)

            def generate(self, x: Any, steps: int, **kwargs: Any) -> Any:
                for _ in range(steps):
                    x = self(x, **kwargs)
                return x

        with accelerate_alone():
            accel = accelerator(LOOM)
            decoder, model = tiny_llama(), Writer()  # of one seed on all ranks
            x, tokens = torch.ones(1, 8), torch.ones(1, 3 + rank, dtype=torch.long)
            expected = model.generate(x, 3).detach()
            of_decoder = decoder.generate(tokens, max_length=8, do_sample=False)
            model, decoder = accel.prepare(model, decoder)
            assert torch.equal(model.generate(x, 3), expected)
            return torch.equal(decoder.generate(tokens, max_length=8, do_sample=False), of_decoder)

    assert run_ranks(2, run) == [True, True]
