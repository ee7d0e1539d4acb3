"""Schedules and custom passes in an engine on two ranks: what runs is what was scheduled."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

import torchloom
from support.models import tokens, tricky
from support.pool import run_ranks
from support.runs import make_engine, settings, train
from torchloom import PassContract
from torchloom.errors import AgreementError, ConfigError, PassError, PassOrderError
from torchloom.graph import GraphPass, find
from torchloom.shard import local_shard


def keep_all(graph, graph_id, param_manager, bwd, nz3):
    """A pass of DeepCompile's form that keeps every weight gathered."""
    if bwd:
        for ds_id in param_manager[graph_id].ds_ids.values():
            nz3.set_persistent(ds_id)
    return graph


def same(gm, ctx):
    return 0


def starts(engine, name="gather"):
    graph = engine.compile_report().graphs[-1]
    return {kind: graph.collectives.get(f"{kind} torchloom.{name}", 0) for kind in BOTH}


BOTH = ("forward", "backward")


def test_switching_loses_nothing_and_other_functions_keep_their_entries() -> None:
    def fn(rank):
        def scaled(x):
            return x * 3

        other = torch.compile(scaled, backend="eager")
        other(torch.ones(2))
        config = {"gradient_accumulation_steps": 2, "gradient_clipping": 0.5}
        config["fp16"] = {"enabled": True, "initial_scale_power": 4}
        plain, model = make_engine(3, **config)
        plain.compile(backend="aot_eager")
        expected = train(plain, rank, 5)
        engine, switched = make_engine(3, **config)
        schedule = [(0, ["zero3_compile"]), (2, ["zero3_compile", "prefetch", same, "bucket"])]
        engine.compile(backend="aot_eager", schedule=[*schedule, (3, schedule[1][1])])
        rng = torch.get_rng_state()
        losses = train(engine, rank, 5)
        assert torch.equal(rng, torch.get_rng_state())
        weights = zip(model.parameters(), switched.parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in weights)
        assert engine.loss_scale == plain.loss_scale
        names = [
            [each.name for each in graph.passes if each.graph.endswith("forward")]
            for graph in engine.compile_report().graphs
        ]
        base = ["symmetric_gathers", "place"]
        bucketed = [*base, "bucket"]
        assert names == [bucketed, [*bucketed, "prefetch", "same"]]  # step 3: no change
        assert [g.graph_id for g in engine.compile_report().graphs] == [0, 0]
        kinds = [entry[:3] for entry in engine.get_compile_time()]
        assert kinds == [("fwd", 0, 0), ("bwd", 0, 0), ("fwd", 1, 0), ("bwd", 1, 0)]
        assert all(entry[3] > 0 for entry in engine.get_compile_time())
        assert len(torchloom.entries(other)) == 1
        return losses, expected

    for losses, expected in run_ranks(2, fn):
        assert losses == expected


@pytest.mark.parametrize("stage", [2, 3])
def test_residents_are_gathered_once_per_optimizer_step(stage: int) -> None:
    def fn(rank):
        config = {"gradient_accumulation_steps": 4, "optimizer": ADAMW_FUSED}
        plain, _ = make_engine(stage, **config)
        plain.compile(backend="aot_eager")
        expected = train(plain, rank, 3)
        before = plain.comm_stats().num_collectives
        expected += train(plain, rank, 1, first=3)
        usual = plain.comm_stats().num_collectives - before
        engine, model = make_engine(stage, **config)
        engine.register_compile_pass("keep_all", keep_all, PassContract(requires={"transfers"}))
        names = [each.name for each in torchloom.pipeline.resolve_passes(stage)]
        engine.compile(backend="aot_eager", passes=[*names, "keep_all"])
        losses = train(engine, rank, 3)
        before = engine.comm_stats().num_collectives
        losses += train(engine, rank, 1, first=3)
        used = engine.comm_stats().num_collectives - before
        assert len(engine.compile_report().graphs) == 2  # captured, and again with residents
        assert starts(engine, "gather_start") == {"forward": 0, "backward": 0}
        assert starts(engine, "resident") == {"forward": 4, "backward": 4}
        held = engine.world.comm.residents.num_bytes
        assert held == 4 * sum(2 * spec.shard_numel for spec in layout_of(model).sharded)
        engine.destroy()
        assert engine.world.comm.residents.num_bytes == 0
        return losses, expected, usual, used

    for losses, expected, usual, used in run_ranks(2, fn):
        assert losses == expected
        num_gathers = 2 if stage == 3 else 1
        assert usual - used == 4 * num_gathers - 1  # one bucket of gathers in all


