"""Losses that never make all of their logits: the end of a model, computed a few rows at a time.

```text
before   z = linear(h, w)   z = tanh(z / 30) * 30   z = z.float().view(-1, V)   cross_entropy(z, y)
after    chunked_loss(h.reshape(-1, D), w, None, y, 1 / 30, 30, ...)[0]         gradients of h and w are made along the way
```

A linear head (or a product with a matrix), scales, a cap, casts, slices of rows and views, then `cross_entropy` over integer
labels with any `ignore_index` and `label_smoothing`, as mean or sum; also where they end an activation checkpoint. Softmax, loss
and the head's gradient are in fp32. A loss that is made otherwise, or whose logits something else reads, stays as it is: the
notes of the pass in the compile report say why. Logits of up to `chunk_bytes` in fp32, with a memory budget up to a 32nd of it
or 16 MiB, stay. Larger ones are computed in equal chunks of at most `chunk_bytes`; within a budget the plan chooses how many
rows at a time: as many as fit.
"""

from __future__ import annotations

import inspect
import math
import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.nn import functional

from torchloom._torch.aot import copy_graph_module
from torchloom._torch.bodies import ENTER_AUTOCAST, EXIT_AUTOCAST, SET_GRAD
from torchloom._torch.tensors import size_hint
from torchloom.capture.unread import UNREAD, Unread
from torchloom.graph import PassContext, note, tensors_in, written
from torchloom.graph.checkpoints import body_of, checkpoints_of, lift_tail
from torchloom.ops.losses import chunked_loss, wide_dtype

_SHARE = 32
"""Logits that are less than this part of a memory budget fit: with what follows on them they take a tenth of it."""
_LEAST_BYTES = 16 << 20
"""Logits of so many bytes fit in any budget: a model that is tried at a small size keeps its losses to the bit."""
_LINEAR = (functional.linear,)
_PRODUCT = (torch.matmul, operator.matmul, torch.mm, "matmul", "mm")
_VIEW = ("view", "reshape", "flatten", "contiguous", torch.reshape, torch.flatten)
_CAST = ("float", "to", "type", "double")
_TIMES = (operator.mul, torch.mul, "mul")
_OVER = (operator.truediv, torch.div, "div")
_TANH = (torch.tanh, "tanh")
_TURN = ("transpose", torch.transpose)
_OPERANDS = {"input": 0, "weight": 1, "other": 1, "mat2": 1, "bias": 2}
"""Places of a head's arguments by keyword."""
_MODES = (ENTER_AUTOCAST, EXIT_AUTOCAST, SET_GRAD)
_SUMS = (operator.add, operator.sub, torch.add, torch.sub, "add", "sub")
_MOST_NODES = 8
"""Between a parameter and the weight of a head: a gather, a cast, a transpose."""


class _Stays(Exception):  # noqa: N818  not an error
    """Why a loss stays as it is."""


class _End(NamedTuple):
    """The end of a model: what leads from rows to a loss."""

    head: fx.Node
    chain: tuple[fx.Node, ...]
    """From the head to the loss."""
    returned: tuple[fx.Node, ...]
    """Those of them that leave the graph."""
    scale: float
    cap: float
    """0: none."""

    @property
    def slices(self) -> list[fx.Node]:
        """Those that pick rows."""
        return [each for each in self.chain if each.target is operator.getitem]


