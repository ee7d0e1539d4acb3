"""A simulated rank plans as a real one does, and says what a user wants to know before renting ranks."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from typer.testing import CliRunner

import torchloom
from support.optimizers import Base
from support.ranks import run_ranks
from torchloom.cli import make_app
from torchloom.config import load_config
from torchloom.costs import NETWORKS, CostTable, collective_us, device_row
from torchloom.costs.collectives import network_row
from torchloom.costs.store import table_from_json, table_to_json
from torchloom.errors import ConfigError, PlanError, TorchloomError
from torchloom.loop.plan_check import foretold
from torchloom.memory import measure_peak
from torchloom.recipes.train.model import Llama, LlamaConfig
from torchloom.simulation import Simulation, simulate
from torchloom.simulation.choices import choices_of, table
from torchloom.simulation.models import simulated_model

SIZES = LlamaConfig(
    vocab_size=301, dim=48, num_layers=6, num_heads=4, hidden_dim=136, max_seq_len=40
)


def config(stage: int = 3, budget: int | None = None, optimizer: str = "AdamW") -> dict:
    compiling = {"backend": "aot_eager", "strict": True}
    return {
        "train_micro_batch_size_per_gpu": 3,
        "optimizer": {"type": optimizer, "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 100},
        "compile": {**compiling, "memory_budget": budget} if budget else compiling,
    }


def batch(device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 301, (3, 40), device=device)
    return ids, ids


def simulated(world_size: int, stage: int = 3, budget: int | None = None, **kwargs):
    return simulate(
        lambda: Llama(SIZES), batch(), config(stage, budget), world_size=world_size, **kwargs
    )


@pytest.mark.parametrize(
    ("world_size", "shard_size", "optimizer"),
    [(2, 2, "AdamW"), (3, 3, "AdamW"), (4, 2, "AdamW"), (3, 3, "Muon")],
)
def test_the_plan_is_that_of_real_ranks_to_the_byte(
    world_size: int, shard_size: int, optimizer: str
) -> None:
    table = CostTable(network=NETWORKS["gloo"])

    def settings(budget: int | None = None) -> dict:
        made = config(3, budget, optimizer)
        made["zero_optimization"]["shard_size"] = shard_size
        return made

    def found_by(budget: int | None = None) -> Simulation:
        made = lambda: Llama(SIZES)  # noqa: E731
        return simulate(made, batch(), settings(budget), world_size=world_size, costs=table)

    free = found_by()
    budget = free.standing_bytes + (free.peak_bytes - free.standing_bytes) * 7 // 10

    def train(rank: int) -> tuple[str, list[str], dict[str, float], float | None]:
        torch._dynamo.reset()
        engine, *_ = torchloom.initialize(model=Llama(SIZES), config=settings(budget))
        engine.compile()
        engine.backward(engine(*batch()))
        engine.step()
        report = engine.compile_report()
        told = foretold(engine._compiled.session, 1)
        return engine.plan().to_json(), report.fallbacks, report.exposed_ms, told.seconds

    with pytest.MonkeyPatch.context() as patch:
        # Ranks would read what this machine has measured, which is not the table above.
        patch.setattr("torchloom.step.planner.load_table", lambda device: table)
        first, *others = run_ranks(world_size, train)
    plan, fallbacks, exposed_ms, seconds = first
    assert fallbacks == [] and all(each == first for each in others)
    found = found_by(budget)
    assert found.plan is not None and found.plan.to_json() == plan
    assert found.fits and found.peak_bytes <= budget < free.peak_bytes
    exposed = {what: 1e3 * seconds for what, seconds in found.exposed_by.items()}
    assert exposed_ms and exposed == pytest.approx(exposed_ms)
    assert seconds == pytest.approx(found.compute_s + found.exposed_s + found.loaded_s)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_weights_that_wait_on_the_host_peak_as_on_real_ranks(accumulation: int) -> None:
    table = CostTable(network=NETWORKS["gloo"])

    def settings(budget: int | None = None, **zero: Any) -> dict:
        made = {**config(3, budget), "gradient_accumulation_steps": accumulation}
        return {**made, "zero_optimization": {**made["zero_optimization"], **zero}}

    def found_by(budget: int | None = None, **zero: Any) -> Simulation:
        made = lambda: Llama(SIZES)  # noqa: E731
        return simulate(made, batch(), settings(budget, **zero), world_size=2, costs=table)

    waits = {"offload_param": {"device": "cpu"}}
    both = {**waits, "offload_optimizer": {"device": "cpu"}}
    here, there, all_there = found_by(), found_by(**waits), found_by(**both)
    shards = here.peak_by_kind["parameters"] - there.peak_by_kind["parameters"]
    assert here.standing_bytes - there.standing_bytes == shards > 0
    assert all_there.standing_bytes < there.standing_bytes
    assert here.update_s < there.update_s < all_there.update_s  # they stream through the step
    assert here.exposed_s + here.loaded_s < there.exposed_s + there.loaded_s
    budget = there.standing_bytes + (there.peak_bytes - there.standing_bytes) * 8 // 10

    def train(rank: int) -> tuple[str, int, int]:
        torch._dynamo.reset()
        engines = []
        for asked in (settings(**waits), settings(budget, **waits)):
            engine, *_ = torchloom.initialize(model=Llama(SIZES), config=asked)
            engine.compile()
            measured = 0
            for number in range(2 * accumulation):
                ids = batch()

                def micro_step(engine=engine, ids=ids) -> None:
                    engine.backward(engine(*ids))

                if number < accumulation:
                    micro_step()  # compiles
                else:
                    measured = max(measured, measure_peak(micro_step).peak_bytes)
                engine.step()
            engines.append((engine, measured))
        (_, free), (planned, kept) = engines
        return planned.plan().to_json(), free, kept

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchloom.step.planner.load_table", lambda device: table)
        results = run_ranks(2, train)
    found = found_by(budget, **waits)
    assert found.plan is not None and all(each[0] == found.plan.to_json() for each in results)
    assert found.fits
    (graph,) = found.plan.graphs
    free = there.peak_bytes - there.standing_bytes - graph.batch_bytes
    for each in results:  # a loss may live on for a moment
        assert each[1:] == pytest.approx((free, graph.peak_bytes), abs=8)


def test_what_is_said_of_a_step() -> None:
    found = simulated(512, device="h100-80gb", network="nvlink+ib400")
    assert found.num_params == sum(p.numel() for p in Llama(SIZES).parameters())
    assert found.world_size == 512 and found.tokens == 120 and found.fits
    assert 0 < found.exposed_s <= found.network_s and found.step_s > found.compute_s > 0
    beside = found.peak_bytes - sum(found.peak_by_kind.values())
    assert (
        0 < beside <= (16 << 10) + 4 * 100
    )  # what is held back for losses and norms, and counts of steps
    assert found.mfu is not None and 0 < found.mfu < 1
    text = found.text()
    for part in (
        "512 x h100-80gb",
        "nvlink+ib400",
        "peak",
        "free",
        "tokens/s",
        "products",
        "within 5%",
    ):
        assert part in text
    assert "no published run on b200-180gb" in simulated(8, device="b200-180gb").text()
    assert all(what.split()[0] in ("gather", "reduce", "sync") for what in found.exposed_by)
    assert json.loads(json.dumps(found.to_dict()))["step_s"] == found.step_s


def test_more_ranks_hold_less_and_wait_longer() -> None:
    few, many = (simulated(n, device="a100-80gb", network="nvlink+eth200") for n in (8, 64))
    assert many.standing_bytes < few.standing_bytes
    assert many.network_s > few.network_s
    assert many.compute_s == few.compute_s


def test_what_collectives_take_from_compute_is_what_was_measured() -> None:
    def over(**figures: float) -> Simulation:
        return simulated(2, costs=CostTable(network=NETWORKS["gloo"], figures=figures))

    free, half, whole = over(gloo_load=0.0), over(), over(gloo_load=1.0)
    assert free.loaded_s == 0 < half.loaded_s
    assert whole.loaded_s == pytest.approx(half.loaded_s / NETWORKS["gloo"].load)


def test_other_stages_keep_more_and_reduce_behind_backward() -> None:
    third, first, none = (simulated(8, stage=stage) for stage in (3, 1, 0))
    assert third.standing_bytes < first.standing_bytes < none.standing_bytes
    assert none.exposed_s > 0 and none.update_s > first.update_s


def test_copies_hold_more_gather_within_and_reduce_between() -> None:
    def over(shard_size: int | None) -> Simulation:
        settings = config()
        settings["zero_optimization"]["shard_size"] = shard_size
        where = {"device": "a100-80gb", "network": "nvlink+eth200", "world_size": 64}
        return simulate(lambda: Llama(SIZES), batch(), settings, **where)

    whole, copies = over(None), over(8)
    assert copies.world_size == whole.world_size == 64
    assert copies.standing_bytes > whole.standing_bytes
    gathers = [
        sum(s for n, s in each.exposed_by.items() if "gather" in n) for each in (copies, whole)
    ]
    assert gathers[0] < gathers[1]


def test_checkpointed_layers_hold_less_and_compute_more() -> None:
    many = {"device": "h100-80gb", "network": "nvlink"}
    free, layers, selective, full = (
        simulated(8, checkpointing=each, **many) for each in ("none", "layers", "selective", "full")
    )
    kept = [each.peak_by_kind["activations"] for each in (free, layers, selective, full)]
    assert kept == sorted(kept, reverse=True)
    assert full.compute_by["products"] > layers.compute_by["products"] > free.compute_by["products"]
    assert full.compute_by["products"] > selective.compute_by["products"]
    with pytest.raises(ConfigError, match=r"checkpointing 'some': use one of none, full"):
        simulated(8, checkpointing="some")
    with pytest.raises(ConfigError, match=r"Branch has no nn\.ModuleList"):
        simulate(Branch, (torch.ones(3, 3),), config(), world_size=4, checkpointing="full")


@pytest.mark.parametrize(
    ("checkpointing", "compiling"), [("none", {}), ("layers", {}), ("none", {"regions": False})]
)
def test_transfers_hide_behind_layers_of_real_size(checkpointing: str, compiling: dict) -> None:
    sizes = LlamaConfig(
        vocab_size=301, dim=4096, num_layers=8, num_heads=32, num_kv_heads=8, hidden_dim=14336, max_seq_len=8192
    )  # fmt: skip
    ids = torch.zeros(1, 8192, dtype=torch.long, device="meta")
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
        "compile": compiling,
    }
    found = simulate(
        lambda: Llama(sizes), (ids, ids), settings, world_size=8, checkpointing=checkpointing
    )
    assert bool(compiling) == bool(found.flat_because)
    # Weights of the first calls of forward and backward have nothing to hide behind.
    gathered = sum(s for what, s in found.exposed_by.items() if "gather" in what)
    layer_s = found.network_s / 3 / 8
    assert gathered < (2 + 2 * (2 if checkpointing == "layers" else 1)) * layer_s
    assert found.exposed_s < 0.3 * found.network_s


@functools.lru_cache
def number_of_heads() -> int:
    return 4


class Attends(torch.nn.Module):
    """Attention with dropout, and values of a width of their own."""

    def __init__(self, width: int, dropout: float, masked: bool) -> None:
        super().__init__()
        self.width, self.dropout, self.masked = width, dropout, masked
        self.qk, self.v = torch.nn.Linear(64, 4 * 32), torch.nn.Linear(64, 4 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qk, v = self.qk(x), self.v(x)
        qk, v = (each.unflatten(-1, (number_of_heads(), -1)).transpose(1, 2) for each in (qk, v))
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool) if self.masked else None
        mixed = torch.nn.functional.scaled_dot_product_attention(qk, qk, v, mask, self.dropout)
        return mixed.square().mean()


@pytest.mark.parametrize(
    ("width", "dropout", "masked"), [(32, 0.1, False), (16, 0.0, False), (16, 0.1, True)]
)
def test_attention_is_that_of_the_device(
    width: int, dropout: float, masked: bool, recwarn: pytest.WarningsRecorder
) -> None:
    settings = {**config(), "bf16": {"enabled": True}}

    def over(seq_len: int, device: str = "h100-80gb") -> Simulation:
        given = (torch.zeros(3, seq_len, 64),)
        return simulate(
            lambda: Attends(width, dropout, masked), given, settings, world_size=2, device=device
        )

    short, long, cpu = over(512), over(2048), over(512, "cpu")
    assert "attention" in short.compute_by and "attention" not in cpu.compute_by
    scores = 3 * 4 * 2048**2 * 2
    if not masked:
        assert long.peak_bytes < scores / 4 and short.peak_bytes < cpu.peak_bytes
    assert not [str(each.message) for each in recwarn if "lru_cache" in str(each.message)]


def test_operators_one_by_one_take_longer() -> None:
    fused, eager = (simulated(8, device="a100-80gb", eager=each) for each in (False, True))
    assert eager.compute_by["elementwise"] > 1.2 * fused.compute_by["elementwise"]
    assert eager.compute_by["products"] == fused.compute_by["products"]
    assert sum(fused.compute_by.values()) == pytest.approx(fused.compute_s)


def test_accumulation_repeats_micro_steps() -> None:
    once = simulated(8)
    settings = {**config(), "gradient_accumulation_steps": 4}
    four = simulate(lambda: Llama(SIZES), batch(), settings, world_size=8)
    assert four.tokens == 4 * once.tokens and four.micro_steps == 4
    assert four.compute_s == pytest.approx(4 * once.compute_s)
    assert four.update_s == once.update_s


def no_loss(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(x)


class Branch(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y.sum() if y.sum() > 0 else y.square().sum()


class Picks(Branch):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[x.sum(1).nonzero().flatten()].sum() * self.weight.sum()


def test_refusals_say_what_to_do() -> None:
    with pytest.raises(PlanError, match="has data: pass a function"):
        simulate(Llama(SIZES), batch(), config(), world_size=2)
    with pytest.raises(PlanError, match=r"unknown device 'h900'.*h100-80gb"):
        simulated(2, device="h900")
    with pytest.raises(PlanError, match="unknown network 'ib9'"):
        simulated(2, network="nvlink+ib9")
    with pytest.raises(PlanError, match="return its loss"):
        simulate(
            lambda: torch.nn.Linear(3, 3), (torch.ones(3),), config(0), world_size=2, loss=no_loss
        )
    with pytest.raises(PlanError, match="reads values of tensors"):
        simulate(Branch, (torch.ones(3, 3),), config(), world_size=4)
    with pytest.raises(PlanError, match="sizes by data"):
        simulate(Picks, (torch.ones(3, 3),), config(), world_size=4)
    with pytest.raises(PlanError, match="Linear has no parameter that trains"):
        frozen = lambda: torch.nn.Linear(3, 3).requires_grad_(False)  # noqa: E731
        simulate(frozen, (torch.ones(3),), config(), world_size=2)
    with pytest.raises(PlanError, match="infeasible"):
        simulated(2, budget=1 << 10)


@pytest.mark.parametrize(
    ("sizes", "options", "expected"),
    [
        ({"train_batch_size": 64}, {}, (8, 1)),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2}, {}, (2, 4)),
        ({"train_batch_size": 64, "gradient_accumulation_steps": 2}, {}, (4, 2)),
        ({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 2}, {}, (2, 1)),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": "auto"}, {}, (8, 1)),
        ({"train_batch_size": 64}, {"batch": "2"}, (2, 1)),
        ({"gradient_accumulation_steps": 2}, {}, (1, 2)),
        ({}, {}, (1, 1)),
    ],
)
def test_a_batch_of_all_ranks_gives_what_the_config_leaves_out(
    sizes: dict, options: dict, expected: tuple[int, int]
) -> None:
    (choice,) = choices_of(sizes, "8", **options)
    found = load_config(choice.config(), world_size=8).batch
    assert (found.micro_batch_size, found.accumulation_steps) == expected


@pytest.mark.parametrize(
    ("kind", "more", "words"),
    [
        ("BertForMaskedLM", {}, ""),
        ("BertForMaskedLM", {"max_position_embeddings": 16}, "16 learned positions"),
        ("BertForQuestionAnswering", {}, "no language model that returns its loss"),
        (
            "BertForMaskedLM",
            {"hidden_size": "16"},
            "cannot be used: .*'hidden_size'.* expected int",
        ),
    ],
)
def test_a_folder_of_hugging_face(tmp_path, kind: str, more: dict, words: str) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    sizes |= {"num_hidden_layers": 1, "vocab_size": 30, **more}
    record = {"model_type": "bert", "architectures": [kind], **sizes}
    (tmp_path / "config.json").write_text(json.dumps(record))
    if words:
        with pytest.raises(ConfigError, match=words):
            simulated_model(str(tmp_path), 2, 24)
    else:
        assert type(simulated_model(str(tmp_path), 2, 24).module).__name__ == kind


def test_a_function_that_takes_other_arguments() -> None:
    def make(batch: int) -> torch.nn.Module:
        return torch.nn.Linear(batch, 3)

    with pytest.raises(
        ConfigError, match=r"make does not take .*'seq_len'.*def make\(batch, seq_len\)"
    ):
        simulated_model(make, 2, 24)


WRONG_MODELS = """
import torch
def linear(batch, seq_len):
    return torch.nn.Linear(4, 4), (torch.zeros(batch, 4),)