def test_residents_follow_weights_that_change_otherwise(tmp_path) -> None:
    def fn(rank):
        engine, model = make_engine(3)
        names = [each.name for each in torchloom.pipeline.resolve_passes(3)]
        engine.compile(backend="aot_eager", passes=[*names, keep_all])
        train(engine, rank, 2)
        engine.save_checkpoint(tmp_path)
        ids = tokens(50, rank)
        with torch.no_grad():
            saved = engine(ids).item()
            train_loss = train_once(engine, rank)
            moved = engine(ids).item()
            engine.load_checkpoint(tmp_path)
            loaded = engine(ids).item()
            with torchloom.shard.gathered(model, ["up.weight"], modifier_rank=0):
                model.up.weight.mul_(3)
            tripled = engine(ids).item()
            state = model.state_dict()
            state["up.weight"] = state["up.weight"] / 3
            model.load_state_dict(state)
            restored = engine(ids).item()
        assert train_loss > 0
        assert len({saved, moved, tripled}) == 3
        assert loaded == saved
        assert restored == pytest.approx(saved, rel=1e-6)
        engine.destroy()
        reference = model(ids).item()
        return restored, reference

    for compiled, eager in run_ranks(2, fn):
        assert compiled == pytest.approx(eager, rel=1e-6)


def train_once(engine, rank):
    with torch.enable_grad():
        return train(engine, rank, 1, first=70)[0]


def test_a_run_resumed_later_gets_the_entry_that_is_due(tmp_path) -> None:
    def fn(rank):
        schedule = [(1, ["zero3_compile"]), (2, ["zero3", "place", "prefetch"])]
        first, _ = make_engine(3)
        first.compile(backend="aot_eager", schedule=schedule)
        assert "prefetch" in lowered(first, rank, 1)  # the preset, before the first entry
        assert "prefetch" not in lowered(first, rank, 1)
        train(first, rank, 1)
        first.save_checkpoint(tmp_path)
        resumed, _ = make_engine(3)
        resumed.compile(backend="aot_eager", schedule=schedule)
        resumed.load_checkpoint(tmp_path)
        assert lowered(resumed, rank, 1) == ["place", "prefetch"]
        loaded, _ = make_engine(3)
        loaded.load_checkpoint(tmp_path)
        loaded.compile(backend="aot_eager", schedule=schedule)
        return lowered(loaded, rank, 1)

    assert run_ranks(2, fn)[0] == ["place", "prefetch"]


def lowered(engine, rank, steps):
    train(engine, rank, steps)
    graph = engine.compile_report().graphs[-1]
    return [each.name for each in graph.passes if each.graph.endswith("forward")]


