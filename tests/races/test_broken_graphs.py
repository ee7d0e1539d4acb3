"""What passes break: each mistake is an error that names the nodes, their lines and the pass."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import fx

from support.graphs import CONTEXT, captured, copy_of
from support.races import JOINT, LOWERED, OFFLOADING, Mixed
from torchloom import ops
from torchloom.errors import PassError
from torchloom.graph import GraphPass, find
from torchloom.passes import PASSES
from torchloom.pipeline.manager import PassManager
from torchloom.pipeline.report import GraphReport

aten = torch.ops.aten


def _first(gm: fx.GraphModule, op: object, num_results: int = 1) -> fx.Node:
    return next(n for n in find(gm.graph, op) if len(n.args[0]) >= num_results)


def _after(node: fx.Node, target: object, args: tuple, kwargs: dict | None = None) -> fx.Node:
    with node.graph.inserting_after(node):
        return node.graph.call_function(target, args, kwargs or {})


def _wait_of(start: fx.Node) -> fx.Node:
    return next(n for n in find(start.graph, ops.wait_) if n.args[0][0].args[0] is start)


WRONG: list[Callable[[fx.GraphModule], str]] = []


def _wrong(fn: Callable[[fx.GraphModule], str]) -> Callable[[fx.GraphModule], str]:
    """List a pass that breaks a graph; it returns a pattern of what has to be said."""
    WRONG.append(fn)
    return fn


@_wrong
def use_freed(gm: fx.GraphModule) -> str:
    node = find(gm.graph, aten.mm.default)[0]
    _after(node, ops.free_, ([node.args[0]],))
    return r"%mm_1 .* uses %tanh_backward .* after its memory was given back"


def _view(behind: fx.Node, node: fx.Node) -> fx.Node:
    return _after(behind, aten.view.default, (node, [-1]))  # without a recorded value


@_wrong
def write_by_keyword(gm: fx.GraphModule) -> str:
    start = _first(gm, ops.reduce_start)
    _after(
        start, torch.ops.torchloom_test.scale_into.default, (), {"out": start.args[0][0], "by": 2}
    )
    return f"%scale_into_default .line .* writes %mm_1 .* transfer %{start.name}"


@_wrong
def write_through_views(gm: fx.GraphModule) -> str:
    start = _first(gm, ops.reduce_start)
    view = _view(start, start.args[0][0])
    _after(view, aten.mul_.Tensor, (view, 2))
    return f"%mul__tensor .* writes %mm_1 .* transfer %{start.name}"


@_wrong
def write_as_a_method(gm: fx.GraphModule) -> str:
    start = _first(gm, ops.reduce_start)
    with gm.graph.inserting_after(start):
        gm.graph.call_method("zero_", (start.args[0][0],))
    return f"%zero_ .* writes %mm_1 .* transfer %{start.name}"


@_wrong
def write_what_a_reload_reads(gm: fx.GraphModule) -> str:
    start = _first(gm, ops.reload_start)
    host = start.args[0][0]
    _after(start, aten.zero_.default, (host,))
    return f"%zero__default .* writes %{host.name} .*transfer %{start.name}"


@_wrong
def write_an_arriving_weight(gm: fx.GraphModule) -> str:
    start = _first(gm, ops.gather_start)
    pick = next(iter(start.users))
    _after(pick, aten.mul_.Tensor, (pick, 2))
    return f"%mul__tensor .* (reads|writes) %{pick.name} .* transfer %{start.name}"


@_wrong
def write_a_resident_weight(gm: fx.GraphModule) -> str:
    start = _first(gm, ops.gather_start)
    shard = start.args[0][0]
    weight = _after(
        _wait_of(start), ops.resident, (shard, torch.float32, 2, "2x1#test", "down.weight")
    )
    view = _view(weight, weight)
    _after(view, aten.mul_.Tensor, (view, 2))
    return f"%mul__tensor .* (reads|writes) %{shard.name} .* transfer %{weight.name}"


@_wrong
def wait_for_one_of_a_bucket(gm: fx.GraphModule) -> str:
    wait = _wait_of(_first(gm, ops.gather_start, 3))
    wait.args = (wait.args[0][:1], *wait.args[1:])
    return f"%{wait.name} .line .* waits for no transfer"


@_wrong
def wait_for_a_copy_as_for_a_gather(gm: fx.GraphModule) -> str:
    wait = _wait_of(_first(gm, ops.reload_start))
    wait.kwargs = {"results": wait.args[0], "inputs": wait.args[1], "handle": "2x1#test"}
    wait.args = ()
    return f"%{wait.name} .line .* waits for no transfer"


@_wrong
def read_by_a_view_without_value(gm: fx.GraphModule) -> str:
    start = _first(gm, ops.gather_start)
    pick = [*start.users][-1]
    view = _view(pick, pick)
    _after(view, aten.neg.default, (view,))
    return (
        rf"%neg_default .line .* reads %{pick.name} .* before transfer %{start.name} .line \d+. has"
    )


@_wrong
def drop_a_reduction(gm: fx.GraphModule) -> str:
    start = _first(gm, ops.sync_start, 5)
    start.graph.output_node().replace_input_with(next(iter(start.users)), start.args[0][0])
    return "gradient %sum_1 .line .* of 'down.bias' is not returned by return .line"


@_wrong
def reduce_zeros(gm: fx.GraphModule) -> str:
    start = _first(gm, ops.reduce_start)
    grads = list(start.args[0])
    with gm.graph.inserting_before(start):
        grads[1] = gm.graph.call_function(aten.zeros_like.default, (grads[1],))
    start.args = (grads, *start.args[1:])
    _wait_of(start).args = (_wait_of(start).args[0], grads, start.args[-1])
    return f"gradient %mm_3 .line .* of 'up.weight' is not reduced exactly once, see %{start.name} "


@_wrong
def zero_behind_the_wire(gm: fx.GraphModule) -> str:
    wait = _wait_of(_first(gm, ops.reduce_start))
    _after(wait, aten.zero_.default, (wait.args[0][2],))
    return "of 'gate.weight' is not returned by return"


@_wrong
def swap_gradients(gm: fx.GraphModule) -> str:
    start = _first(gm, ops.reduce_start)
    first, second, third = start.args[0]
    start.args = ([first, third, second], *start.args[1:])
    return "of 'gate.weight' is not reduced exactly once|of 'up.weight' is not reduced exactly once"


@_wrong
def reduce_twice(gm: fx.GraphModule) -> str:
    start = _first(gm, ops.reduce_start)
    grads, params, numels, *rest = start.args
    with gm.graph.inserting_after(_wait_of(start)):
        again = gm.graph.call_function(ops.reduce, (grads[0], numels[0], *rest, params[0]))
    pick = next(iter(start.users))
    total = _after(again, aten.add.Tensor, (pick, again))
    gm.graph.output_node().replace_input_with(pick, total)
    return "of 'down.weight' is not reduced exactly once"


@pytest.fixture(scope="module")
def backward() -> fx.GraphModule:
    return captured(Mixed(), [torch.randn(5, 7)], JOINT, options=OFFLOADING)["backward"]


@pytest.fixture(scope="module")
def scale_into():
    library = torch.library.Library("torchloom_test", "DEF")
    library.define("scale_into(*, Tensor(a!) out, float by) -> ()")
    yield
    library._destroy()


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_what_a_pass_breaks_is_an_error_that_names_nodes_lines_and_the_pass(
    backward, scale_into, wrong, tmp_path
) -> None:
    gm, told = copy_of(backward), []

    def mine(gm: fx.GraphModule, ctx: object) -> int:
        told.append(wrong(gm))
        return 0  # what passes count is not relied on

    passes = [PASSES[name] for name in LOWERED]
    passes.insert(2, GraphPass(name="mine", fn=mine, stage="lowered"))
    with pytest.raises(PassError, match="graph 'g' is wrong after pass 'mine'") as caught:
        PassManager(passes, tmp_path).run(gm, CONTEXT, "g", GraphReport("g", 0, "", ""))
    sentence, *lines = str(caught.value).splitlines()
    assert re.search(told[0], sentence), sentence
    assert (tmp_path / "g.03.mine.txt").read_text().splitlines() == lines
    for name, line in re.findall(r"(%\w+|return) \(line (\d+)\)", sentence):
        assert lines[int(line) - 1].startswith(f"{name} ")
