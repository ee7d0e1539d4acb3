"""Run a session's passes over one captured graph, and make the keys under which it is cached."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, get_args

from torch import fx

from torchloom import events
from torchloom._torch.aot import copy_graph_module
from torchloom._torch.dynamo import is_restart
from torchloom.backends import lookup_backend
from torchloom.capture import WeaveHooks, compile_with_aot, compile_with_inductor
from torchloom.capture.hooks import GraphKind
from torchloom.capture.recorded import RECORDED
from torchloom.capture.unread import UNREAD, with_stand_ins
from torchloom.config.budget import MemoryBudget
from torchloom.costs.timeline import timeline
from torchloom.deepcompile.forms import adapted_of
from torchloom.deepcompile.site import Spot
from torchloom.errors import RegionError, own_error
from torchloom.graph import Choices, GraphPass, PassContext, digest_of, graph_digest
from torchloom.log import get_logger
from torchloom.memory import (
    Interface,
    alive_at_peak,
    expanded,
    interface_of,
    micro_step,
    replay_peak,
)
from torchloom.memory.measure import device_bytes
from torchloom.passes import PASSES
from torchloom.pipeline import sidecar
from torchloom.pipeline.keys import identity_of, is_built_in
from torchloom.pipeline.manager import PassManager
from torchloom.pipeline.outlining import outline_graph
from torchloom.pipeline.planning import OFFLOAD, SELECTIVE, PlannedSplit
from torchloom.pipeline.registry import option_of
from torchloom.pipeline.report import GraphReport, tell_bodies, tell_peak
from torchloom.pipeline.setup import CompileSetup
from torchloom.regions import Outlined

logger = get_logger(__name__)


@dataclass(eq=False)
class Weaving:
    """Runs a session's passes over the graphs that one captured graph becomes.

    Args:
        setup: the session.
        report: of this graph; filled.
        calling: describes the call (shapes, gradients, autocast), which selects one of several codes.
        ignores_caches: whether the compiler must not take the graphs from its caches.
        flat_because: why equal parts are compiled one by one; empty: they may become calls of one body.
        must_outline: whether equal parts that cannot become calls are an error: to compile them one by one takes
            too long.
        backward_at_once: see `WeaveHooks`.
    """

    setup: CompileSetup
    report: GraphReport
    calling: str
    ignores_caches: bool = False
    flat_because: tuple[str, ...] = ()
    must_outline: bool = False
    backward_at_once: bool = False
    wants_another: bool = False
    """Whether planning again with the measured need of this code may give a better plan."""
    lacks_plan: bool = False
    """Whether the code came from a cache and its plan is no longer known."""
    _woven_here: set[GraphKind] = field(default_factory=set)
    """Kinds of graphs that were woven here; the others came from a cache."""
    _sources: dict[str, str] = field(default_factory=dict)
    _interface: Interface | None = None
    _forward: fx.GraphModule | None = None
    """A copy of the woven forward graph: compilers rewrite the original before backward is woven."""
    _is_finished: bool = False

    def compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile a captured graph, which compilers may rewrite: its equal parts as one body if that can be done."""
        self._tell_phase("trace")
        self._manager("captured").run(
            gm, self._context_of("inference"), f"{self.report.name}.captured", self.report
        )
        captured, unread = list(self.report.passes), gm.meta.get(UNREAD, {})
        outlined = (
            outline_graph(self.setup, gm, example_inputs)
            if not self.flat_because
            else Outlined(gm, reasons=self.flat_because)
        )
        self.report.regions = outlined.calls
        self.report.flat_because = outlined.reasons
        try:
            return with_stand_ins(self._lower(outlined, example_inputs), unread)
        except Exception as error:  # compilers raise anything, also of a body alone
            refusal = own_error(error)
            is_ours = outlined.bodies and isinstance(refusal, RegionError | None)
            if is_restart(error) or not is_ours:
                raise
            if self.must_outline and refusal is not None:
                raise refusal from error
            # What the part is found to do shows while it is traced, which may be inside of torch's trace.
            reason = str(refusal or error).partition("\n")[0]
            level = logging.WARNING if refusal is None else logging.INFO
            logger.log(
                level, "%s: equal parts are compiled one by one: %s", self.report.name, reason
            )
        self.report.regions, self.report.flat_because = (), (*outlined.reasons, reason)
        self.report.passes[:] = captured
        if self.setup.planner is not None and self.report.plan is not None:
            self.setup.planner.drop(self.report.plan)
            self.report.plan = None
        return with_stand_ins(self._lower(Outlined(gm), example_inputs), unread)

    def _lower(self, outlined: Outlined, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile a graph by the route that the wanted backend needs."""
        setup, gm = self.setup, outlined.graph_module
        hooks = self._hooks(outlined)
        if setup.backend == "eager":
            return gm.forward
        if setup.backend == "inductor":
            return compile_with_inductor(gm, inputs, hooks, setup.options)
        if setup.backend == "aot_eager":
            return compile_with_aot(gm, inputs, hooks)
        return compile_with_aot(gm, inputs, hooks, lookup_backend(setup.backend))

    def _hooks(self, outlined: Outlined) -> WeaveHooks:
        bodies, recordings = outlined.bodies, self.setup.recordings
        split = None if self._split is None else functools.partial(self._split, bodies=bodies)

        return WeaveHooks(
            joint=lambda joint, kind: self._weave("joint", joint, kind),
            lowered=lambda lowered, kind: self._weave("lowered", lowered, kind),
            key=None if self.ignores_caches else self._cache_key,
            partition=split,
            compiled=self._compiled,
            # A plan is judged by the code that Inductor writes for both graphs.
            backward_at_once=self.backward_at_once
            or (split is not None and self.setup.backend == "inductor"),
            bodies=bodies,
            halves=self._see_halves,
            phase=self._tell_phase,
            wrap=None if recordings is None else recordings.of_one_graph(self._tell_recorded),
        )

    def _tell_recorded(self, kind: GraphKind, state: str) -> None:
        self.report.cuda_graphs[kind] = state
        name = f"{self.report.name}.{kind}"
        events.emit(events.GraphRecorded(graph=self.report.name, lowered=kind, state=state))
        if state != RECORDED and self.setup.announce:
            logger.warning("compile.cuda_graphs: %s is not recorded: %s", name, state)

    def _see_halves(self, forward: fx.Graph, backward: fx.Graph) -> None:
        self._interface = interface_of(forward, backward)

    def _tell_phase(self, name: str) -> None:
        self.setup.tell_phase(name, self.report.name)

    def finish(self) -> None:
        """Complete the report with what was woven and the peak of the compiled code."""
        report, self._is_finished = self.report, True
        if self.setup.backend != "inductor":
            return
        if report.from_cache:
            for kind in get_args(GraphKind):
                self._recall(kind)
            known = sidecar.load(self._sidecar_name())
            if known is None:
                self.lacks_plan = self.setup.planner is not None and not self.ignores_caches
                return
            report.plan, self.wants_another = known.plan, known.wants_another
            report.peak, report.times = known.peak, known.times
            if known.plan is not None and self.setup.planner is not None:
                self.setup.planner.learn(known.plan)
                self.setup.planner.settle(known.plan)
            return
        if self.setup.backward_at_once:  # a simulation shows it
            report.code = self._sources
        if report.plan is not None or report.code:
            started = time.perf_counter()
            self._weigh()
            report.planning_s += time.perf_counter() - started
        self._remember()

    def _remember(self) -> None:
        decided = sidecar.Decided(
            self.report.plan, self.wants_another, self.report.peak, self.report.times
        )
        sidecar.save(self._sidecar_name(), decided)

    def _replay(self) -> int | None:
        """Return the peak of the code that a compiler wrote for both graphs; None if unknown."""
        if self._interface is None or not {"forward", "backward"} <= self._sources.keys():
            return None
        account = self.setup.book.account
        return replay_peak(
            self._sources["forward"],
            self._sources["backward"],
            self._interface,
            account.workspaces,
            account.transit,
            fetched=() if self._split is None else self._split.fetched,
            is_recorded=self.setup.recordings is not None,
        )

    def _weigh(self) -> None:
        """Replay the code; plan with what it allocates."""
        planner, plan = self.setup.planner, self.report.plan
        peak_bytes = self.report.code_peak_bytes = self._replay()
        if planner is None or plan is None:
            return
        if peak_bytes is None:
            logger.info("%s: the peak is that of the graphs, not of the code", self.report.name)
            return
        least = min(plan.min_peak_bytes, peak_bytes)  # code may need less than any of the graphs
        plan = replace(plan, peak_bytes=peak_bytes, min_peak_bytes=least)
        self.report.plan = plan
        planner.learn(plan)
        self.wants_another = planner.has_another(plan)

    def _compiled(self, kind: GraphKind, seconds: float, source: str | None) -> None:
        if self._is_finished:  # backward is compiled long after the session handed its code over
            self._tell_phase("")
        self.report.compile_s.append((kind, seconds))
        events.emit(
            events.LoweredCompiled(graph=self.report.name, lowered=kind, duration_s=seconds)
        )
        if source is not None:
            self._sources[kind] = source
        if kind not in self._woven_here:  # a cache held this graph alone
            self._recall(kind)

    def _recall(self, kind: GraphKind) -> None:
        """Report what the sidecar file says of a graph that came from a cache."""
        known = sidecar.load_collectives(self._sidecar_name(), kind)
        self.report.collectives.update(known)

    @cached_property
    def _key(self) -> str:
        planner = self.setup.planner
        return self.setup.key("" if planner is None else planner.key)

    @cached_property
    def _cache_key(self) -> str | None:
        """The key under which compilers may cache, as it was first computed; None if they must not cache."""
        own = [identity_of(each) for each in self.setup.passes if not is_built_in(each)]
        if self.setup.dump_dir is not None or not all(identity.is_complete for identity in own):
            return None
        return f"{self._key}-{','.join(sorted(self.setup.book.residents))}"

    def _sidecar_name(self) -> str:
        text = f"{self._cache_key or self._key} {self.calling}"
        key = digest_of(text, 16)
        return f"{self.report.digest}-{key}"

    def _weave(self, stage: str, gm: fx.GraphModule, kind: GraphKind) -> None:
        setup, report = self.setup, self.report
        page = setup.book.page(report.digest)
        if stage == "joint":
            page.read_joint(gm, kind == "joint", setup.context.handle or None)
        context = replace(self._context_of(kind), params=dict(page.params))
        budget_bytes = MemoryBudget().resolve(device_bytes())
        spot = Spot(setup.book, page, setup.context.world_size, budget_bytes, report.batch_bytes)
        manager = self._manager(stage, spot)
        manager.run(gm, context, f"{report.name}.{kind}", report)
        spot.leave(gm, context)
        if stage == "lowered" and setup.tell is not None and _see_beyond(setup.passes):
            # Such passes may read anything, so only their author can make them do the same on all ranks.
            residents = ",".join(sorted(setup.book.residents))
            state = f"{graph_digest(gm.graph)} {residents}"
            words = f"wove {report.name}.{kind} into {len(gm.graph.nodes)} nodes ({state.strip()})"
            setup.tell(f"{report.digest} {kind} {setup.round_key}", state, words)
        self._woven_here.add(kind)
        if stage == "lowered" and events.is_heard():
            tell_bodies(gm.graph, f"{report.name}.{kind}")
        if stage == "lowered" and (
            events.is_heard() or setup.planner is not None or setup.backward_at_once
        ):
            self._find_peak(gm, kind, page.params)
        if setup.backend == "inductor":
            own = {k: n for k, n in report.collectives.items() if k.startswith(f"{kind} ")}
            sidecar.save_collectives(self._sidecar_name(), kind, own)

    def _manager(self, stage: str, spot: Spot | None = None) -> PassManager:
        """Return what runs the passes of a stage, those of another form at a spot."""
        passes = self._passes_of(stage)
        if spot is not None:
            passes = [_bound(each, spot) for each in passes]
        level = logging.INFO if self.setup.debug_log else logging.DEBUG
        return PassManager(passes, self.setup.dump_dir, level)

    def report_to(self, report: GraphReport) -> None:
        """Hand over what was reported so far; a backward that is compiled later adds its part there."""
        report.take(self.report)
        self.report = report

    def _find_peak(self, gm: fx.GraphModule, kind: GraphKind, params: Mapping[str, str]) -> None:
        """Record what is alive at the peak, once both graphs are woven; a failure here never stops the compile."""
        if kind == "forward":
            self._forward = copy_graph_module(gm)
        setup, forward, planner = self.setup, self._forward, self.setup.planner
        account = setup.book.account
        if kind != "backward" or forward is None:
            return
        self._forward = None
        passes = {each.name: each for each in setup.passes}
        try:
            self.report.times = timeline(
                (forward.graph, gm.graph),
                setup.book.table,
                setup.context.world_size,
                copies=setup.context.copies,
                gathers_per_use=1.0 if planner is None else 1 / planner.micro_steps,
                bucket_bytes=option_of(passes, "bucket", "gather_bytes"),
            )
            graphs = expanded(forward.graph), expanded(gm.graph)
            if setup.backward_at_once:  # a simulation: its peak is all that is known of the step
                account.workspaces.probe(node for graph in graphs for node in graph.nodes)
            step = micro_step(
                *graphs,
                is_recorded=setup.recordings is not None,
                probe=account.workspaces,
                transit=account.transit,
                keeps_lives=True,
            )
            self.report.peak = alive_at_peak(*graphs, step, params)
        except Exception as error:  # noqa: BLE001  a report only: whatever it raises, go on compiling
            logger.warning(
                "%s: what is alive at the peak cannot be told: %s", self.report.name, error
            )
            return
        if (
            self._is_finished
        ):  # the session has emitted this before: backward is compiled later, when it runs
            if setup.backend == "inductor":
                self._remember()
            tell_peak(self.report)

    @cached_property
    def _split(self) -> PlannedSplit | None:
        if self.setup.planner is None:
            return None
        report = self.report

        def lower(gm: fx.GraphModule, kind: GraphKind, choices: Choices) -> None:
            # Users' passes may have side effects, so trials run only built-in passes.
            passes = [each for each in self._passes_of("lowered") if is_built_in(each)]
            trial = GraphReport(f"{report.name}.trial", 0, "", "")
            context = replace(
                self._context_of(kind),
                choices=choices,
                params=self.setup.book.page(report.digest).params,
            )
            PassManager(passes, is_trial=True).run(gm, context, f"trial.{kind}", trial)

        return PlannedSplit(
            self.setup.planner,
            self.setup.context,
            lower,
            report,
            {each.name: each for each in self.setup.passes},
            self._tell_phase,
            self.setup.recordings is not None,
        )

    def _context_of(self, kind: GraphKind) -> PassContext:
        return replace(
            self.setup.context,
            is_backward=kind == "backward",
            choices=self._choices(),
        )

    def _passes_of(self, stage: str) -> list[GraphPass]:
        """Return the passes of a stage; `selective_gather` runs last, as passes before it choose residents."""
        found = [each for each in self.setup.passes if each.stage == stage]
        if stage == "joint" and self._split is not None:
            found = [
                each for each in found if each.name != OFFLOAD
            ]  # the plan itself offloads what it names
        if stage == "lowered" and self.setup.book.residents:
            found = [each for each in found if each.name != SELECTIVE]
            found.append(PASSES[SELECTIVE])
        return found

    def _choices(self) -> Choices | None:
        """Return what the plan chose, and the residents that passes asked for."""
        plan, asked = self.report.plan, frozenset(self.setup.book.residents)
        choices = self.setup.context.choices
        if plan is None and not asked:
            return choices
        choices = choices or Choices()
        if plan is not None:
            choices = replace(
                choices,
                resident=frozenset(plan.resident),
                bucket_bytes=plan.bucket_bytes,
                prefetch_bytes=plan.prefetch_bytes,
            )
        return replace(choices, resident=choices.resident | asked)


def _bound(each: GraphPass, spot: Spot) -> GraphPass:
    """Bind a pass of another form to the place where it runs."""
    adapted = adapted_of(each)
    return each if adapted is None else replace(each, fn=adapted.at(spot.argument))


def _see_beyond(passes: Sequence[GraphPass]) -> bool:
    adapted = (adapted_of(each) for each in passes)
    return any(each is not None and each.sees_beyond_its_graph for each in adapted)
