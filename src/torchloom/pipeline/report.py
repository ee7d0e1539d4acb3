"""What one compile session did: plain records for people, tests and reports."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

from torch import fx

from torchloom import events
from torchloom._torch import introspect
from torchloom.costs.timeline import Timeline
from torchloom.graph import args_of
from torchloom.log import get_logger
from torchloom.memory import PeakContents, module_path
from torchloom.ops.regions import body_of, half_of_node, is_call_of_body
from torchloom.plan import GraphPlan
from torchloom.regions import RegionCalls

logger = get_logger(__name__)


@dataclass(frozen=True)
class PassReport:
    """One pass over one graph."""

    name: str
    graph: str
    num_edits: int
    duration_s: float
    notes: tuple[str, ...] = ()
    """What the pass says of the graph: why it left something as it was, say."""


@dataclass
class GraphReport:
    """One captured graph, compiled or fallen back."""

    name: str
    num_nodes: int
    backend: str
    digest: str
    """Hash of the captured graph; equal on ranks that run the same program."""
    graph_id: int = 0
    """Number that passes know the graph by; equal for graphs that are captured again."""
    round: int = 1
    """Which compile of the module captured it; 0: of a second plan that was given up."""
    batch_bytes: int = 0
    """Inputs that are neither parameters nor buffers; twice with `compile.cuda_graphs`, which copies them."""
    duration_s: float = 0.0
    compile_s: list[tuple[str, float]] = field(default_factory=list)
    """Seconds in the compiler, per lowered graph: "forward", "backward", "inference"."""
    passes: list[PassReport] = field(default_factory=list)
    collectives: dict[str, int] = field(default_factory=dict)
    """Calls of torchloom operators in the final graphs: "forward torchloom.gather_start" -> 3."""
    kind: str = ""
    """Equal for graphs of the same operators with other sizes, which follow one plan; "" for none."""
    plan: GraphPlan | None = None
    """What was planned for this graph, where a budget was given."""
    planning_s: float = 0.0
    """Seconds in the planner, and in computing the peak of the compiled code."""
    num_tries: int = 0
    """How often the graph was compiled until its code kept the budget; 0 without a budget."""
    peak: PeakContents | None = None
    """The predicted peak of forward and backward; None without a recorder or planner."""
    times: Timeline | None = None
    """Predicted time of one forward and backward, and what compute waits for; None where there is no peak."""
    code: Mapping[str, str] = field(default_factory=dict)
    """What Inductor wrote for "forward" and "backward", where nothing runs it: in a simulation."""
    code_peak_bytes: int | None = None
    """What that code allocates at most; None where that is not known."""
    regions: tuple[RegionCalls, ...] = ()
    """Bodies that stand for equal parts of the graph."""
    flat_because: tuple[str, ...] = ()
    """Why parts that repeat, or the whole graph, were compiled one by one."""
    cuda_graphs: dict[str, str] = field(default_factory=dict)
    """By the kind of a lowered graph: "recorded", or why its launches are not recorded; empty without `compile.cuda_graphs`."""
    fallback: str | None = None
    """Why this graph runs eagerly sharded, or None."""

    def take(self, other: GraphReport) -> None:
        """Take over the records of one of several compiles."""
        self.compile_s, self.passes = other.compile_s, other.passes
        self.collectives, self.plan = other.collectives, other.plan
        self.peak, self.times = other.peak, other.times
        self.code, self.code_peak_bytes = other.code, other.code_peak_bytes
        self.regions, self.flat_because = other.regions, other.flat_because
        self.cuda_graphs = other.cuda_graphs

    @property
    def num_calls(self) -> int:
        """How many layers are calls of a body."""
        return sum(len(each.layers) for each in self.regions)

    @property
    def from_cache(self) -> bool:
        """Whether the compiler's caches held the woven graphs, so that no pass had to run."""
        is_woven = any(not each.graph.endswith(".captured") for each in self.passes)
        return self.backend == "inductor" and not is_woven and self.fallback is None


