"""Equal layers in engines: how often anything is done, where transfers stand, and who is given whole graphs."""

from __future__ import annotations

import contextlib
import operator
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import fx, nn

from support import zoo
from support.pool import run_ranks
from support.runs import ADAMW, SGD, micro_step, sharded
from torchloom.graph import GraphPass, PassContext
from torchloom.regions import body, halves

LAYERS = 4
LETTERS = {
    "gather_start": "G",
    "reduce_start": "R",
    "wait_": "w",
    "region": "L",
    "region_backward": "L",
}


class Deep(nn.Module):
    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
            for _ in range(layers)
        )

    def forward(self, x):
        x = x + 0.0 * self.layers[0][1].weight.sum()
        for each in self.layers:
            x = x + each(x)
        return x.square().mean()


def llama(layers: int = LAYERS) -> Any:
    return zoo.llama(layers=layers, dim=32, kv_heads=4)


def deep(seed: int = 0, layers: int = LAYERS) -> Any:
    torch.manual_seed(seed)
    return Deep(layers), (torch.ones(2, 8),)


def engine_of(
    make: Callable[[], Any], backend: str = "aot_eager", passes: Any = None, **options: Any
) -> Any:
    torch.manual_seed(0)
    model, batch = make()
    buckets = {
        "allgather_bucket_size": 5000,
        "reduce_bucket_size": 5000,
        "stage3_prefetch_bucket_size": 10000,
    }
    compiling = {"strict": True, **options}
    engine = sharded(model, batch=2, optimizer=ADAMW, zero=buckets, compile=compiling)
    engine.compile(backend=backend, passes=passes)
    return engine, batch


