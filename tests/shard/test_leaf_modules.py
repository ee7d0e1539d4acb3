"""Modules of which ranks use other parts train as under DDP with find_unused_parameters."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import torchloom
from support.pool import run_ranks
from support.runs import sharded
from torchloom.config.model import LeafConfig
from torchloom.errors import AgreementError, ShardError
from torchloom.shard import full_state_dict
from torchloom.shard.leaf_modules import HELD, is_leaf, leaves_of, mark_leaves
from torchloom.shard.regather import AHEAD

NUM_STEPS = 3
"""Each rank meets each of the uses, and each of the ranges, once."""


@dataclass
class Mixed:
    """A result that torch's pytree does not know."""

    out: torch.Tensor


class Experts(nn.Module):
    """Some in modules of their own, one parameter for all, one that nobody ever uses."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.items = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width))
            for _ in range(4)
        )
        self.stack = nn.Parameter(torch.randn(4, width, width) * 0.3)
        self.scale = nn.Parameter(torch.rand(width), requires_grad=False)
        self.spare = nn.Parameter(torch.randn(width))

    def forward(self, x, chosen):
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.items):
            rows = (chosen == index).nonzero().flatten()
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) @ self.stack[index] * self.scale)
        return Mixed(out)


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(width), nn.Linear(width, 4, bias=False)
        self.experts = Experts(width)

    def forward(self, x, use: str):
        x_normed = self.norm(x)
        weight, chosen = self.gate(x_normed).softmax(-1).max(-1, keepdim=True)
        chosen = chosen.flatten()
        if use == "none":
            chosen = chosen + 9
        elif use == "one":
            chosen = chosen * 0
        return x + self.experts(x_normed, chosen).out * weight


class Mixture(nn.Module):
    def __init__(self, is_checkpointed: bool, width: int = 6) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(5, width), nn.Linear(width, 3)
        self.layers = nn.ModuleList(Layer(width) for _ in range(3))
        self.is_checkpointed = is_checkpointed

    def forward(self, x, use: str):
        x = self.first(x)
        for layer in self.layers:
            if self.is_checkpointed:
                x = checkpoint(layer, x, use, use_reentrant=False)
            else:
                x = layer(x, use)
        return self.head(x).square().mean()


USES = ("all", "none", "one")


def mixture_batch(rank: int, index: int):
    generator = torch.Generator().manual_seed(10 * index + rank)
    return torch.randn(7 + rank, 5, generator=generator), USES[(index * 2 + rank) % 3]


class Tasks(nn.Module):
    """One head for each task, in a module of their own; each rank's batches are of one task."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.by_task = nn.ModuleDict({"a": nn.Linear(6, 3), "b": nn.Linear(6, 11)})

        def forward(self, x, task: str):
            return self.by_task[task](x)

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.heads = nn.Linear(5, 6), Tasks.Heads()

    def forward(self, x, task: str):
        return self.heads(torch.tanh(self.trunk(x)), task).square().mean()


def tasks_batch(rank: int, index: int):
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * index + rank)), "ab"[
        rank % 2
    ]


class Adaptive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 16)
        self.loss = nn.AdaptiveLogSoftmaxWithLoss(16, 40, cutoffs=[8, 20])

    def forward(self, x, labels):
        return self.loss(torch.tanh(self.first(x)), labels).loss


def adaptive_batch(rank: int, index: int):
    generator = torch.Generator().manual_seed(10 * index + rank)
    top = (8, 20, 40)[(index + rank) % 3]
    return torch.randn(6, 5, generator=generator), torch.randint(top, (6,), generator=generator)


