"""What a pass of somebody else breaks is found before it runs, strict or not, by any backend, whatever caches hold."""

from __future__ import annotations

import pytest
import torch

from support.pool import run_ranks
from support.runs import make_engine, train
from torchloom import ops
from torchloom.graph import GraphPass, args_of, find


def drop_a_wait(gm, ctx) -> int:
    """Forget the first wait of forward."""
    if not ctx.is_backward:
        gm.graph.erase_node(find(gm.graph, ops.wait_)[0])
    return 0


def zero_gradients(graph, bwd):
    """Zero gradients on their way, in DeepCompile's form; only of backward."""
    for start in find(graph, ops.reduce_start) if bwd else ():
        with graph.inserting_before(start):
            zeros = [graph.call_function(torch.zeros_like, (each,)) for each in args_of(start)[0]]
        wait = next(
            each for each in find(graph, ops.wait_) if args_of(each)[1] == args_of(start)[0]
        )
        wait.args = (args_of(wait)[0], zeros, args_of(wait)[2])
        start.args = (zeros, *start.args[1:])
    return graph


def drop_a_reduction(gm, ctx) -> int:
    """Return a gradient of this rank alone, in a joint graph."""
    node = find(gm.graph, ops.sync)[0]
    node.replace_all_uses_with(args_of(node)[0])
    gm.graph.erase_node(node)
    return 1


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_wrong_graph_never_runs_and_is_never_cached(backend: str) -> None:
    """Without `strict` a graph runs eagerly; one that is woven when backward already runs is an error in any case."""
    forward = GraphPass(name="drop_a_wait", fn=drop_a_wait, stage="lowered")
    joint = GraphPass(name="drop_a_reduction", fn=drop_a_reduction, stage="joint")

    def fn(rank):
        def run(passes, strict):
            engine, _ = make_engine(compile={"deepcompile": True, "strict": strict})
            engine.compile(backend=backend, passes=passes)
            try:
                return train(engine, rank, 1), engine.compile_report().fallbacks[0]
            except Exception as error:  # noqa: BLE001  Dynamo may wrap it
                return None, str(error)

        plain, _ = make_engine()
        results = [train(plain, rank, 1)]
        results += [run(["zero3", "place", forward], strict) for strict in (False, True)]
        results += [run(["zero3", "place", zero_gradients], False)]
        if backend == "aot_eager":
            results += [run([joint, "zero3", "place"], False)]
        return results

    for expected, woven, strict, backward, *before in run_ranks(2, fn):
        assert woven[0] == pytest.approx(expected, rel=1e-6)
        for _, text in (woven, strict):
            assert "graph 'graph0.forward' is wrong after pass 'drop_a_wait': %embedding (" in text
        words = "graph 'graph0.backward' is wrong after pass 'zero_gradients': gradient %mm_1 ("
        assert strict[0] is backward[0] is None
        assert words in backward[1]
        for losses, text in before:
            assert losses == pytest.approx(expected, rel=1e-6)
            assert "graph 'graph0.joint' is wrong after pass 'drop_a_reduction': gradient %" in text


def halve(gm, ctx, *, names_them: bool) -> int:
    """Halve gradients before they are sent, and give the new nodes the values of the old ones."""
    starts = find(gm.graph, ops.reduce_start)
    for start in starts:
        wait = next(
            each for each in find(gm.graph, ops.wait_) if args_of(each)[1] == args_of(start)[0]
        )
        halves = []
        for grad in args_of(start)[0]:
            with gm.graph.inserting_before(start):
                halves.append(gm.graph.call_function(torch.ops.aten.mul.Tensor, (grad, 0.5)))
            halves[-1].meta["val"] = grad.meta["val"]
        start.args = (halves, *start.args[1:])
        if names_them:
            wait.args = (args_of(wait)[0], halves, args_of(wait)[2])
    return len(starts)


def test_values_of_other_nodes_are_not_their_memory() -> None:
    def fn(rank):
        found = []
        for names_them in (True, False):
            halving = GraphPass(name="halve", fn=halve, stage="lowered")
            engine, _ = make_engine()
            passes = ["zero3", "place", halving.with_options(names_them=names_them)]
            engine.compile(backend="aot_eager", passes=passes)
            try:
                train(engine, rank, 1)
                found.append("")
            except Exception as error:  # noqa: BLE001  Dynamo may wrap it
                found.append(str(error))
        return found

    for right, wrong in run_ranks(2, fn):
        assert right == ""
        assert "while transfer %reduce_start" in wrong and "name its inputs in the wait" in wrong
