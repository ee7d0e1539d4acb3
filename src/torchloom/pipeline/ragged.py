"""Ranks that compile on their own keep to one plan: batches of different sizes, and plans made anew by measured times.

A plan decides what backward computes again, which weights stay gathered and how large buckets are, and
thereby which collectives a graph calls. Under a memory budget, ranks with batches of different sizes would
make different plans and call different collectives. So:

    first capture of a kind   the ranks compare the sizes of their batches. If these are equal, each rank
                              plans for itself and all make the same plan. Otherwise the rank with the
                              largest batch plans, because the others wait for it in each step, and the
                              others take its plan
    later captures            on any rank, the graph takes the same plan as long as it fits

Graphs are of one kind if they read the same parameters. Ranks wait for each other only at the first capture
of a kind: there each has to wait for the others in the graph's first collective in any case.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from types import CodeType
from typing import Any, Literal

import torch
from torch import Tensor, fx

from torchloom import ops
from torchloom._torch.compiling import compiling_code
from torchloom._torch.introspect import recompile_limit
from torchloom.errors import own_error
from torchloom.files import from_plain
from torchloom.graph import args_of, find
from torchloom.log import get_logger
from torchloom.pipeline.report import GraphReport
from torchloom.pipeline.sidecar import calling_text
from torchloom.plan import GraphPlan, Planner, PlannerSnapshot
from torchloom.position import POSITION

logger = get_logger(__name__)

Texts = Callable[[str, str], list[str]]
"""Returns the text of every rank, by rank: `(what the ranks tell each other, this rank's own)`."""


Kinds = frozenset[frozenset[str]]
"""Graphs that were captured, each by the parameters that it communicates about."""


@dataclass
class SharedPlan:
    """Lets the ranks of one session follow one plan.

    Args:
        rank: this one, in the lists that `texts` returns.
        texts: all ranks call it in the same order.
    """

    rank: int
    texts: Texts
    _met: set[frozenset[str]] = field(default_factory=set)
    _leaders: dict[str, int] = field(default_factory=dict)
    """Kind of graph -> the rank that plans for all, where batches differ in size."""

    def start_over(self) -> None:
        """Forget all kinds, because all ranks are about to capture the module again."""
        self._met.clear()
        self._leaders.clear()
        POSITION.notes.pop("plan", None)

    def remember(self) -> Kinds:
        """Return a copy of the state for `restore`."""
        return frozenset(self._met)

    def restore(self, kinds: Kinds) -> None:
        """Return to a copied state."""
        self._met, self._leaders = set(kinds), {}

    def is_shared(self, graph: fx.Graph) -> bool:
        """Say whether this is the first capture of its kind, at which all ranks compare their batches."""
        params = parameters_of(graph)
        return bool(params) and torch.is_grad_enabled() and params not in self._met

    def before(
        self, gm: fx.GraphModule, inputs: Sequence[Any], report: GraphReport, planner: Planner
    ) -> None:
        """Before any pass runs over a graph, find the rank whose plan it follows.

        Args:
            gm: the captured graph.
            inputs: its example inputs, whose sizes may differ between ranks.
            report: gets the kind of the graph; holds the bytes of this rank's batch.
            planner: gets the leader's plan, where another rank leads.

        Raises:
            AgreementError: another rank is compiling something else.
        """
        params = parameters_of(gm.graph)
        if not params or not torch.is_grad_enabled():
            return  # nothing is sent, or nothing planned
        report.kind = _kind(gm.graph)
        if params in self._met:
            return
        self._met.add(params)
        what = f"the sizes of a batch for {len(params)} parameters ({min(params)}, ...)"
        held = self.texts(what, f"{report.batch_bytes} {calling_text(inputs)} {planner.key}")
        if len(set(held)) == 1:
            return
        leader = max(range(len(held)), key=lambda rank: int(held[rank].split()[0]))
        if leader == self.rank:
            self._leaders[report.kind] = leader
            return
        logger.info("%s: its plan is that of rank %d, whose batch is larger", report.name, leader)
        told = json.loads(self._exchange_plan({})[leader])
        if told.get("kind") == report.kind:
            planner.agreed[report.kind] = from_plain(GraphPlan, told["plan"])

    def after(self, report: GraphReport, planner: Planner) -> None:
        """Let graphs of this kind follow the plan that a graph was compiled under."""
        kind, plan = report.kind, report.plan
        if self._leaders.pop(kind, None) is not None:
            self._exchange_plan({} if plan is None else {"kind": kind, "plan": asdict(plan)})
        if not kind or plan is None:
            return
        agreed = planner.agreed.setdefault(kind, plan)
        if agreed.traffic_key != plan.traffic_key:
            POSITION.notes["plan"] = (
                f"{report.name}, with a batch of {report.batch_bytes} bytes, does not fit into the memory "
                "budget under the plan that the ranks began with and has one of its own, which others may "
                "not share: raise compile.memory_budget, or begin with the largest batch (docs/ragged.md)"
            )

    def _exchange_plan(self, mine: dict[str, Any]) -> list[str]:
        return self.texts(
            "the plan for batches of different sizes", json.dumps(mine, default=sorted)
        )


@dataclass
class CaptureCounts:
    """Counts the captures of one module's graphs: above a limit torch runs further sizes and modes eagerly.

    A rank that runs eagerly calls other collectives than ranks that run compiled code. So the last capture
    before the limit logs a warning, and the error that ends the run later names this cause.
    """

    _captures: Counter[tuple[CodeType | None, frozenset[str]]] = field(default_factory=Counter)

    def start_over(self) -> None:
        """Forget all counts, because the module is about to be captured again."""
        self._captures.clear()
        POSITION.notes.pop("sizes", None)

    def count(self, name: str, graph: fx.Graph) -> None:
        """Count a captured graph, and warn where it is the last that torch will compile."""
        params = parameters_of(graph)
        if not params:
            return
        key = (compiling_code(), params)
        self._captures[key] += 1
        if self._captures[key] != recompile_limit():
            return
        text = (
            f"{name} is the capture number {self._captures[key]} of the same {len(params)} parameters, which is "
            "torch's recompile_limit: at further sizes and modes this rank runs eagerly, which ranks that run "
            "compiled code cannot follow; raise torch._dynamo.config.recompile_limit, compile with dynamic=True, "
            "or pad: docs/ragged.md"
        )
        POSITION.notes["sizes"] = text
        logger.warning("%s", text)


def parameters_of(graph: fx.Graph) -> frozenset[str]:
    """Return the names of the parameters that a captured graph communicates about."""
    nodes = (node for op in (ops.gather, ops.replicate) for node in find(graph, op))
    return frozenset(args_of(node)[-1] for node in nodes)


def _kind(graph: fx.Graph) -> str:
    """Return a hash that is equal for captures of the same operators with other sizes."""
    digest = hashlib.blake2b(digest_size=8)
    for node in graph.nodes:
        if node.op.startswith("call") and isinstance(node.meta.get("example_value"), Tensor):
            name = node.target if isinstance(node.target, str) else node.target.__name__
            param = args_of(node)[-1] if node.target in (ops.gather, ops.replicate) else ""
            digest.update(f"{name} {param}\n".encode())
    return digest.hexdigest()


_OPEN, _FINE = "not compiled yet", ""


@dataclass
class Replan:
    """The progress of a second plan, and the state that returning to the first plan needs.

    Either all ranks compile all graphs of a plan by measured times, or all return to the first one:

        compile    each rank compiles a graph by the second plan and tells the others whether that worked. If it
                   failed on any rank, all ranks compile this graph and later ones by the figures of the first
                   plan; if that fails too, all ranks run the graph eagerly sharded
        boundary   before the next optimizer step the ranks compare once more. If anything has failed, all
                   return to the code of the first plan, which they still hold

    A plan decides which collectives a graph calls, so all ranks must run the same plan.

    Args:
        texts: exchanges one text per rank; all ranks call it in the same order.
        plans: what the planner knew under the first plan.
        kinds: what the ranks had agreed on under it.
        woven: what the session knew of its graphs.
        keep: called once all ranks have compiled the second plan.
    """

    texts: Texts
    plans: PlannerSnapshot
    kinds: Kinds | None
    woven: list[tuple[frozenset[str], frozenset[str]]]
    keep: Callable[[], None]
    is_refused: bool = False
    """Whether all ranks know that the second plan failed on one of them."""
    restarted: set[frozenset[str]] = field(default_factory=set)
    """Parameters of shared graphs that Dynamo is about to capture again."""
    _num_compiled: int = 0
    _own: str = _FINE
    """What has failed on this rank."""

    def compiled(self) -> None:
        """Note that a graph has been compiled."""
        self._num_compiled += 1

    def failed(self, error: Exception) -> None:
        """Record a failure on this rank; the other ranks learn of it at the next comparison."""
        cause = own_error(error) or error
        self._own = self._own or f"{type(cause).__name__}: {str(cause).partition(chr(10))[0]}"

    def compare(self, graph: str, error: Exception | None) -> bool:
        """Return whether a graph was compiled on all ranks. All must call.

        Args:
            graph: what this rank calls it.
            error: why it was not compiled here.
        """
        if error is not None:
            self.failed(error)
        told = self.texts("how compiling a second plan went", self._own)
        failures = {rank: text for rank, text in enumerate(told) if text != _FINE}
        self._say(graph, failures)
        self._own = _FINE
        return not failures

    def conclude(self) -> Literal["open", "kept", "refused"]:
        """Decide with all ranks, between two steps, what becomes of the second plan. All ranks must call.

        Returns:
            "open" while a rank has compiled no graph of it, "kept" or "refused".
        """
        own = self._own or (_FINE if self._num_compiled else _OPEN)
        told = self.texts("what becomes of a second plan", own)
        failures = {rank: text for rank, text in enumerate(told) if text not in (_FINE, _OPEN)}
        self._say("a graph of its own", failures)
        if self.is_refused:
            return "refused"
        if _OPEN in told:
            return "open"
        self.keep()
        return "kept"

    def _say(self, graph: str, failures: dict[int, str]) -> None:
        if failures and not self.is_refused:
            rank, reason = min(failures.items())
            logger.warning(
                "the first plan stays, on all ranks, because rank %d cannot compile %s by the second one, which "
                "was made by measured times (%s)",
                rank,
                graph,
                reason,
            )
        self.is_refused = self.is_refused or bool(failures)