class Drops(nn.Module):
    """Layers that each rank leaves out by chance, computed again in backward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.is_reentrant = False

    def forward(self, x, kept):
        for layer, is_kept in zip(self.layers, kept, strict=True):
            if is_kept:
                x = x + checkpoint(layer, x, use_reentrant=self.is_reentrant)
        return x


class Dropped(nn.Module):
    """Leaf modules that share a layer, and a weight with one beside them; whatever is used, their weights are in the loss."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, width), nn.Linear(width, width)
        self.stacks = nn.ModuleList(Drops(width) for _ in range(2))
        self.stacks[1].layers[0] = self.stacks[0].layers[0]
        self.stacks[0].layers[1].weight = self.second.weight

    def forward(self, x, kept):
        x = torch.tanh(self.second(self.first(x)))
        for stack, each in zip(self.stacks, kept, strict=True):
            x = stack(x, each)
        penalty = sum(each.square().sum() for each in self.stacks[1].layers[2].parameters())
        return x.square().mean() + 0.1 * penalty


def dropped_batch(rank: int, index: int):
    generator = torch.Generator().manual_seed(10 * index + rank)
    kept = torch.rand(2, 3, generator=generator) > (0.5 if index else 1.0)  # first none
    kept[1, 2] = False  # a weight that no rank uses beside the penalty
    return torch.randn(4, 5, generator=generator), kept.tolist()


def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    class Losses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = MixtralForCausalLM(
                MixtralConfig(
                    vocab_size=61, hidden_size=16, intermediate_size=20, num_hidden_layers=2, num_attention_heads=2,
                    num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=1, experts_implementation="eager",
                )
            )  # fmt: skip

        def forward(self, ids):
            return self.model(input_ids=ids, labels=ids).loss

    return Losses()


def mixtral_batch(rank: int, index: int):
    generator = torch.Generator().manual_seed(10 * index + rank)
    return (torch.randint(61, (1, 2 + 10 * rank), generator=generator),)


KINDS = {
    "mixture": (lambda: Mixture(False), mixture_batch),
    "checkpointed": (lambda: Mixture(True), mixture_batch),
    "tasks": (Tasks, tasks_batch),
    "adaptive": (Adaptive, adaptive_batch),
    "mixtral": (mixtral, mixtral_batch),
    "dropped": (Dropped, dropped_batch),
    "reentrant": (Dropped, dropped_batch),  # DDP would see its gradients twice
}


def train(run, optimizer, batch_of, rank: int, micro_steps: int, skip_sync) -> None:
    for step in range(NUM_STEPS):
        for micro_step in range(micro_steps):
            batch = batch_of(rank, step * micro_steps + micro_step)
            with skip_sync() if micro_step < micro_steps - 1 else nullcontext():
                (run(*batch) / micro_steps).backward()
        optimizer.step()
        optimizer.zero_grad()


def farthest(
    rank: int, kinds: list[str], stage: int, way: str, micro_steps: int
) -> dict[str, float]:
    """Return how far weights end from those of DDP; AdamW decays a weight whose gradient is zeros, not None."""
    return {kind: distance(rank, kind, stage, way, micro_steps) for kind in kinds}


def distance(rank: int, kind: str, stage: int, way: str, micro_steps: int) -> float:
    build, batch_of = KINDS[kind]
    torch.manual_seed(3)
    expected = build()
    ddp = DistributedDataParallel(expected, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2, eps=1e-4)
    train(ddp, optimizer, batch_of, rank, micro_steps, ddp.no_sync)

    torch.manual_seed(3)
    model = build()
    for each in model.modules():
        if isinstance(each, Drops):
            each.is_reentrant = kind == "reentrant"
    made = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    if way == "engine":
        leaves = {"leaf_module": {"classes": ["Experts", "Drops"], "name_suffixes": ["by_task"]}}
        accumulation = {"gradient_accumulation_steps": micro_steps}
        engine = sharded(model, stage, batch=1, optimizer=made, zero=leaves, **accumulation)
        for index in range(NUM_STEPS * micro_steps):
            engine.backward(engine(*batch_of(rank, index)))
            engine.step()
    else:
        marked = (
            each for each in model.modules() if isinstance(each, (Experts, Tasks.Heads, Drops))
        )
        torchloom.leaf(*marked)
        torchloom.shard_model(model, stage=stage, persistence_threshold=0)
        if way == "compiled":
            torchloom.compile(model, optimizer=made, backend="aot_eager")
        train(model, made, batch_of, rank, micro_steps, lambda: torchloom.no_sync(model))
    weights = full_state_dict(model)
    return max(
        (float((weights[name] - each).abs().max()) for name, each in expected.state_dict().items())
        if rank == 0
        else [0.0]
    )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_weights_are_those_of_ddp(stage: int) -> None:
    found, _ = run_ranks(2, farthest, list(KINDS), stage, "loop", 1)
    assert max(found.values()) < 2e-6, found