def total(batch, seq_len):
    class Total(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x).sum()
    return Total(4, 4), (torch.zeros(batch, 4),)
"""


def test_errors_of_the_command_say_what_where_and_what_to_do(tmp_path) -> None:
    heads = {"num_attention_heads": 5, "num_key_value_heads": 4, "num_hidden_layers": 1}
    sizes = {"hidden_size": 64, "intermediate_size": 32, "vocab_size": 30, **heads}
    record = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], **sizes}
    (tmp_path / "config.json").write_text(json.dumps(record))
    file = tmp_path / "wrong_models.py"
    file.write_text(WRONG_MODELS)
    said = {
        (
            str(tmp_path),
        ): rf"^{tmp_path.name} does not run at \S+:\d+ in .*length 4.*sizes in its config",
        (f"{file}:linear",): r"returned a tensor of shape \(1, 4\).*return its loss.* pass loss=",
        (f"{file}:total", "--budget", "70"): r'is 70 bytes \(.*write a unit, as "70GB"\)',
        (str(file),): r"names no function: write FILE\.py:function",
    }
    for (model, *more), words in said.items():
        options = ["plan", "simulate", "--world-size", "2", "--seq-len", "8", "--model", model]
        result = CliRunner().invoke(make_app("plan"), [*options, *more])
        assert isinstance(result.exception, TorchloomError), result.output
        assert re.search(words, str(result.exception)), str(result.exception)
        assert len(str(result.exception).splitlines()) == 1


def test_two_levels_of_links() -> None:
    both = CostTable(device=device_row("h100-80gb"), network=network_row("nvlink+ib400"))
    inside = replace(both, network=NETWORKS["nvlink"])
    size = 1 << 30
    assert collective_us("all_gather", size, 8, both) == collective_us(
        "all_gather", size, 8, inside
    )
    across = [collective_us("all_gather", size, n, both) for n in (16, 64, 512)]
    assert across == sorted(across) and across[-1] < 1.5 * across[0]
    alone = replace(both, network=NETWORKS["infiniband-400"])
    assert across[0] < 0.2 * collective_us("all_gather", size, 16, alone)
    assert table_from_json(table_to_json(both)) == both


def test_a_table_of_choices() -> None:
    base = config()
    choices = choices_of(base, "8, 16", stage="1,3", batch="")
    assert [each.text() for each in choices] == [
        "ranks 8, stage 1",
        "ranks 8, stage 3",
        "ranks 16, stage 1",
        "ranks 16, stage 3",
    ]
    assert choices[0].config()["zero_optimization"]["stage"] == 1
    assert base["zero_optimization"]["stage"] == 3
    with pytest.raises(ConfigError, match="--batch 4,x: 'x' is no whole number"):
        choices_of(base, "8", batch="4,x")
    fits = simulated(8)
    not_fits = replace(fits, capacity_bytes=1)
    lines = table(
        [(choices[2], not_fits), (choices[0], fits)], [(choices[1], PlanError("too little"))]
    )
    head, first, second, last = lines.splitlines()
    assert "tokens/s/rank" in head and first.startswith("ranks 8, stage 1")
    assert second.endswith("does not fit") and last == "ranks 8, stage 3: too little"


def test_the_command(tmp_path) -> None:
    source = tmp_path / "mine.py"
    source.write_text(
        "import torch\n"
        "from torch import nn\n"
        "class Mine(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))\n"
        "    def forward(self, x):\n"
        "        return self.layers(x).square().mean()\n"
        "def make(batch, seq_len):\n"
        "    return Mine(), (torch.zeros(batch, 64),)\n"
    )
    options = ["--model", f"{source}:make", "--seq-len", "64", "--network", "nvlink"]

    def run(*more: str):
        return CliRunner().invoke(make_app("plan"), ["plan", "simulate", *options, *more])

    one = run("--world-size", "8", "--batch", "4", "--json")
    assert one.exit_code == 0, one.output
    (found,) = json.loads(one.stdout)
    assert found["world_size"] == 8 and found["fits"]
    drawn = tmp_path / "frontier.svg"
    several = run("--world-size", "8", "--batch", "2,4", "--stage", "0,3", "--chart", str(drawn))
    assert several.exit_code == 0, several.output
    assert several.stdout.count("ranks 8") == 4
    svg = drawn.read_text()
    assert svg.startswith("<svg") and "4 settings on h100-80gb" in svg
    assert svg.count("<circle") >= 4 + 1  # each combination, and the key
    measured = tmp_path / "measured.json"
    measured.write_text(table_to_json(CostTable()))
    here = run("--world-size", "8", "--costs", str(measured), "--json")
    assert json.loads(here.stdout)[0]["device"] == "cpu"
    for wrong in (["--world-size", "eight"], ["--world-size", "8", "--seq-len", "0"]):
        assert run(*wrong).exit_code != 0


class Matrices(torch.nn.Module):
    """Square matrices, of which no two ranks own the same."""

    def __init__(self, num: int, size: int = 2048) -> None:
        super().__init__()
        layers = [torch.nn.Linear(size, size, bias=False) for _ in range(num)]
        self.layers = torch.nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


class Choosing(Base):
    """Steps what its values choose, which nobody knows without data."""

    def update(self, param, group, state):
        param.view(-1)[param.grad.view(-1).nonzero()] -= group["lr"]


def test_an_update_by_owners_takes_the_time_of_the_optimizers_code(monkeypatch) -> None:
    told = mock.Mock()
    monkeypatch.setattr("torchloom.loop.owner_memory.logger", told)
    device = device_row("h100-80gb")
    product_s = 2 * 2048**3 / device.flops_of("bfloat16")

    def update_s(num: int, world_size: int, kind: str = "Muon", optimizer: Any = None) -> float:
        made, given = config(3, None, kind), (torch.zeros(4, 2048),)
        if optimizer is not None:
            del made["optimizer"]
        return simulate(
            lambda: Matrices(num), given, made, world_size=world_size, optimizer=optimizer
        ).update_s

    adamw_s = update_s(4, 2, "AdamW")
    assert adamw_s == pytest.approx(4 * 2048**2 / 2 / device.adamw_params_per_s)
    of_two = update_s(4, 2)
    # Five times three products of each matrix, and what is around them.
    assert 1 < of_two / (2 * 15 * product_s) < 2
    assert 1.8 < update_s(8, 2) / of_two < 2.05
    assert update_s(7, 2) == pytest.approx(update_s(8, 2), rel=0.02)  # the fullest rank's
    assert adamw_s < update_s(4, 2, optimizer=Choosing) < of_two
    assert "cannot be tried on tensors without data" in told.warning.call_args.args[0]