def chunk_loss(
    gm: fx.GraphModule,
    ctx: PassContext,
    *,
    chunk_bytes: int = 512 << 20,
    returns_stand_ins: bool = False,
) -> int:
    """Compute cross entropies behind a linear head a few rows at a time, in training; return how many.

    Args:
        gm: as Dynamo captured it; edited in place.
        ctx: facts of the session.
        chunk_bytes: Logits in fp32 that exist at a time.
        returns_stand_ins: Whether logits that the graph returns may be made when they are read.
    """
    budget = ctx.memory_budget_bytes
    fits = chunk_bytes if budget is None else max(budget // _SHARE, _LEAST_BYTES)
    _put_numbers_last(gm)
    for checkpoint in checkpoints_of(gm):
        _lift(gm, checkpoint, fits, returns_stand_ins)
    num_edits = 0
    for loss in _losses_of(gm):
        try:
            found = _found(loss, fits, returns_stand_ins)
        except _Stays as why:
            note(gm, f"{loss.name} makes its logits: {why}")
            continue
        rows_at_a_time = math.ceil(found.rows / math.ceil(found.num_bytes / chunk_bytes))
        _return_rows(gm, found.end, found.stand_ins)
        _rewrite(loss, found.arguments, found.end, rows_at_a_time)
        note(gm, f"{loss.name} computes logits of {found.rows} rows in parts")
        num_edits += 1
    return num_edits


class _Found(NamedTuple):
    """A loss that can be computed in parts."""

    arguments: dict[str, Any]
    end: _End
    rows: int
    num_bytes: int
    """Of its logits, in the dtype of the loss."""
    stand_ins: list[Unread]


def _put_numbers_last(gm: fx.GraphModule) -> None:
    """Write `30 * z` as `z * 30`, in checkpoints as well."""
    for part in gm.modules():
        for node in part.graph.nodes if isinstance(part, fx.GraphModule) else ():
            if node.target in _TIMES and node.args and isinstance(node.args[0], (int, float)):
                node.args = node.args[::-1]


def _losses_of(gm: fx.GraphModule) -> list[fx.Node]:
    found = gm.graph.find_nodes(op="call_function", target=functional.cross_entropy)
    return [
        each for each in found if isinstance(_value(each), Tensor) and _value(each).requires_grad
    ]


def _found(loss: fx.Node, fits: int, returns_stand_ins: bool) -> _Found:
    """Return what a loss is made of; raise why it stays as it is."""
    arguments = _arguments(loss)
    end = _end_of(loss, arguments["input"])
    if end.returned and not returns_stand_ins:
        raise _Stays('the model returns them; compile.chunk_loss "always" is for that')
    rows, num_bytes = _size(end)
    if num_bytes <= fits:
        raise _Stays(f"they fit, as they are {num_bytes:,} bytes")
    return _Found(arguments, end, rows, num_bytes, [_unread(end, each) for each in end.returned])


def _lift(gm: fx.GraphModule, checkpoint: fx.Node, fits: int, returns_stand_ins: bool) -> None:
    """Move the end of a model out of an activation checkpoint, if it can then be computed in parts."""
    body, outside = body_of(checkpoint), _losses_of(gm)
    is_inside = body is not None and bool(_losses_of(body))
    if not is_inside and checkpoint not in map(_maker_of, outside):
        return
    trial = copy_graph_module(gm)
    twin = next(each for each in trial.graph.nodes if each.name == checkpoint.name)
    losses = _losses_of(trial)
    head = lift_tail(trial, twin, _last_head)
    why = "they are in an activation checkpoint, and more than a loss is made of them"
    for loss in [] if head is None else _losses_of(trial):
        try:
            found = _found(loss, fits, returns_stand_ins)
        except _Stays as stays:
            why = why if loss in losses else str(stays)
            continue
        if found.end.head is head:
            lift_tail(gm, checkpoint, _last_head)
            return
    if is_inside:
        note(gm, f"{checkpoint.name} makes its logits: {why}")


def _maker_of(loss: fx.Node) -> Any:
    """Return what makes the logits of a loss, before all known steps."""
    node: Any = loss.args[0] if loss.args else loss.kwargs["input"]
    while _is_step(node):
        node = node.args[0]
    return node


def _last_head(graph: fx.Graph) -> fx.Node | None:
    """Return the last product of a checkpoint's body, if nothing but a loss and sums of losses are made of it."""
    products = [each for each in graph.nodes if each.target in (*_LINEAR, *_PRODUCT)]
    if not products:
        return None
    behind, is_behind = {products[-1]}, False
    for node in graph.nodes:
        if node.op != "output" and not behind.isdisjoint(node.all_input_nodes):
            behind.add(node)
        is_behind |= node is products[-1]
        if node.target in _MODES or (is_behind and written(node)):
            return None  # it would be computed in another mode, or of other values
    known = (*_LINEAR, *_PRODUCT, *_TIMES, *_OVER, *_TANH, *_CAST, *_VIEW, *_TURN, *_SUMS)
    others = (operator.getitem, functional.cross_entropy)
    return products[-1] if all(each.target in (*known, *others) for each in behind) else None


def _value(node: fx.Node) -> Any:
    return node.meta.get("example_value")


def _arguments(loss: fx.Node) -> dict[str, Any]:
    """Return the arguments of a cross entropy by name."""
    bound = inspect.signature(functional.cross_entropy).bind(*loss.args, **loss.kwargs)
    bound.apply_defaults()
    given = dict(bound.arguments)
    if given["size_average"] is not None or given["reduce"] is not None:
        raise _Stays("the loss is given size_average or reduce instead of reduction")
    if given["weight"] is not None:
        raise _Stays("the loss weighs classes")
    if given["reduction"] not in ("mean", "sum"):
        raise _Stays("the loss is one number for each row")
    if _value(given["target"]).is_floating_point():
        raise _Stays("the labels are probabilities")
    return given


def _end_of(loss: fx.Node, logits: fx.Node) -> _End:
    """Find the head that makes the logits of a loss."""
    chain: list[fx.Node] = []
    returned: list[fx.Node] = []
    node: Any = logits
    reader = loss
    while True:
        others = [each for each in node.users if each is not reader]
        if strange := [each for each in others if each.op != "output"]:
            raise _Stays(f"{_name(strange[0])} reads them as well")
        returned += [node] if others else []
        if node.target in (*_LINEAR, *_PRODUCT):
            break
        if not _is_step(node):
            raise _Stays(f"{_name(node)} makes them, not a linear layer")
        chain.append(node)
        node, reader = node.args[0], node
    at = node
    while at is not loss:
        if written(at):
            raise _Stays(f"{_name(at)} writes a tensor between the head and the loss")
        at = at.next
    scale, cap = _checked(node, chain[::-1])
    return _End(node, tuple(chain[::-1]), tuple(returned), scale, cap)


def _is_step(node: fx.Node) -> bool:
    if node.target in (*_TIMES, *_OVER):
        return _factor(node) is not None
    known = (*_VIEW, *_CAST, *_TANH, *_TURN, operator.getitem)
    return node.target in known and bool(node.args) and isinstance(node.args[0], fx.Node)


def _factor(node: fx.Node) -> float | None:
    """Return the number that a node multiplies by, None where it is none."""
    number = node.args[1] if len(node.args) == 2 and not node.kwargs else None
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not number:
        return None
    return float(number) if node.target in _TIMES else 1.0 / number


def _checked(head: fx.Node, chain: list[fx.Node]) -> tuple[float, float]:
    """Return scale and cap, if each row of logits stays one, in order."""
    vocabulary, weight = _value(head).shape[-1], _value(_operands(head)[1])
    if not isinstance(vocabulary, int) or weight.dim() != 2 or _value(head).dim() < 2:
        raise _Stays("the head is no matrix of known size")
    scale, cap, are_viewed = 1.0, 0.0, False
    for node in chain:
        value, before = _value(node), _value(node.args[0])  # type: ignore[arg-type]
        if node.target in (*_TIMES, *_OVER):
            by = _factor(node) or 1.0
            scale, cap = (scale, cap * by) if cap else (scale * by, cap)
        elif node.target in _TANH and not cap:
            cap = 1.0
        elif node.target in _CAST and value.dtype in (before.dtype, torch.float32, torch.float64):
            continue
        elif node.target is operator.getitem and not are_viewed:
            if not _picks_rows(node.args[1], before.dim()):
                raise _Stays("they are indexed in an unknown way")
        elif node.target in _VIEW and value.shape[-1] == vocabulary:
            are_viewed = are_viewed or value.shape != before.shape
        elif node is chain[-1] and node.target in _TURN and value.dim() == 3:
            if {each % 3 for each in node.args[1:]} != {1, 2}:  # type: ignore[operator]
                raise _Stays("they are transposed in an unknown way")
        else:
            raise _Stays(f"{_name(node)} changes them in an unknown way")
    last = _value(chain[-1]) if chain else _value(head)
    if last.dim() != 2 and not (chain and chain[-1].target in _TURN):
        raise _Stays("classes are not the last dimension")
    return scale, cap


def _operands(head: fx.Node) -> list[Any]:
    """Return rows, weight and, if there is one, bias of a head."""
    if not head.kwargs.keys() <= _OPERANDS.keys():
        raise _Stays(f"the head is called with {', '.join(head.kwargs)}")
    by_place = {**dict(enumerate(head.args)), **{_OPERANDS[k]: v for k, v in head.kwargs.items()}}
    return [by_place[place] for place in sorted(by_place)]


def _picks_rows(index: Any, num_dims: int) -> bool:
    """Say whether an index is slices of leading dimensions, and takes all classes."""
    parts = index if isinstance(index, tuple) else (index,)
    if not all(each is Ellipsis or isinstance(each, slice) for each in parts):
        return False
    reaches_classes = Ellipsis in parts or len(parts) == num_dims
    return not reaches_classes or parts[-1] in (Ellipsis, slice(None))


def _size(end: _End) -> tuple[int, int]:
    """Return rows, and the bytes of their logits in the dtype of the loss."""
    value = _value(end.slices[-1] if end.slices else end.head)
    *leading, vocabulary = map(size_hint, value.shape)
    rows = math.prod(leading)
    return rows, rows * vocabulary * wide_dtype(value.dtype).itemsize


def _unread(end: _End, returned: fx.Node) -> Unread:
    """Return how logits that leave the graph are made of rows and inputs of the graph."""
    graph = fx.Graph()
    rows: Any = _operands(end.head)[0]
    env = {rows: graph.placeholder("rows")}
    inputs = returned.graph.find_nodes(op="placeholder")
    needed: list[fx.Node] = []
    waiting = [returned]
    while waiting:
        node = waiting.pop()
        if node in env or node in needed:
            continue
        needed.append(node)
        waiting += node.all_input_nodes
    chain = [end.head, *end.chain[: end.chain.index(returned) + 1 if returned in end.chain else 0]]
    if any(each.target in (*_VIEW, *_TURN, operator.getitem) for each in chain):
        raise _Stays("the model returns them in another shape")
    if len(needed) > _MOST_NODES + len(chain) or any(each.op == "get_attr" for each in needed):
        raise _Stays("the model returns them, and the weight of its head is no parameter")
    given = [each for each in inputs if each in needed]
    for node in given:
        env[node] = graph.placeholder(node.name)
    for node in returned.graph.nodes:
        if node in needed and node not in env:
            env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(env[returned])
    places = tuple(inputs.index(each) for each in given)
    value = _value(returned)
    return Unread(fx.GraphModule({}, graph), places, value.shape[-1], value.dtype)


def _return_rows(gm: fx.GraphModule, end: _End, stand_ins: list[Unread]) -> None:
    """Let the graph return rows in the place of logits, and note what they stand for."""
    if not stand_ins:
        return
    output = gm.graph.output_node()
    (results,) = output.args
    stood_for = dict(zip(end.returned, stand_ins, strict=True))
    with gm.graph.inserting_before(output):
        rows = _add(end.head, "call_method", "detach", _operands(end.head)[0])
    for place, each in enumerate(results):  # type: ignore[arg-type]
        if each in stood_for:
            gm.meta.setdefault(UNREAD, {})[place] = stood_for[each]
    output.args = (tuple(rows if each in stood_for else each for each in results),)  # type: ignore[union-attr]


def _rewrite(loss: fx.Node, arguments: dict[str, Any], end: _End, rows_at_a_time: int) -> None:
    """Put the operator in the place of a loss and its logits."""
    head, dtype = end.head, _value(end.head).dtype
    rows, weight, *bias = _operands(head)
    with loss.graph.inserting_before(loss):

        def method(name: str, *args: Any) -> fx.Node:
            return _add(loss, "call_method", name, *args)

        def cast(node: Any) -> Any:
            is_cast = isinstance(node, fx.Node) and _value(node).dtype != dtype
            return method("to", node, dtype) if is_cast else node

        for each in end.slices:
            rows = _add(loss, "call_function", operator.getitem, rows, each.args[1])
        made = _add(
            loss,
            "call_function",
            chunked_loss,
            cast(method("reshape", rows, -1, _value(rows).shape[-1])),  # type: ignore[arg-type]
            cast(weight if head.target in _LINEAR else method("t", weight)),
            cast(bias[0]) if bias else None,
            method("reshape", arguments["target"], -1),
            end.scale,
            end.cap,
            arguments["ignore_index"],
            float(arguments["label_smoothing"]),
            arguments["reduction"] == "mean",
            rows_at_a_time,
            [False, False, False],
        )
        made = _add(loss, "call_function", operator.getitem, made, 0)
        made = method("to", made, _value(loss).dtype)
    loss.replace_all_uses_with(made)
    for node in (loss, *reversed(end.chain), head):
        loss.graph.erase_node(node)


def _add(place: fx.Node, op: str, target: Any, *args: Any) -> fx.Node:
    """Insert a call with the value that it would have, where Dynamo found another one."""
    node = place.graph.create_node(op, target, args)
    kept = ("stack_trace", "nn_module_stack", "source_fn_stack")
    node.meta = {key: place.meta[key] for key in kept if key in place.meta}
    first, *others = fx.node.map_arg(args, _value)
    with next(tensors_in(first)).fake_mode:  # type: ignore[attr-defined]
        run = getattr(first, target) if op == "call_method" else target
        node.meta["example_value"] = run(*others) if op == "call_method" else run(first, *others)
    return node


def _name(node: fx.Node) -> str:
    is_call = node.op in ("call_function", "call_method")
    return str(getattr(node.target, "__name__", node.target)) if is_call else node.name