@pytest.mark.parametrize("stage", [2, 3])
def test_engines_accumulate(stage: int) -> None:
    found, *_ = run_ranks(
        3, farthest, ["mixture", "checkpointed", "tasks", "dropped"], stage, "engine", 2
    )
    assert max(found.values()) < 2e-6, found


@pytest.mark.parametrize("stage", [1, 3])
def test_compiled_models_run_leaf_modules_in_python(stage: int) -> None:
    kinds = ["checkpointed", "tasks", "adaptive", "mixtral", "dropped"]
    found, _ = run_ranks(2, farthest, kinds, stage, "compiled", 1)
    assert max(found.values()) < 2e-6, found


def test_backward_passes_that_do_not_count_leave_nothing() -> None:
    """One whose gradients are thrown away, and one that fails inside of the module."""

    def fn(rank):
        torch.manual_seed(3)
        model = Tasks()
        torchloom.leaf(model.heads)
        torchloom.shard_model(model, stage=3, persistence_threshold=0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        start = full_state_dict(model)

        def fails(module, args, output):
            output.register_hook(lambda grad: 1 // 0)

        def loss():
            return model(tasks_batch(rank, 0)[0], "a")

        model(tasks_batch(rank, 0)[0], "b").backward()
        optimizer.zero_grad()
        hook = model.heads.by_task["a"].register_forward_hook(fails)
        with pytest.raises(ZeroDivisionError):
            loss().backward()
        hook.remove()
        optimizer.zero_grad()
        assert not HELD and not AHEAD
        loss().backward()
        optimizer.step()
        return {n: not torch.equal(start[n], w) for n, w in full_state_dict(model).items()}

    for moved in run_ranks(2, fn):
        assert moved == {name: "by_task.b" not in name for name in moved}


def test_without_a_mark_the_error_says_what_to_mark() -> None:
    def fn(rank):
        model = torchloom.shard_model(Tasks(), stage=3, persistence_threshold=0)
        with pytest.raises(AgreementError) as caught:
            for index in range(NUM_STEPS):
                model(*tasks_batch(rank, index)).backward()
        return str(caught.value)

    for said in run_ranks(2, fn):
        assert "torchloom.leaf(module)" in said and "heads.by_task" in said


def test_what_cannot_be_marked() -> None:
    with pytest.raises(ShardError, match="marks modules"):
        torchloom.leaf("experts")

    def fn(rank):
        model = torchloom.shard_model(Tasks(), stage=3, persistence_threshold=0)
        with pytest.raises(ShardError, match="mark it before"):
            torchloom.leaf(model.trunk)

    run_ranks(2, fn)


def test_a_marked_container_stands_for_the_module_that_reads_it() -> None:
    model = nn.Sequential(nn.Linear(2, 2), Tasks())
    torchloom.leaf(model[1].heads, model[1].heads.by_task)
    assert leaves_of(model) == ["1.heads"]
    alone = nn.ModuleList([nn.Linear(2, 2)])
    torchloom.leaf(alone)
    with pytest.raises(ShardError, match="nobody calls"):
        leaves_of(alone)


def test_names_in_a_config_that_no_module_has_are_told(caplog) -> None:
    model = Tasks()
    names = LeafConfig(classes=("Tasks.Heads", "Heads"), names=("trunk", "trunks"))
    with caplog.at_level("WARNING", logger="torchloom"):
        mark_leaves(model, names)
    assert is_leaf(model.heads) and is_leaf(model.trunk) and not is_leaf(model)
    assert [each for each in ("'Tasks.Heads'", "'trunks'", "'Heads'") if each in caplog.text] == [
        "'Tasks.Heads'", "'trunks'",
    ]  # fmt: skip
