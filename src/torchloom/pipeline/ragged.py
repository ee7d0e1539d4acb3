"""Let ranks whose batches differ in size run alike: one plan for graphs of one kind, a count of their captures.

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
from typing import Any

import torch
from torch import Tensor, fx

from torchloom import ops
from torchloom._torch.compiling import compiling_code
from torchloom._torch.introspect import recompile_limit
from torchloom.graph import args_of, find
from torchloom.log import get_logger
from torchloom.pipeline.report import GraphReport
from torchloom.plan import GraphPlan, Planner
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
        held = self.texts(what, f"{report.batch_bytes} {_sizes(inputs)} {planner.key}")
        if len(set(held)) == 1:
            return
        leader = max(range(len(held)), key=lambda rank: int(held[rank].split()[0]))
        if leader == self.rank:
            self._leaders[report.kind] = leader
            return
        logger.info("%s: its plan is that of rank %d, whose batch is larger", report.name, leader)
        told = json.loads(self._exchange_plan({})[leader])
        if told.get("kind") == report.kind:
            planner.agreed[report.kind] = GraphPlan.from_dict(told["plan"])

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


def _sizes(inputs: Sequence[Any]) -> list[str]:
    return [
        f"{each.dtype}{list(map(str, each.shape))}" if isinstance(each, Tensor) else str(each)
        for each in inputs
    ]
