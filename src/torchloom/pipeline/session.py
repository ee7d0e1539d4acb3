"""A compile session: everything that one compiled module owns.

The session is the backend that `torch.compile` calls with each captured graph. It runs the passes
through whichever route the wanted backend needs, and falls back to the eager sharded model, once
announced, when weaving fails.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor, fx

from torchloom import _torch, events
from torchloom.backends import lookup_backend
from torchloom.backends.graphs import copy_graph_module, name_of
from torchloom.capture import WeaveHooks, compile_with_aot, compile_with_inductor
from torchloom.errors import PassError, PlanError, own_error
from torchloom.graph import GraphPass, PassContext, graph_digest
from torchloom.log import get_logger
from torchloom.pipeline.report import CompileReport, GraphReport
from torchloom.pipeline.sidecar import calling_text
from torchloom.pipeline.site import Book
from torchloom.pipeline.weaving import Weaving, facts_of, key_of
from torchloom.plan import GraphPlan, Planner
from torchloom.plan.memory import distinct_bytes
from torchloom.position import POSITION
from torchloom.shard.regather import LIVE

logger = get_logger(__name__)

_MAX_ROUNDS = 4

ChooseKernels = Callable[[fx.GraphModule, Sequence[Any]], tuple[tuple[str, str], ...]]


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
    strict: bool = False
    """Raise when weaving fails, instead of running eagerly."""
    regather: bool = False
    """Whether a graph that fell back saves pieces for backward, not gathered weights (stage 3)."""
    dump_dir: Path | None = None
    """Folder for the text of each graph before and after each pass; passes then always run."""
    announce: bool = True
    """Whether this rank says in the log that a graph fell back."""
    debug_log: bool = False
    """Log each pass, not only when debugging."""
    tell: Callable[[str, str, str], None] | None = None
    """Is told what became of a graph: what must be equal on ranks that compile it, and in words."""
    planner: Planner | None = None
    """Chooses what backward computes again; None leaves it to torch's partitioner."""
    choose_kernels: ChooseKernels | None = None
    """Says which products of a graph run on which implementation, where a pass asks for it."""
    book: Book = field(default_factory=Book)
    """What custom passes are told of the model and of all graphs."""
    keeps: object = None
    """What woven graphs need when they run, kept as long as they may."""
    report: CompileReport = field(default_factory=CompileReport)
    _rounds: list[int] = field(default_factory=lambda: [0])
    """Where in the report each compile of the module begins."""
    _woven: list[tuple[frozenset[str], frozenset[str]]] = field(default_factory=list)
    """Of each compiled graph: its parameters, and the residents that it knows."""

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
        with POSITION.doing(f"compiling {name}"):
            return self._compile_graph(gm, example_inputs, report)

    def _compile_graph(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], report: GraphReport
    ) -> Callable[..., Any]:
        context = self._context_of(gm, example_inputs)
        started = time.perf_counter()
        unwoven = copy_graph_module(gm)  # compilers may rewrite the original
        try:
            known = frozenset(self.book.residents)
            compiled = self._compile_within_budget(gm, unwoven, example_inputs, report, context)
            self._woven.append((frozenset(self.book.page(report.digest).params.values()), known))
        except Exception as error:
            if self.strict or not isinstance(own_error(error), PassError):
                raise
            compiled = self._fall_back(unwoven, report, error)
        if self.tell is not None:
            words = f"runs {report.name} woven"
            if report.fallback is not None:
                words = f"runs {report.name} eagerly, as {report.fallback.splitlines()[0]}"
            state = "woven" if report.fallback is None else "eager"
            self.tell(f"{report.digest} {self.round_key}", state, words)
        report.duration_s += time.perf_counter() - started
        events.emit(
            events.CompileFinished(
                graph=report.name, duration_s=report.duration_s, from_cache=report.from_cache
            )
        )
        return compiled

    @property
    def is_outdated(self) -> bool:
        """Whether a pass chose residents that a graph compiled before does not know of."""
        residents = self.book.residents
        return any(params & (residents - known) for params, known in self._woven)

    @property
    def plans(self) -> tuple[GraphPlan, ...]:
        """Plans of the graphs that run: of the last compile of the module that has captured some."""
        graphs = self.report.graphs
        ends = [*self._rounds[1:], len(graphs)]
        for start, end in zip(reversed(self._rounds), reversed(ends), strict=True):
            if end > start:
                return tuple(each.plan for each in graphs[start:end] if each.plan is not None)
        return ()

    def begin(self, passes: Sequence[GraphPass] | None = None) -> Callable[..., Any]:
        """Return a backend for one compile of the module, with other passes if given.

        Dynamo tells entries apart by their backend: under a new one everything is captured anew,
        while what other functions have compiled stays.
        """
        if passes is not None:
            self.passes = passes
        self.__dict__.pop("key", None)
        if self.planner is not None:
            self.planner.forget()
        self.book.start_over(forget=passes is not None)
        self._woven.clear()
        self._rounds.append(len(self.report.graphs))
        return _Round(self)

    def close(self) -> None:
        """Let go of the model, its optimizer and what woven graphs kept; compiled code may live on."""
        self.keeps = self.planner = None
        self.book = Book()

    def _compile_within_budget(
        self,
        gm: fx.GraphModule,
        unwoven: fx.GraphModule,
        example_inputs: Sequence[Any],
        report: GraphReport,
        context: PassContext,
    ) -> Callable[..., Any]:
        """Compile, and again while the plan did not foresee what the compiler's code needs."""
        best: tuple[GraphPlan, Callable[..., Any], GraphReport] | None = None
        least, refusal, planner = 0, "", self.planner
        before: list[tuple[str, float]] = []
        calling = calling_text(example_inputs)
        ignores_caches = False
        for _ in range(_MAX_ROUNDS):
            own = replace(report, compile_s=[], passes=[], collectives={})
            weaving = Weaving(self, own, context, calling, ignores_caches)
            compiled = self._compile(gm, example_inputs, weaving.hooks())
            weaving.finish()
            if weaving.lacks_plan:  # nothing says that cached code keeps the budget
                ignores_caches, gm = True, copy_graph_module(unwoven)
                continue
            plan = own.plan
            if plan is None or planner is None:
                report.take(own)
                return compiled
            needed = plan.peak_bytes + plan.beside_bytes
            least = min(least or needed, needed)
            if plan.budget_bytes is not None:
                refusal = planner.refusal(plan.budget_bytes + plan.beside_bytes, least)
            if plan.fits and (best is None or plan.step_us < best[0].step_us):
                best = plan, compiled, own
            if not weaving.wants_another:
                break
            before += own.compile_s
            gm = copy_graph_module(unwoven)
        if best is None or planner is None:
            raise PlanError(refusal)
        plan, compiled, own = best
        planner.settle(plan)
        own.compile_s[:0] = before
        report.take(own)
        return compiled

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
    def key(self) -> str:
        """Hash of all that woven graphs depend on besides the captured graph."""
        return key_of(self, self.context)

    @property
    def round_key(self) -> str:
        """The key, and how often the module has been compiled anew: ranks do so at equal steps."""
        return f"{self.key} {len(self._rounds)}"

    @property
    def facts(self) -> dict[str, object]:
        """Return by name what the key is made of, for ranks to compare in words."""
        return facts_of(self, self.context)

    def _context_of(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> PassContext:
        """Return what passes may know of one graph; before any pass runs, as ranks may wait here."""
        asks = any(each.name == "choose_kernels" for each in self.passes)
        if self.choose_kernels is None or not asks:
            return self.context
        return replace(self.context, kernels=self.choose_kernels(gm, example_inputs))

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


def _batch_bytes(inputs: Sequence[Any]) -> int:
    """Return the bytes of a graph's inputs that do not live on from step to step."""
    return distinct_bytes(
        each for each in inputs if isinstance(each, Tensor) and not _torch.lives_on(each)
    )
