"""Every signature that a pass may have, and what its arguments hold."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from support.graphs import CONTEXT, TwoLayers, apply, captured, copy_of
from torchloom import ops
from torchloom.deepcompile.forms import DOCUMENTED, NAMES, adapt
from torchloom.deepcompile.profile import Account, memory_of
from torchloom.deepcompile.site import Book, Spot
from torchloom.errors import PassError
from torchloom.graph import find
from torchloom.passes import PASSES


def small_graph() -> fx.GraphModule:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.ones(3)
    y = graph.call_function(torch.ops.aten.sin.default, (x,))
    y.meta["val"] = torch.ones(3)
    graph.output((y,))
    return fx.GraphModule({}, graph)


def spot() -> Spot:
    book = Book(optimizer="optimizer")
    return Spot(book, book.page("digest"), 2, 777)


def run(fn, gm=None):
    gm = gm or small_graph()
    return adapt("mine", fn).at(spot().argument)(gm, CONTEXT), gm


def sine_to_cosine(graph):
    for node in list(graph.nodes):
        if node.target is torch.ops.aten.sin.default:
            with graph.inserting_before(node):
                cos = graph.call_function(torch.ops.aten.cos.default, node.args)
            node.replace_all_uses_with(cos)
            graph.erase_node(node)
    return graph


def documented(
    graph,
    graph_id,
    graph_order,
    profiling_results,
    mem_budget,
    param_manager,
    bwd,
    ds_optimizer,
    nz3,
):
    assert (graph_id, bwd, ds_optimizer) == (0, False, "optimizer")
    assert mem_budget == 777.0
    assert graph_order == [(0, False)]
    assert list(profiling_results) == [0]
    assert nz3.is_profiling() is False
    assert param_manager == {}
    return sine_to_cosine(graph)


def current(
    gm, graph_id, graph_order, profiling_results, create_inputs_fn, mem_budget, param_manager, bwd
):
    assert [tuple(value.shape) for value in create_inputs_fn()] == [(3,)]
    sine_to_cosine(gm.graph)
    return gm


def shuffled(bwd, nz3, *, graph, window=3):
    assert window == 3
    return sine_to_cosine(graph)


def in_another_graph(graph):
    return sine_to_cosine(copy_of(fx.GraphModule({}, graph)).graph)


def everything(**given):
    assert set(given) == set(NAMES)
    return sine_to_cosine(given["graph"])


def nine_unnamed(a, b, c, d, e, f, g, h, i, /):
    assert len(DOCUMENTED) == 9
    return sine_to_cosine(a)


def other_names(gm, gid, order, profiles, inputs, budget, manager, backward, verbose=False):
    assert (gid, order, budget, backward, verbose) == (0, [(0, False)], 777.0, False, False)
    assert torch.equal(torch.fx.Interpreter(gm).run(*inputs())[0], torch.full((3,), 0.5).sin())
    sine_to_cosine(gm.graph)


def own(gm, ctx):
    sine_to_cosine(gm.graph)
    return 1


@pytest.mark.parametrize(
    "fn",
    [
        *(documented, current, shuffled, in_another_graph, everything),
        *(nine_unnamed, other_names, own, lambda bwd, graph: sine_to_cosine(graph)),
    ],
)
def test_each_form_gets_its_arguments_and_its_edits_stay(fn):
    num_edits, gm = run(fn)
    gm.recompile()
    x = torch.linspace(-2, 2, 3)
    assert num_edits > 0
    assert torch.equal(gm(x)[0], x.cos())


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (lambda graph, profiling_result: graph, "'profiling_result'.*did you mean"),
        (lambda graph, mem_budgt=0: graph, "'mem_budgt'.*'mem_budget'"),
        (lambda graph, colour: graph, "'colour'.*known: gm"),
        (lambda a, b, c, /: a, "'a'.*known: gm"),
        (lambda *given: given[0], "tells no arguments"),
        (3, "is a int: register a function"),
    ],
)
def test_a_signature_that_is_none_is_refused_by_name(fn, words):
    with pytest.raises(PassError, match=words):
        adapt("mine", fn)


def test_an_operator_of_deepspeed_is_named():
    def counts_gathers(gm, bwd):
        return sum(node.target is torch.ops.dc.allgather_param.default for node in gm.graph.nodes)

    with pytest.raises(PassError, match=r"torch\.ops\.dc\.allgather_param .*torchloom\.ops\.match"):
        run(counts_gathers)


def test_a_deepcompile_pass_needs_a_session():
    with pytest.raises(PassError, match="compile session"):
        adapt("mine", documented)(small_graph(), CONTEXT)
    assert adapt("mine", own)(small_graph(), CONTEXT) == 1


def test_nz3_refuses_by_name():
    handle = Book().handle(777.0)
    with pytest.raises(PassError, match=r"nz3\.enable_profiling.*profiling_results"):
        handle.enable_profiling(True)
    with pytest.raises(AttributeError, match="no method 'fly'"):
        handle.fly()
    with pytest.raises(PassError, match="no parameter has id 3"):
        handle.set_persistent(3)


def test_memory_and_times_of_a_graph_with_transfers():
    gm = captured(TwoLayers(), [torch.randn(4, 6)], ["zero3"])["forward"]
    apply(gm, ["place"])
    memory = memory_of(gm.graph, Account(), 0)
    alive = 0
    for _, after, delta, peak in memory:
        assert alive + delta == after
        assert peak >= max(alive, after)
        alive = after
    site = spot()
    profiles = site.argument("profiling_results", gm, CONTEXT)
    times = {name: ms for name, ms, _ in profiles[0].fwd_time}
    starts = find(gm.graph, ops.gather_start)
    assert starts
    assert all(times[node.name] > 0 for node in starts)
    assert all(node.meta["device_time"] == times[node.name] for node in gm.graph.nodes)
    sizes = dict(profiles[0].fwd_tensor_sizes)
    assert sizes[starts[0].name] == 48 * 4
    assert PASSES["place"].name == "place"
