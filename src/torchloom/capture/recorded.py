"""Training steps as CUDA graphs: the code of each lowered graph is recorded after warm-ups, and replayed from then on.

    calls 1 and 2   run as they are, on the stream of recordings: libraries choose algorithms and allocate workspaces
    call 3          records, which runs nothing on the device, and replays
    later calls     copy the batch in, replay, copy results out

Memory of a recording does not move. Parameters and buffers are read and written where they are; any other input is
copied into a buffer. What forward saves stays in place, and backward reads it there; losses and gradients are copied
out, so nothing that a caller holds is overwritten. A call that does not fit runs as it is: one whose forward was
not replayed, or a second forward while an earlier one waits for its backward. Parameters that moved are recorded anew.

What Python does in between is watched (`ops.replays`): the names of collectives are repeated at each replay, and what
cannot be repeated leaves the graph unrecorded, with the reason in the compile report.

Sources: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs (warm-up on a side stream, static memory, the
pool); that saved values may lie in memory of forward's graph is from torch's `make_graphed_callables`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from torchloom._torch.autograd import keeps_graph
from torchloom._torch.cuda_graphs import CudaRecording, Pool, pool_of
from torchloom._torch.inductor import first_unrecordable
from torchloom._torch.tensors import lives_on, num_holders
from torchloom.capture.hooks import Boxed, GraphKind
from torchloom.errors import CompileError
from torchloom.graph import value_of, written
from torchloom.ops.regions import half_of_node, is_call_of_body
from torchloom.ops.replays import watched

RECORDED = "recorded"
"""The state of a graph that is replayed; any other text says why it is not."""
DEVICE = "cuda"
_NUM_WARM = 2
_MOST_RECORDINGS = 4
"""Of one graph, whose parameters moved in between."""


@dataclass(frozen=True)
class _Facts:
    """What is known of a lowered graph before compilers rewrite it."""

    device: torch.device | None
    written: frozenset[int]
    """Places of inputs that it writes."""
    saved: frozenset[int]
    """Places of outputs that backward reads."""
    refusal: str
    """Why it cannot be recorded; empty: nothing speaks against it."""


def _facts_of(gm: fx.GraphModule) -> _Facts:
    graph = gm.graph
    inputs, outputs = graph.find_nodes(op="placeholder"), graph.output_node()
    roles = [type(each).__name__ for each in outputs.meta.get("desc") or ()]
    values: Any = outputs.args[0]
    device, refusal = _device_of(gm)
    if not all(isinstance(value_of(each), Tensor) for each in inputs):
        refusal = refusal or "its sizes vary, or it draws the same random numbers twice"
    if len(roles) != len(values):
        refusal = refusal or "torch does not say which of its results backward reads"
    places = {each: place for place, each in enumerate(inputs)}
    return _Facts(
        device=device,
        written=frozenset(
            places[each] for node in graph.nodes for each in written(node) if each in places
        ),
        saved=frozenset(place for place, role in enumerate(roles) if role.startswith("Saved")),
        refusal=refusal,
    )


def _device_of(gm: fx.GraphModule) -> tuple[torch.device | None, str]:
    """Return the device of all values, also in bodies that are called; else None, and what cannot be recorded there."""
    device: torch.device | None = None
    modules = [gm]
    for each in modules:
        for node in each.graph.nodes:
            if is_call_of_body(node) and (half := half_of_node(node).graph_module) not in modules:
                modules.append(half)  # read later in this loop
            value = value_of(node)
            for tensor in value if isinstance(value, list | tuple) else (value,):
                if not isinstance(tensor, Tensor):
                    continue
                if tensor.device.type != DEVICE:
                    return None, f"{node.name} is on {tensor.device}"
                device = device or tensor.device
        bad = first_unrecordable(each)
        if bad is not None:
            return None, f"{bad.name} ({bad.target}) cannot be recorded"
    return device, "" if device is not None else "it computes nothing"


class RecordedGraph:
    """The code of a lowered graph, recorded once it is warm.

    Args:
        kind: of the graph.
        gm: the graph, before it is compiled.
        tell: called once it is known, with `RECORDED` or why the graph is not recorded.
        forward: of a backward graph, the forward graph whose values it reads.
    """

    def __init__(
        self,
        kind: GraphKind,
        gm: fx.GraphModule,
        tell: Callable[[str], None],
        forward: RecordedGraph | None = None,
    ) -> None:
        self._kind, self._facts, self._forward = kind, _facts_of(gm), forward
        self._tell, self._told = tell, ""
        self._call: Boxed | None = None
        self._num_recordings = 0
        self.forget()
        if self._facts.refusal:
            self._say(self._facts.refusal)

    def of(self, call: Boxed) -> Boxed:
        """Take the code of the graph; return what to call instead."""
        self._call = call

        def run(inputs: list[Any]) -> Any:
            return self(inputs)

        run._boxed_call = True  # type: ignore[attr-defined]  how AOTAutograd recognises the convention
        return run

    def forget(self) -> None:
        """Drop the recording and its memory: the next calls are warm-ups again."""
        self._num_warm = 0
        self._recording: CudaRecording | None = None
        self._held: list[Any] = []
        """Buffers of inputs that are copied in; None where an input is used where it is."""
        self._fixed: dict[int, int] = {}
        """Addresses of inputs that are used where they are, by place."""
        self._results: list[Any] = []
        self._passed: dict[int, int] = {}
        """Results that are inputs, used where they are: places of both."""
        self._acts: list[Callable[[], object]] = []
        self.lent: list[tuple[Tensor, int]] = []
        """What backward may still read of the last call, and how many held its memory before."""
        self.kept: frozenset[int] = frozenset()
        """Addresses of what backward may read where it is: inputs and saved values."""
        self.saved: frozenset[int] = frozenset()
        """Those of saved values alone."""

    def __call__(self, inputs: list[Any]) -> Any:
        """Run the graph."""
        call, device, forward = self._call, self._facts.device, self._forward
        assert call is not None, "the graph is not compiled"
        is_behind = self._is_behind_replay(inputs)
        try:
            if device is None or self._told not in ("", RECORDED):
                return call(inputs)
            pool = pool_of(device)
            with pool.turn():
                return self._warm_or_replayed(call, inputs, pool, may_record=is_behind)
        finally:
            if forward is not None and is_behind and not keeps_graph():
                forward.lent = []  # the next forward may write there

    def _warm_or_replayed(
        self, call: Boxed, inputs: list[Any], pool: Pool, *, may_record: bool
    ) -> Any:
        if self._num_warm < _NUM_WARM:
            self._num_warm += 1
            with watched() as work, pool.beside():
                outputs = call(inputs)
            if work.refusals:
                self._say(work.refusals[0])
            return outputs
        if not may_record or any(num_holders(each) > before for each, before in self.lent):
            return call(inputs)
        fits = self._recording is not None and all(
            inputs[place].data_ptr() == address for place, address in self._fixed.items()
        )
        if not fits and not self._record(call, inputs, pool):
            return call(inputs)
        return self._replay(inputs, is_new=not fits)

    def _is_behind_replay(self, inputs: Sequence[Any]) -> bool:
        """Say whether what a backward graph is given of its forward graph lies in the recording of that one."""
        forward = self._forward
        if forward is None:
            return True
        return bool(
            forward.kept and not (forward.saved and forward.saved.isdisjoint(_addresses(inputs)))
        )

    def _record(self, call: Boxed, inputs: Sequence[Any], pool: Pool) -> bool:
        """Record the graph for inputs at these addresses; say whether that could be done."""
        if self._num_recordings == _MOST_RECORDINGS:
            self._say(f"its parameters moved {_MOST_RECORDINGS} times")
            return False
        self.forget()
        self._num_warm, self._num_recordings = _NUM_WARM, self._num_recordings + 1
        kept = frozenset() if self._forward is None else self._forward.kept
        held = []
        for place, value in enumerate(inputs):
            if lives_on(value) or not value.numel() or value.data_ptr() in kept:
                self._fixed[place] = value.data_ptr()
                held.append(value)
                continue
            held.append(value.detach().clone())
            if held[-1].stride() != value.stride():
                self._say(f"its input {place} has gaps, or elements that share memory")
                return False
        recording = CudaRecording(pool)
        try:
            with watched() as work:
                outputs = list(recording.record(lambda: call(list(held))))
        except Exception as error:
            raise CompileError(
                f"a {self._kind} graph could not be recorded as a CUDA graph ({type(error).__name__}: "
                f"{str(error).partition(chr(10))[0]}): set compile.cuda_graphs to false"
            ) from error
        if work.refusals:
            self._say(work.refusals[0])
            return False
        fixed = {id(held[place]): place for place in self._fixed}
        passed = {place: fixed[id(each)] for place, each in enumerate(outputs) if id(each) in fixed}
        self.saved = _addresses(outputs[each] for each in self._facts.saved if each not in passed)
        self.kept = self.saved | _addresses(held)
        # Callers' tensors are not kept alive: their addresses are known.
        self._held = [None if each in self._fixed else value for each, value in enumerate(held)]
        self._results = [None if each in passed else value for each, value in enumerate(outputs)]
        self._recording, self._passed, self._acts = recording, passed, work.acts
        self._say(RECORDED)
        return True

    def _replay(self, inputs: list[Any], *, is_new: bool) -> Any:
        assert self._recording is not None
        given = list(inputs)
        inputs.clear()
        with torch.no_grad():
            for mine, value in zip(self._held, given, strict=True):
                if mine is not None:
                    mine.copy_(value)
            for act in () if is_new else self._acts:  # recording has done them for this call
                act()
            self._recording.replay()
            for place in self._facts.written - self._fixed.keys():
                given[place].copy_(self._held[place])
            saved = [self._results[place] for place in self._facts.saved - self._passed.keys()]
            self.lent = [(each, num_holders(each)) for each in saved]
            return [self._given_out(place, given) for place in range(len(self._results))]

    def _given_out(self, place: int, given: Sequence[Any]) -> Any:
        """Return a result for the caller: a copy, or another tensor over what backward reads."""
        if place in self._passed:
            return given[self._passed[place]]
        value = self._results[place]
        if not isinstance(value, Tensor):
            return value
        return value.detach() if place in self._facts.saved else value.clone()

    def _say(self, state: str) -> None:
        if state != self._told:
            self._told = state
            self._tell(state)
        if state != RECORDED:
            self.forget()


@dataclass(eq=False)
class Recordings:
    """The graphs of a compile session that are recorded.

    Example:
        >>> wrap = Recordings().of_one_graph(lambda kind, state: print(kind, state))
        >>> wrap("forward", gm)(code)  # doctest: +SKIP
    """

    _graphs: list[weakref.ref[RecordedGraph]] = field(default_factory=list)

    def of_one_graph(
        self, tell: Callable[[GraphKind, str], None]
    ) -> Callable[[GraphKind, fx.GraphModule], Callable[[Boxed], Boxed]]:
        """Return the hook `WeaveHooks.wrap` for the lowered graphs of one captured graph.

        Args:
            tell: called with a lowered graph's kind and `RECORDED` or why it is not recorded, once that is known.
        """
        made: dict[GraphKind, RecordedGraph] = {}

        def wrap(kind: GraphKind, gm: fx.GraphModule) -> Callable[[Boxed], Boxed]:
            forward = made.get("forward") if kind == "backward" else None
            made[kind] = RecordedGraph(kind, gm, functools.partial(tell, kind), forward)
            self._graphs.append(weakref.ref(made[kind]))
            return made[kind].of

        return wrap

    def forget(self) -> None:
        """Drop all recordings and their memory: graphs that still run are recorded again."""
        for each in self._graphs:
            graph = each()
            if graph is not None:
                graph.forget()


def _addresses(values: Any) -> frozenset[int]:
    return frozenset(each.data_ptr() for each in values if isinstance(each, Tensor))
