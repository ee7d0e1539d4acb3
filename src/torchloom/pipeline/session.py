"""A compile session: everything that one compiled module owns.

The session is the backend that `torch.compile` calls with each captured graph. It runs the passes
through the route that the wanted backend needs. If weaving fails, it logs that and falls back to the
eager sharded model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from torch import Tensor, fx

from torchloom import events
from torchloom._torch.aot import copy_graph_module
from torchloom._torch.dynamo import is_restart
from torchloom._torch.tensors import lives_on
from torchloom.backends.graphs import name_of
from torchloom.costs import CostTable
from torchloom.deepcompile.site import Book
from torchloom.errors import AgreementError, PassError, PeerLostError, own_error
from torchloom.graph import GraphPass, graph_digest
from torchloom.log import get_logger
from torchloom.memory import distinct_bytes
from torchloom.pipeline.ragged import CaptureCounts, Replan, SharedPlan, Texts, parameters_of
from torchloom.pipeline.report import GraphReport, tell_peak
from torchloom.pipeline.rounds import compile_within_budget
from torchloom.pipeline.setup import CompileSetup
from torchloom.plan import GraphPlan, Plan
from torchloom.position import POSITION
from torchloom.shard.direct_uses import check_captured
from torchloom.shard.regather import LIVE
from torchloom.shard.writes import WRITES, check_graph, handed_out


@dataclass(eq=False)  # Dynamo compares backends to tell compiled entries apart
class CompileSession(CompileSetup):
    """Compiles the graphs of one module.

    Example:
        >>> session = CompileSession(passes=(), context=PassContext(world_size=1), backend="eager")
        >>> model.compile(backend=session)  # doctest: +SKIP
    """

    trial: Replan | None = None
    """A second plan that is being compiled for the first time."""
    shared_plan: SharedPlan | None = None
    """Lets ranks whose batches differ in size follow one plan."""
    standing: events.StandingFound | None = None
    """Memory used outside the graphs; emitted with each compiled graph if a recorder listens."""
    before_forward: Callable[[tuple[Any, ...], Mapping[str, Any]], None] | None = None
    """Called with the arguments of each call of the module before it."""
    keeps: object = None
    """Objects that woven graphs need while they run; the session keeps them alive."""
    _woven: list[tuple[frozenset[str], frozenset[str]]] = field(default_factory=list)
    """For each compiled graph: its parameters, and the resident ones when it was compiled."""
    _captures: CaptureCounts = field(default_factory=CaptureCounts)

    def __call__(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], **_: Any
    ) -> Callable[..., Any]:
        """Compile one captured graph: the signature of a torch.compile backend."""
        name = f"graph{len(self.report.graphs)}"
        digest = graph_digest(gm.graph)
        report = GraphReport(
            name,
            len(gm.graph.nodes),
            name_of(self.backend),
            digest,
            graph_id=self.book.page(digest).graph_id,
            round=self.round,
            batch_bytes=_batch_bytes(example_inputs) * (1 if self.recordings is None else 2),
        )
        self.report.graphs.append(report)
        copies = handed_out(gm)
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
        compiled = WRITES.noting(compiled, copies)
        return LIVE.apart(compiled) if self.regather else compiled

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
        self._captures.count(report.name, unwoven.graph)
        if self.tell is not None:
            words = f"runs {report.name} woven"
            if report.fallback is not None:
                words = f"runs {report.name} eagerly, as {report.fallback.splitlines()[0]}"
            state = "woven" if report.fallback is None else "eager"
            self.tell(f"{report.digest} {self.round_key}", state, words)
        report.duration_s += time.perf_counter() - started
        _tell_memory(report, self.standing, self.report.owners)
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
        shared, planner = self.shared_plan, self.planner
        if shared is not None and planner is not None:
            shared.before(gm, example_inputs, report, planner)
        try:
            known = frozenset(self.book.residents)
            compiled = compile_within_budget(
                self,
                gm,
                unwoven,
                example_inputs,
                report,
                backward_at_once=self.backward_at_once or self.trial is not None,
            )
            self._woven.append((frozenset(self.book.page(report.digest).params.values()), known))
        except Exception as error:  # a user's pass or a compiler may raise anything
            if is_restart(error):
                raise
            if is_trial and shared is not None and planner is not None:
                shared.after(report, planner)  # others may wait for this rank's plan
            if self.strict or is_trial or not isinstance(own_error(error), PassError):
                raise
            compiled = fall_back(self, unwoven, report, error)
        if shared is not None and planner is not None:
            shared.after(report, planner)
        return compiled

    def _weave_on_trial(
        self,
        trial: Replan,
        unwoven: fx.GraphModule,
        example_inputs: Sequence[Any],
        report: GraphReport,
    ) -> Callable[..., Any]:
        """Compile one graph by the second plan; if that fails on any rank, by the first; else run it eagerly."""
        shared, planner = self.shared_plan, self.planner
        assert shared is not None and planner is not None, "a second plan without a planner"
        params = parameters_of(unwoven.graph)
        is_shared = shared.is_shared(unwoven.graph) or params in trial.restarted
        kinds, plans = shared.remember(), planner.remember()
        first, failure = trial.plans.costs, None
        all_figures = (first,) if trial.is_refused else (plans.costs, first)
        for number, figures in enumerate(all_figures):
            planner.restore(plans._replace(costs=figures))
            if is_shared and number:
                shared.restore(kinds - {params})
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
            compiled = fall_back(self, unwoven, report, failure)
        trial.restarted.discard(params)
        trial.compiled()
        if not is_shared:
            planner.costs = plans.costs  # later graphs plan by these
        return compiled

    def start_replan(self, texts: Texts, first: CostTable, keep: Callable[[], None]) -> None:
        """Make the next compile that `begin` starts a trial of a second plan; `give_up_replan` undoes it.

        Args:
            texts: tells all ranks a text.
            first: the figures of the first plan.
            keep: is called once the second plan has been compiled on all ranks.
        """
        assert self.planner is not None, "a second plan without a planner"
        plans = self.planner.remember()._replace(costs=first)
        kinds = None if self.shared_plan is None else self.shared_plan.remember()
        self.trial = Replan(texts, plans, kinds, list(self._woven), keep)

    def conclude_replan(self) -> Literal["open", "kept", "refused"] | None:
        """Decide with all ranks, between two steps, what becomes of a second plan; None: there is none.

        All ranks must call. A plan that is kept is no longer on trial; where it is refused, the caller lets
        the first plan's code run again and calls `give_up_replan`.
        """
        if self.trial is None:
            return None
        became = self.trial.conclude()
        if became == "kept":
            self.trial = None
        return became

    def give_up_replan(self) -> None:
        """Restore the state before a second plan, whose code is no longer called."""
        trial, self.trial = self.trial, None
        assert trial is not None and self.planner is not None, "no second plan"
        self.planner.restore(trial.plans)
        if self.shared_plan is not None and trial.kinds is not None:
            self.shared_plan.restore(trial.kinds)
        self._woven[:] = trial.woven
        for each in self.report.graphs:
            each.round = 0 if each.round == self.round else each.round
        self.round -= 1
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
        last = max((each.round for each in self.report.graphs), default=0)
        found = (each.plan for each in self.report.graphs if each.round == last > 0)
        return tuple(plan for plan in found if plan is not None)

    def begin(self, passes: Sequence[GraphPass] | None = None) -> None:
        """Forget the last compile of the module: another one begins, with other passes if given."""
        if passes is not None:
            self.passes = passes
        self.__dict__.pop("common_key", None)
        if self.planner is not None:
            self.planner.forget()
        if self.shared_plan is not None:
            self.shared_plan.start_over()
        self.book.start_over(forget=passes is not None)
        self._woven.clear()
        self._forget_recordings()
        self._captures.start_over()
        self.round += 1

    def close(self) -> None:
        """Release the model, its optimizer and the objects that woven graphs kept; Dynamo may keep the code."""
        self._forget_recordings()
        self.keeps = self.planner = self.shared_plan = self.trial = self.before_forward = None
        self.book = Book()

    def _forget_recordings(self) -> None:
        if self.recordings is not None:
            self.recordings.forget()

    @property
    def compiler_name(self) -> str:
        """What torch calls this backend in its messages."""
        return f"torchloom({name_of(self.backend)})"


def _tell_memory(
    report: GraphReport,
    standing: events.StandingFound | None,
    owners: Sequence[events.OwnersChosen],
) -> None:
    """Emit the plan, what is alive at the peak, the memory used outside the graphs, and who owns parameters."""
    if not events.is_heard():
        return
    for each in owners:
        events.emit(each)
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


logger = get_logger(__name__)


def fall_back(
    setup: CompileSetup, gm: fx.GraphModule, report: GraphReport, error: Exception
) -> Callable[..., Any]:
    """Return what runs a captured graph eagerly, with the sharded model's own gathers and reductions.

    Args:
        setup: the session; with its `strict` the error is raised instead, before this is called.
        gm: the graph as it was captured.
        report: of the graph; gets the reason.
        error: why it could not be woven.
    """
    cause = own_error(error) or error
    report.fallback = f"{type(cause).__name__}: {cause}"
    first_line = str(cause).splitlines()[0]
    if setup.announce and len(setup.report.fallbacks) == 1:
        logger.warning(
            "weaving failed, the model runs eagerly sharded (correct, slower): %s. "
            "Set compile.strict to make this an error",
            first_line,
        )
    events.emit(events.PassesSkipped(reason=first_line))
    if not setup.regather:
        return gm.forward

    def run(*args: Any) -> Any:
        with LIVE.forward_pass():
            return gm.forward(*args)

    return run