@contextlib.contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Count traces and splits of bodies, and graphs that Inductor lowers."""
    from torch._inductor.graph import GraphLowering, SubgraphLowering

    counts = {"traces": 0, "splits": 0, "graphs": 0, "bodies": 0}

    def counting(name: str, function: Any) -> Any:
        def count(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return function(*args, **kwargs)

        return count

    init, sub_init = GraphLowering.__init__, SubgraphLowering.__init__
    with (
        mock.patch.object(body, "trace_part", counting("traces", body.trace_part)),
        mock.patch.object(body, "split_body", counting("splits", halves.split_body)),
        mock.patch.object(GraphLowering, "__init__", counting("graphs", init)),
        mock.patch.object(SubgraphLowering, "__init__", counting("bodies", sub_init)),
    ):
        yield counts


def test_a_body_is_traced_once_split_once_and_lowered_twice() -> None:
    def run(rank: int, folder: str) -> Any:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/{rank}"
        with counted() as counts:
            engine, batch = engine_of(deep, "inductor")
            session, phases = engine._compiled.session, []
            tell = session.tell_phase

            def note(name: str, graph: str) -> None:
                tell(name, graph)
                phases.append(name)
                assert (session.report.phase is None) == (name == "")

            with mock.patch.object(session, "tell_phase", note):
                losses = [micro_step(engine, *batch) for _ in range(2)]
        report = engine.compile_report()
        (graph,) = report.graphs
        assert report.fallbacks == []
        assert (len(graph.regions), graph.num_calls) == (1, LAYERS)
        assert report.phase is None
        return losses, counts, graph.from_cache, phases

    with tempfile.TemporaryDirectory() as folder:
        cold = run_ranks(1, run, folder, timeout_s=300)
        warm = run_ranks(1, run, folder, timeout_s=300)
    for first, (again, no_counts, is_warm, _) in zip(cold, warm, strict=True):
        losses, counts, from_cache, phases = first
        # Two whole graphs and two bodies; a subgraph is a graph as well.
        assert counts == {"traces": 1, "splits": 1, "graphs": 4, "bodies": 2}
        assert not any(no_counts.values())
        assert losses == again
        assert (from_cache, is_warm) == (False, True)
        # Forward, then backward: each lowers the layer when it comes to the first call.
        assert phases == ["trace", *2 * ["rest", "layer", "rest", ""]]


def test_inductor_lowers_as_many_nodes_for_many_layers_as_for_few() -> None:
    def lowered(layers: int) -> int:
        """Return how many operators Inductor lowers outside of bodies."""
        from torch._inductor.graph import GraphLowering, SubgraphLowering

        call, count = GraphLowering.call_function, 0

        def counting(self: Any, target: Any, *args: Any) -> Any:
            nonlocal count
            count += not isinstance(self, SubgraphLowering) and target is not operator.getitem
            return call(self, target, *args)

        with mock.patch.object(GraphLowering, "call_function", counting):
            engine, batch = engine_of(lambda: deep(layers=layers), "inductor")
            micro_step(engine, *batch)
        return count

    def run(rank: int, folder: str) -> Any:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/{rank}"
        return lowered(5), lowered(9)

    with tempfile.TemporaryDirectory() as folder:
        for few, many in run_ranks(2, run, folder, timeout_s=300):
            assert 0 < many <= few


def schedule(folder: str, kind: str) -> str:
    (last,) = [max(Path(folder).glob(f"graph0.{kind}.*.txt"))]
    found = re.findall(r"= torchloom\.(\w+)\(", last.read_text())
    return "".join(LETTERS.get(each, "?") for each in found)


def test_gathers_run_ahead_of_layers_and_reductions_behind_them(golden: Any) -> None:
    def run(rank: int, folder: str) -> None:
        engine, batch = engine_of(lambda: llama(6), dump_graphs=folder)
        micro_step(engine, *batch)
        (region,) = engine.compile_report().graphs[0].regions
        assert region.layers == tuple(f"blocks.{n}" for n in range(6))

    with tempfile.TemporaryDirectory() as folder:
        run_ranks(2, run, folder)
        text = "".join(f"{kind:9}{schedule(folder, kind)}\n" for kind in ("forward", "backward"))
    golden("regions.schedule", text)


def test_passes_of_users_see_whole_graphs_unless_they_say_otherwise() -> None:
    def run(rank: int) -> None:
        for sees_regions in (False, True):
            torch._dynamo.reset()
            seen: list[int] = []

            def count(gm: fx.GraphModule, ctx: PassContext, seen: list[int] = seen) -> int:
                seen.append(sum("mm" in str(node.target) for node in gm.graph.nodes))
                return 0

            own = GraphPass(name="count", fn=count, stage="joint", sees_regions=sees_regions)
            engine, batch = engine_of(deep, passes=["z3", own])
            micro_step(engine, *batch)
            (graph,) = engine.compile_report().graphs
            assert bool(graph.regions) == sees_regions
            if sees_regions:
                assert max(seen) < 2 * LAYERS
            else:
                assert min(seen) >= 2 * LAYERS
                assert graph.flat_because == ("pass 'count' sees whole graphs",)

    run_ranks(2, run)


def test_calls_without_gradients_run_the_same_layers() -> None:
    def run(rank: int) -> None:
        found = []
        for regions in (False, True):
            torch._dynamo.reset()
            engine, batch = engine_of(deep, regions=regions)
            values = []
            for _ in range(2):
                with torch.no_grad():
                    values.append(engine(*batch).item())
                values.append(micro_step(engine, *batch))
            found.append(values)
            calls = [len(e.layers) for g in engine.compile_report().graphs for e in g.regions]
            assert calls == ([LAYERS, LAYERS] if regions else [])
        assert found[0] == found[1]

    run_ranks(2, run)


def test_two_engines_of_one_process_have_bodies_of_one_name() -> None:
    def run(rank: int) -> None:
        losses = []
        for seed in (0, 1):
            engine, batch = engine_of(lambda seed=seed: deep(seed))
            losses.append((engine, [micro_step(engine, *batch)]))
        for engine, own in losses:
            own.append(micro_step(engine, *batch))
            assert own[1] < own[0]
            assert [len(e.layers) for g in engine.compile_report().graphs for e in g.regions] == [4]

    run_ranks(2, run)


def test_weights_under_autocast_are_gathered_in_the_lower_dtype() -> None:
    """A cast inside of a layer must not make its weights travel in fp32."""

    def run(rank: int, folder: str) -> Any:
        found = []
        for regions in (False, True):
            torch._dynamo.reset()
            torch.manual_seed(0)
            model, batch = zoo.llama(layers=LAYERS, dim=32, kv_heads=4)
            dumps = {"strict": True, "regions": regions, "dump_graphs": f"{folder}/{regions}"}
            autocast = {"enabled": True, "dtype": "bfloat16"}
            engine = sharded(
                model, optimizer=SGD, backend="aot_eager", torch_autocast=autocast, compile=dumps
            )
            losses = [micro_step(engine, *batch) for _ in range(2)]
            with torch.no_grad():
                losses.append(engine(*batch).item())
            report = engine.compile_report()
            calls = [len(each.layers) for graph in report.graphs for each in graph.regions]
            assert calls == ([LAYERS, LAYERS] if regions else [])
            found.append(losses)
        assert found[0] == found[1]

    def gathered(folder: str, name: str) -> dict[str, int]:
        text = max(Path(folder).glob(f"{name}.*.txt")).read_text()
        results = re.findall(r"%\w+_flat\w* : (\w+)\[(\d+)\] = getitem", text)
        sizes = {dtype: 0 for dtype, _ in results}
        for dtype, size in results:
            sizes[dtype] += int(size)
        return sizes

    with tempfile.TemporaryDirectory() as folder:
        run_ranks(2, run, folder)
        for name in ("graph0.forward", "graph0.backward", "graph1.inference"):
            flat, found = (gathered(f"{folder}/{regions}", name) for regions in (False, True))
            assert flat["bf16"] > flat.get("f32", 0)
            if name != "graph0.backward":  # which the reductions' results are in as well
                assert found == flat