class CompilePhase(NamedTuple):
    """What a compile is busy with."""

    name: str
    """trace, plan, layer (a body that stands for equal layers) or rest (of a graph)."""
    graph: str
    since_s: float
    """When it began, by `time.monotonic`."""

    def text(self) -> str:
        """Return it in words, with the seconds that it has taken so far."""
        words = {"trace": "tracing", "plan": "planning", "layer": "lowering a layer"}
        seconds = time.monotonic() - self.since_s
        return f"{words.get(self.name, 'lowering')} {self.graph} ({seconds:.0f} s)"


def log_phase(phase: CompilePhase, every_s: float) -> threading.Event:
    """Log what a compile is busy with, from now on, until the event that this returns is set.

    Args:
        phase: says it.
        every_s: seconds between two lines, and before the first.
    """
    end = threading.Event()

    def tell() -> None:
        while not end.wait(every_s):
            logger.warning("compiling: %s", phase.text())

    threading.Thread(target=tell, daemon=True).start()
    return end


def tell_peak(report: GraphReport) -> None:
    """Emit what is alive at the peak of a graph, if that is known."""
    if report.peak is not None and events.is_heard():
        events.emit(events.PeakFound(graph=report.name, contents=asdict(report.peak)))


def tell_bodies(graph: fx.Graph, name: str) -> None:
    """Emit each body that a lowered graph calls.

    Args:
        graph: woven.
        name: how events call it.
    """
    calls: dict[str, list[fx.Node]] = {}
    for node in filter(is_call_of_body, graph.nodes):
        calls.setdefault(str(node.args[0]), []).append(node)
    for body, nodes in calls.items():
        half, modules = half_of_node(nodes[0]), body_of(body).modules
        events.emit(
            events.BodyWoven(
                graph=name,
                name=body,
                half=half.kind,
                layers=tuple(module_path(modules.get(args_of(node)[1], "")) for node in nodes),
                text=half.graph_module.print_readable(print_output=False),
                compile_id=introspect.current_compile_id(),
            )
        )


@dataclass
class CompileReport:
    """All graphs of one compile session, in the order in which Dynamo handed them over."""

    graphs: list[GraphReport] = field(default_factory=list)
    phase: CompilePhase | None = None
    """What the compiler is busy with now, None while nothing is compiled."""
    owners: tuple[events.OwnersChosen, ...] = ()
    """Of each optimizer that steps the model: which parameters it sees whole, on which rank, why, and what that sends."""

    @property
    def fallbacks(self) -> list[str]:
        """Why graphs run eagerly, one text each; empty when everything is woven."""
        return [graph.fallback for graph in self.graphs if graph.fallback is not None]

    @property
    def compile_time(self) -> list[tuple[str, int, int, float]]:
        """Per lowered graph: "fwd" or "bwd", its place, its graph id, seconds in the compiler.

        A graph that came from the compiler's caches has one entry, its time altogether.
        """
        found = []
        for index, graph in enumerate(self.graphs):
            times = graph.compile_s or [("forward", graph.duration_s)]
            for kind, seconds in times:
                found.append(
                    ("bwd" if kind == "backward" else "fwd", index, graph.graph_id, seconds)
                )
        return found

    @property
    def exposed_ms(self) -> dict[str, float]:
        """Predicted milliseconds that compute waits for transfers, by what it waits for, the longest first.

        Of one forward and backward of each graph; empty where neither a budget nor a recorder asks for predictions.
        """
        found: Counter[str] = Counter()
        for graph in self.graphs:
            found.update({} if graph.times is None else graph.times.exposed_by)
        return {what: us / 1e3 for what, us in found.most_common()}

    @property
    def duration_s(self) -> float:
        """Seconds spent in the compiler, backward graphs included where known."""
        return sum(graph.duration_s for graph in self.graphs)