class Broken(nn.Module):
    """Three fragments, with a frozen layer in the first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(9, 9, bias=False) for _ in range(3)])
        self.layers[0].weight.requires_grad_(False)

    def forward(self, x):
        first, second, third = self.layers
        x = first(x).tanh()
        torch._dynamo.graph_break()
        x = second(x).tanh()
        torch._dynamo.graph_break()
        return third(x).square().mean()


def test_every_fragment_is_seen_forward_and_backward() -> None:
    seen = []

    def look(
        gm,
        graph_id,
        graph_order,
        profiling_results,
        create_inputs_fn,
        mem_budget,
        param_manager,
        bwd,
    ):
        manager, profile = param_manager[graph_id], profiling_results[graph_id]
        (name,) = manager.param_names
        param = manager.params[name]
        facts = {"id": graph_id, "bwd": bwd, "order": list(graph_order), "of": param.full_name}
        facts |= {"shape": tuple(param.shape), "numel": param.numel, "budget": mem_budget}
        facts |= {"gather": param.allgather_node is not None, "ds_id": manager.ds_ids[name]}
        facts["release"] = param.release_node.name if param.release_node else None
        facts["num_inputs"] = len(create_inputs_fn())
        facts["persist"] = (param.param.ds_persist, param.param.ds_shape, param.param.requires_grad)
        facts["outputs"] = profile.num_fwd_outputs
        facts["complete"] = profile.fwd_mem_complete, profile.bwd_mem_complete
        if bwd:
            inputs, grads = manager.get_bwd_mapping(gm.graph)
            facts["grads"] = [node.name for node in grads.values()], len(inputs)
        seen.append(facts)

    def fn(rank):
        torch.manual_seed(0)
        model = Broken()
        config = settings(3, compile={"memory_budget": "3MB"})
        engine, *_ = torchloom.initialize(model=model, config=config)
        engine.compile(backend="aot_eager", passes=["zero3_compile", look, "bucket"])
        loss = engine(torch.randn(4, 9))
        engine.backward(loss)
        engine.step()
        return seen

    facts = run_ranks(2, fn)[0]
    forward = [each for each in facts if not each["bwd"]]
    backward = [each for each in facts if each["bwd"]]
    assert [each["of"] for each in forward] == [f"layers.{i}.weight" for i in range(3)]
    assert [each["ds_id"] for each in forward] == [0, 1, 2]
    ids = [each["id"] for each in forward]
    assert ids == [0, 1, 2]
    assert all(each["shape"] == (9, 9) and each["numel"] == 81 for each in facts)
    assert [each["budget"] for each in facts] == [3e6] * 5
    assert [each["num_inputs"] for each in facts] == [2] * 3 + [4, 3]
    assert all(each["gather"] and each["release"] for each in forward)
    assert all(each["persist"][:2] == (False, (9, 9)) for each in facts)
    assert [each["persist"][2] for each in forward] == [False, True, True]
    assert all(each["outputs"] == 1 for each in facts)
    # The last fragment's backward comes first, the first one is frozen and has none.
    assert [each["id"] for each in backward] == [2, 1]
    assert all(each["order"] == [(0, False), (1, True), (2, True)] for each in backward)
    assert all(each["complete"] == (True, True) for each in backward)
    assert all(len(each["grads"][0]) == 1 for each in backward)


def doubles_the_loss(graph, bwd):
    """Changes what is computed, to see that what is edited is what runs."""
    if bwd:
        return graph
    output = graph.output_node()
    first = output.args[0][0]
    with graph.inserting_before(output):
        twice = graph.call_function(torch.ops.aten.mul.Tensor, (first, 2.0))
    output.args = ((twice, *output.args[0][1:]),)
    return graph


def doubles_gradients(graph, bwd, param_manager, graph_id):
    if not bwd:
        return None
    for node in find(graph, torchloom.ops.reduce_start):
        (grad,) = node.args[0]
        with graph.inserting_before(node):
            twice = graph.call_function(torch.ops.aten.mul.Tensor, (grad, 2.0))
        node.replace_input_with(grad, twice)
        (wait,) = [user for user in twice.users if user is not node] or [None]
        for other in find(graph, torchloom.ops.wait_):
            other.replace_input_with(grad, twice)
        assert wait is None
    return graph


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_edits_appear_in_forward_and_backward(backend: str) -> None:
    def fn(rank):
        torch.manual_seed(0)
        found = []
        for own in ((), (doubles_the_loss, doubles_gradients)):
            torch.manual_seed(0)
            model = nn.Linear(6, 5, bias=False)
            engine, *_ = torchloom.initialize(model=model, config=settings(3))
            engine.compile(backend=backend, passes=["zero3_compile", *own])
            out = engine(torch.linspace(-1, 1, 12).view(2, 6))
            loss = out.square().sum()
            loss.backward()
            found.append((out.detach(), local_shard(model._parameters["weight"].grad)))
        return found

    for (out, grad), (twice, four) in run_ranks(2, fn, timeout_s=300):
        assert torch.allclose(2 * out, twice)
        assert torch.allclose(4 * grad, four)  # twice the loss's slope, twice by the pass


def test_what_is_refused_before_anything_runs() -> None:
    def fn(rank):
        engine, _ = make_engine(3)
        with pytest.raises(PassOrderError, match="step 4: pass 'bucket' needs 'transfers'"):
            engine.compile(schedule=[(0, ["zero3_compile"]), (4, ["bucket"])])
        with pytest.raises(ConfigError, match="both passes= and schedule="):
            engine.compile(schedule=[(0, [])], passes=[])
        with pytest.raises(PassError, match="'colour'"):
            engine.register_compile_pass("mine", lambda graph, colour: graph)
        assert not engine.is_compiled
        assert not engine.is_deepcompile_active()
        assert engine.get_compile_time() == []
        native = torchloom.shard_model(tricky(), persistence_threshold=20)
        names = [each.name for each in torchloom.pipeline.resolve_passes(3)]
        session = torchloom.compile(
            native, backend="aot_eager", passes=[*names, keep_all], strict=True
        )
        loss = native(tokens(0, rank))
        with pytest.raises(PassError, match="needs an engine"):
            loss.backward()
        assert session.report.graphs
        return True

    assert run_ranks(2, fn) == [True, True]


def test_ranks_whose_passes_differ_are_told() -> None:
    def fn(rank):
        def lopsided(graph, profiling_results):
            if torch.distributed.get_rank() == 1:  # what no key can know
                doubles_the_loss(graph, False)
            return graph

        engine, _ = make_engine(3)
        engine.compile(backend="aot_eager", passes=["zero3_compile", lopsided])
        with pytest.raises(AgreementError, match=r"rank 1 wove graph0\.forward into"):
            for step in range(3000):
                train(engine, rank, 1, first=step)
                time.sleep(0.1)

    run_ranks(2, fn)


def test_config_schedules_passes_of_the_process() -> None:
    def fn(rank):
        torchloom.register_compile_pass(
            "mine", lambda graph, mem_budget: budgets.append(mem_budget)
        )
        budgets: list[float] = []
        entry = [1, ["zero3_compile", ["mine", "2KB"], "mine_too"]]
        own = GraphPass(name="any", fn=same, stage="joint")
        torchloom.register_compile_pass("mine_too", own)
        options = {"enabled": True, "backend": "aot_eager", "schedule": [entry]}
        engine, _ = make_engine(3, compile=options)
        train(engine, rank, 2)
        return budgets

    assert run_ranks(2, fn)[0] == [2000.0, 2000.0]


ADAMW_FUSED = {"type": "AdamW", "params": {"lr": 1e-2, "fused": True}}
layout_of = torchloom.shard.layout_of
