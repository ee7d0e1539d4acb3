"""A compile session: everything that one compiled module owns.

The session is the backend that `torch.compile` calls with each captured graph. It runs the passes
through the route that the wanted backend needs. If weaving fails, it logs that and falls back to the
eager sharded model.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, fx

from torchloom import events
from torchloom._torch.dynamo import is_restart
from torchloom._torch.tensors import lives_on
from torchloom.backends import lookup_backend
from torchloom.backends.graphs import copy_graph_module, name_of
from torchloom.capture import WeaveHooks, compile_with_aot, compile_with_inductor
from torchloom.costs import CostTable
from torchloom.deepcompile.site import Book
from torchloom.errors import AgreementError, PassError, PeerLostError, own_error
from torchloom.graph import GraphPass, PassContext, graph_digest
from torchloom.log import get_logger
from torchloom.memory import distinct_bytes
from torchloom.pipeline.keys import common_key_of, facts_of
from torchloom.pipeline.report import CompilePhase, CompileReport, GraphReport, log_phase, tell_peak
from torchloom.pipeline.rounds import compile_within_budget
from torchloom.pipeline.second_plan import SecondPlan
from torchloom.pipeline.shared_plan import Alike, Texts, parameters_of
from torchloom.pipeline.sizes import Sizes
from torchloom.plan import GraphPlan, Plan, Planner
from torchloom.position import POSITION
from torchloom.shard.direct_uses import check_captured
from torchloom.shard.regather import LIVE
from torchloom.shard.writes import check_graph

logger = get_logger(__name__)


@dataclass(eq=False)  # Dynamo compares backends to tell compiled entries apart
class CompileSession:
    """Compiles the graphs of one module.

    Example:
        >>> session = CompileSession(passes=(), context=PassContext(world_size=1), backend="eager")
        >>> model.compile(backend=session)  # doctest: +SKIP
    """

    passes: Sequence[GraphPass]
    context: PassContext
    backend: str | Callable[..., Any] = "inductor"
    """"inductor", "aot_eager", "eager", or any registered name or callable."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Inductor settings."""
    regions: bool = True
    """Compile equal layers once, as one body."""
    strict: bool = False
    """Raise when weaving fails, instead of running eagerly."""
    regather: bool = False
    """Whether a graph that fell back saves shards for backward, not gathered weights (stage 3)."""
    dump_dir: Path | None = None
    """Folder for the text of each graph before and after each pass; passes then always run."""
    announce: bool = True
    """Whether this rank says in the log that a graph fell back."""
    tell_phases_every_s: float | None = None
    """Seconds after which the log says what a compile is busy with, again and again; None: never."""
    debug_log: bool = False
    """Log each pass, not only when debugging."""
    tell: Callable[[str, str, str], None] | None = None
    """Called with a graph's key, its outcome (equal on all ranks that compile it), and that in words."""
    trial: SecondPlan | None = None
    """A second plan that is being compiled for the first time."""
    planner: Planner | None = None
    """Chooses what backward computes again; None leaves it to torch's partitioner."""
    alike: Alike | None = None
    """Lets ranks whose batches differ in size plan alike."""
    book: Book = field(default_factory=Book)
    """What custom passes are told of the model and of all graphs."""
    standing: events.StandingFound | None = None
    """Memory used outside the graphs; emitted with each compiled graph if a recorder listens."""
    before_forward: Callable[[tuple[Any, ...], Mapping[str, Any]], None] | None = None
    """Called with the arguments of each call of the module before it."""
    backward_at_once: bool = False
    """Whether backward is compiled with forward, before anything runs: a simulation runs nothing."""
    keeps: object = None
    """Objects that woven graphs need while they run; the session keeps them alive."""
    report: CompileReport = field(default_factory=CompileReport)
    _rounds: list[int] = field(default_factory=lambda: [0])
    """Where in the report each compile of the module begins."""
    _given_up: list[tuple[int, int]] = field(default_factory=list)
    """Which graphs of the report belong to second plans that were given up."""
    _woven: list[tuple[frozenset[str], frozenset[str]]] = field(default_factory=list)
    """For each compiled graph: its parameters, and the resident ones when it was compiled."""

    _sizes: Sizes = field(default_factory=Sizes)
    _phase_end: threading.Event = field(default_factory=threading.Event)
    """Ends what the log says of the phase now."""

    def __call__(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], **_: Any
    ) -> Callable[..., Any]:
        """Compile one captured graph: the signature of a torch.compile backend."""
        name = f"graph{len(self.report.graphs)}"
        report = GraphReport(
            name, len(gm.graph.nodes), name_of(self.backend), graph_digest(gm.graph)
        )
        report.batch_bytes = _batch_bytes(example_inputs)
        report.graph_id = self.book.page(report.digest).graph_id
        self.report.graphs.append(report)
        events.emit(events.CompileStarted(graph=name, num_nodes=report.num_nodes))
        try:
            with POSITION.doing(f"compiling {name}"):
                compiled = self._compile_graph(gm, example_inputs, report)
        except Exception as error:  # passes and compilers raise anything; re-raised below
            if is_restart(error):
                self.report.graphs.pop()  # Dynamo drops this capture and captures again
            raise
        finally:
            self.tell_phase("", name)
        return LIVE.apart(compiled) if self.regather else compiled

    def tell_phase(self, name: str, graph: str) -> None:
        """Note what a compile is busy with; see `CompileReport.phase`."""
        self._phase_end.set()
        self.report.phase = CompilePhase(name, graph, time.monotonic()) if name else None
        if self.report.phase is not None and self.tell_phases_every_s is not None:
            self._phase_end = log_phase(self.report.phase, self.tell_phases_every_s)

    def _compile_graph(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], report: GraphReport
    ) -> Callable[..., Any]:
        check_graph(gm)
        check_captured(gm, self.context.world_size)
        started = time.perf_counter()
        unwoven = copy_graph_module(gm)  # compilers may rewrite the original
        if self.trial is None:
            compiled = self._weave(gm, unwoven, example_inputs, report)
        else:
            compiled = self._weave_on_trial(self.trial, unwoven, example_inputs, report)
        self._sizes.count(report.name, unwoven.graph)
        if self.tell is not None:
            words = f"runs {report.name} woven"
            if report.fallback is not None:
                words = f"runs {report.name} eagerly, as {report.fallback.splitlines()[0]}"
            state = "woven" if report.fallback is None else "eager"
            self.tell(f"{report.digest} {self.round_key}", state, words)
        report.duration_s += time.perf_counter() - started
        _tell_memory(report, self.standing)
        events.emit(
            events.CompileFinished(
                graph=report.name, duration_s=report.duration_s, from_cache=report.from_cache
            )
        )
        return compiled

    def _weave(
        self,
        gm: fx.GraphModule,
        unwoven: fx.GraphModule,
        example_inputs: Sequence[Any],
        report: GraphReport,
        *,
        is_trial: bool = False,
    ) -> Callable[..., Any]:
        """Compile one graph; ranks that capture it together follow one plan.

        Raises:
            Exception: whatever a compiler raises; and what passes raise, with `strict` or on trial.
        """
        alike, planner = self.alike, self.planner
        if alike is not None and planner is not None:
            alike.before(gm, example_inputs, report, planner)
        try:
            known = frozenset(self.book.residents)
            compiled = compile_within_budget(
                self, self._compile, gm, unwoven, example_inputs, report
            )
            self._woven.append((frozenset(self.book.page(report.digest).params.values()), known))
        except Exception as error:  # a user's pass or a compiler may raise anything
            if is_restart(error):
                raise
            if is_trial and alike is not None and planner is not None:
                alike.after(report, planner)  # others may wait for this rank's plan
            if self.strict or is_trial or not isinstance(own_error(error), PassError):
                raise
            compiled = self._fall_back(unwoven, report, error)
        if alike is not None and planner is not None:
            alike.after(report, planner)
        return compiled

    def _weave_on_trial(
        self,
        trial: SecondPlan,
        unwoven: fx.GraphModule,
        example_inputs: Sequence[Any],
        report: GraphReport,
    ) -> Callable[..., Any]:
        """Compile one graph by the second plan; if that fails on any rank, by the first; else run it eagerly."""
        alike, planner = self.alike, self.planner
        assert alike is not None and planner is not None, "a second plan without a planner"
        params = parameters_of(unwoven.graph)
        is_shared = alike.is_shared(unwoven.graph) or params in trial.restarted
        kinds, plans = alike.remember(), planner.remember()
        first, failure = trial.plans.costs, None
        all_figures = (first,) if trial.is_refused else (plans.costs, first)
        for number, figures in enumerate(all_figures):
            planner.restore(replace(plans, costs=figures))
            if is_shared and number:
                alike.restore(kinds, without=unwoven.graph)
            compiled = failure = None
            try:
                gm = copy_graph_module(unwoven)
                compiled = self._weave(gm, unwoven, example_inputs, report, is_trial=True)
            except (AgreementError, PeerLostError):
                raise
            except Exception as error:  # a second plan may make a pass or a compiler raise anything
                if is_restart(error):  # all ranks that capture this graph restart
                    trial.restarted |= {params} if is_shared else set()
                    raise
                failure = error
                trial.failed(error)
            # A graph that is not shared sends nothing, or is a later capture in other sizes: ranks do not compare.
            is_fine = trial.compare(report.name, failure) if is_shared else failure is None
            if is_fine and compiled is not None:
                break
        else:
            report.plan = None
            failure = failure or PassError("another rank cannot compile it")
            compiled = self._fall_back(unwoven, report, failure)
        trial.restarted.discard(params)
        trial.compiled()
        if not is_shared:
            planner.costs = plans.costs  # later graphs plan by these
        return compiled

    def start_second(self, texts: Texts, first: CostTable, keep: Callable[[], None]) -> None:
        """Make the next compile that `begin` starts a trial of a second plan; `return_to_first` undoes it.

        Args:
            texts: tells all ranks a text.
            first: the figures of the first plan.
            keep: is called once the second plan has been compiled on all ranks.
        """
        assert self.planner is not None, "a second plan without a planner"
        plans = replace(self.planner.remember(), costs=first)
        kinds = None if self.alike is None else self.alike.remember()
        self.trial = SecondPlan(texts, plans, kinds, list(self._woven), keep)

    def conclude_second(self) -> Literal["open", "kept", "refused"] | None:
        """Decide with all ranks, between two steps, what becomes of a second plan; None: there is none.

        All ranks must call. A plan that is kept is no longer on trial; where it is refused, the caller lets
        the first plan's code run again and calls `return_to_first`.
        """
        if self.trial is None:
            return None
        became = self.trial.conclude()
        if became == "kept":
            self.trial = None
        return became

    def return_to_first(self) -> None:
        """Restore the state before a second plan, whose code is no longer called."""
        trial, self.trial = self.trial, None
        assert trial is not None and self.planner is not None, "no second plan"
        self.planner.restore(trial.plans)
        if self.alike is not None and trial.kinds is not None:
            self.alike.restore(trial.kinds)
        self._woven[:] = trial.woven
        self._given_up.append((self._rounds.pop(), len(self.report.graphs)))
        self.book.start_over(forget=False)

    @property
    def is_outdated(self) -> bool:
        """Whether a pass made a parameter resident after a graph that reads it was compiled."""
        residents = self.book.residents
        return any(params & (residents - known) for params, known in self._woven)

    def plan(self) -> Plan:
        """Return the plan of what has been compiled so far; without graphs before the first call."""
        standing = self.standing
        return Plan(
            world_size=self.context.world_size,
            budget_bytes=None if standing is None else standing.budget_bytes,
            base_bytes=0 if standing is None else standing.base_bytes,
            optimizer_bytes=0 if standing is None else standing.step_bytes,
            graphs=self.plans,
        )

    @property
    def plans(self) -> tuple[GraphPlan, ...]:
        """Plans of the graphs that run now: those of the latest compile that captured any graph."""
        graphs = self.report.graphs
        void = {index for start, end in self._given_up for index in range(start, end)}
        ends = [*self._rounds[1:], len(graphs)]
        for start, end in zip(reversed(self._rounds), reversed(ends), strict=True):
            if found := [graphs[index] for index in range(start, end) if index not in void]:
                return tuple(each.plan for each in found if each.plan is not None)
        return ()

    def begin(self, passes: Sequence[GraphPass] | None = None) -> Callable[..., Any]:
        """Return a backend for one compile of the module, with other passes if given.

        Dynamo keys its entries by backend: under a new backend object it captures the module again, and
        entries of other functions stay.
        """
        if passes is not None:
            self.passes = passes
        self.__dict__.pop("_common_key", None)
        if self.planner is not None:
            self.planner.forget()
        if self.alike is not None:
            self.alike.start_over()
        self.book.start_over(forget=passes is not None)
        self._woven.clear()
        self._sizes.start_over()
        self._rounds.append(len(self.report.graphs))
        return _Round(self)

    def close(self) -> None:
        """Release the model, its optimizer and the objects that woven graphs kept; Dynamo may keep the code."""
        self.keeps = self.planner = self.alike = self.trial = self.before_forward = None
        self.book = Book()

    def _compile(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], hooks: WeaveHooks
    ) -> Callable[..., Any]:
        if self.backend == "eager":
            return gm.forward
        if self.backend == "inductor":
            return compile_with_inductor(gm, example_inputs, hooks, self.options)
        if self.backend == "aot_eager":
            return compile_with_aot(gm, example_inputs, hooks)
        lower = self.backend
        if isinstance(lower, str):
            lower = lookup_backend(lower)
        return compile_with_aot(gm, example_inputs, hooks, lower)

    @property
    def compiler_name(self) -> str:
        """What torch calls this backend in its messages."""
        return f"torchloom({name_of(self.backend)})"

    @cached_property
    def _common_key(self) -> str:
        return common_key_of(self, self.context)

    @property
    def round_key(self) -> str:
        """Equal on ranks that compile the same: passes and facts, and the number of compiles so far."""
        return f"{self._common_key} {len(self._rounds)}"

    @property
    def facts(self) -> dict[str, object]:
        """Return the parts of the key by name, so that ranks can name those that differ."""
        return facts_of(self, self.context)

    def _fall_back(
        self, gm: fx.GraphModule, report: GraphReport, error: Exception
    ) -> Callable[..., Any]:
        cause = own_error(error) or error
        report.fallback = f"{type(cause).__name__}: {cause}"
        first_line = str(cause).splitlines()[0]
        if self.announce and len(self.report.fallbacks) == 1:
            logger.warning(
                "weaving failed, the model runs eagerly sharded (correct, slower): %s. "
                "Set compile.strict to make this an error",
                first_line,
            )
        events.emit(events.PassesSkipped(reason=first_line))
        if not self.regather:
            return gm.forward

        def run(*args: Any) -> Any:
            with LIVE.forward_pass():
                return gm.forward(*args)

        return run


class _Round:
    """One compile of a module by a session: what Dynamo knows as the backend."""

    def __init__(self, session: CompileSession) -> None:
        self._session = session
        self.compiler_name = session.compiler_name

    def __call__(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any
    ) -> Callable[..., Any]:
        return self._session(gm, example_inputs, **options)


def _tell_memory(report: GraphReport, standing: events.StandingFound | None) -> None:
    """Emit the plan, what is alive at the peak, and the memory used outside the graphs."""
    if not events.is_heard():
        return
    if standing is not None:
        events.emit(standing)
    if report.plan is not None:
        events.emit(
            events.GraphPlanned(
                graph=report.name,
                plan=asdict(report.plan),
                planning_s=report.planning_s,
                num_tries=report.num_tries,
            )
        )
    tell_peak(report)


def _batch_bytes(inputs: Sequence[Any]) -> int:
    """Return the bytes of a graph's inputs that are neither parameters nor buffers."""
    return distinct_bytes(
        each for each in inputs if isinstance(each, Tensor) and not lives_on(each)
    )
