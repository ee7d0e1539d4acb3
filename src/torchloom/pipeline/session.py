"""A compile session: everything that one compiled module owns.

The session is the backend that `torch.compile` calls with each captured graph. It runs the passes
through whichever route the wanted backend needs, and falls back to the eager sharded model, once
announced, when weaving fails.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import fx

import torchloom.graph
import torchloom.ops
import torchloom.passes
import torchloom.plan
from torchloom import _torch, events
from torchloom.backends import lookup_backend
from torchloom.backends.graphs import copy_graph_module, name_of
from torchloom.capture import WeaveHooks, compile_with_aot, compile_with_inductor
from torchloom.capture.hooks import GraphKind
from torchloom.errors import PassError, own_error
from torchloom.graph import Choices, GraphPass, PassContext, graph_text
from torchloom.log import get_logger
from torchloom.pipeline import sidecar
from torchloom.pipeline.device import default_budget_bytes
from torchloom.pipeline.forms import adapted_of
from torchloom.pipeline.identity import identity_of
from torchloom.pipeline.manager import PassManager
from torchloom.pipeline.planning import PlannedSplit
from torchloom.pipeline.report import CompileReport, GraphReport
from torchloom.pipeline.site import Book, Spot
from torchloom.plan import Planner
from torchloom.shard.regather import LIVE

logger = get_logger(__name__)

SELECTIVE = "selective_gather"


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
    agree: Callable[[str, str], None] | None = None
    """Compares a text between all ranks and raises where they differ, before a graph runs."""
    planner: Planner | None = None
    """Chooses what backward computes again; None leaves it to torch's partitioner."""
    book: Book = field(default_factory=Book)
    """What custom passes are told of the model and of all graphs."""
    keeps: object = None
    """What woven graphs need when they run, kept as long as they may."""
    report: CompileReport = field(default_factory=CompileReport)
    _woven: list[tuple[frozenset[str], frozenset[str]]] = field(default_factory=list)
    """Of each compiled graph: its parameters, and the residents that it knows."""

    def __call__(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], **_: Any
    ) -> Callable[..., Any]:
        """Compile one captured graph: the signature of a torch.compile backend."""
        name = f"graph{len(self.report.graphs)}"
        report = GraphReport(name, len(gm.graph.nodes), name_of(self.backend), _digest(gm))
        report.graph_id = self.book.page(report.digest).graph_id
        self.report.graphs.append(report)
        events.emit(events.CompileStarted(graph=name, num_nodes=report.num_nodes))
        if self.agree is not None:
            self.agree(f"the captured {name}", report.digest)
        started = time.perf_counter()
        unwoven = copy_graph_module(gm)  # compilers may rewrite the original
        try:
            known = frozenset(self.book.residents)
            compiled = self._compile(gm, example_inputs, report)
            self._woven.append((frozenset(self.book.page(report.digest).params.values()), known))
        except Exception as error:
            if self.strict or not isinstance(own_error(error), PassError):
                raise
            compiled = self._fall_back(unwoven, report, error)
        report.duration_s += time.perf_counter() - started
        if report.from_cache and self.backend == "inductor":
            known = sidecar.load(self._sidecar_name(report))
            report.collectives.update(known.collectives)
            report.plan = known.plan
        events.emit(
            events.CompileFinished(
                graph=name, duration_s=report.duration_s, from_cache=report.from_cache
            )
        )
        return compiled

    @property
    def _sees_beyond(self) -> bool:
        adapted = (adapted_of(each) for each in self.passes)
        return any(each is not None and each.sees_beyond_its_graph for each in adapted)

    @property
    def is_outdated(self) -> bool:
        """Whether a pass chose residents that a graph compiled before does not know of."""
        residents = self.book.residents
        return any(params & (residents - known) for params, known in self._woven)

    def begin(self, passes: Sequence[GraphPass] | None = None) -> Callable[..., Any]:
        """Return a backend for one compile of the module, with other passes if given.

        Dynamo tells entries apart by their backend: under a new one everything is captured anew,
        while what other functions have compiled stays.
        """
        if passes is not None:
            self.passes = passes
            self.__dict__.pop("key", None)
        self.book.start_over(forget=passes is not None)
        self._woven.clear()
        return _Round(self)

    def _compile(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], report: GraphReport
    ) -> Callable[..., Any]:
        hooks = WeaveHooks(
            joint=lambda joint, kind: self._weave("joint", joint, kind, report),
            lowered=lambda lowered, kind: self._weave("lowered", lowered, kind, report),
            key=self._cache_key(),
            partition=self._planned_split(report),
            compiled=lambda kind, seconds: report.compile_s.append((kind, seconds)),
        )
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

    def _planned_split(self, report: GraphReport) -> PlannedSplit | None:
        if self.planner is None:
            return None

        def lower(gm: fx.GraphModule, kind: str) -> None:
            context = dataclasses.replace(
                self.context, is_backward=kind == "backward", choices=self._choices()
            )
            # Passes of others may do more than edit; trials are for those that only do that.
            passes = [each for each in self._passes_of("lowered") if _is_built_in(each)]
            trial = GraphReport(f"{report.name}.trial", 0, "", "")
            PassManager(passes, context, tells=False).run(gm, context, f"trial.{kind}", trial)

        return PlannedSplit(self.planner, self.context, lower, report, report.name)

    @property
    def compiler_name(self) -> str:
        """What torch calls this backend in its messages."""
        return f"torchloom({name_of(self.backend)})"

    @cached_property
    def key(self) -> str:
        """Hash of all that woven graphs depend on besides the captured graph."""
        parts = [
            f"{each.name}/{each.memory_budget_bytes}"
            if _is_built_in(each)
            else identity_of(each).text
            for each in self.passes
        ]
        planned = "" if self.planner is None else self.planner.key
        return _torch.hash_files(_sources(), f"{parts}|{self.context.key()}|{planned}").hex()

    def _cache_key(self) -> str | None:
        """Return the key under which compilers may cache, None where they must not."""
        own = [identity_of(each) for each in self.passes if not _is_built_in(each)]
        if self.dump_dir is not None or not all(identity.is_complete for identity in own):
            return None
        return f"{self.key}-{','.join(sorted(self.book.residents))}"

    def _sidecar_name(self, report: GraphReport) -> str:
        key = hashlib.blake2b((self._cache_key() or self.key).encode(), digest_size=16).hexdigest()
        return f"{report.digest}-{key}"

    def _weave(self, stage: str, gm: fx.GraphModule, kind: GraphKind, report: GraphReport) -> None:
        page = self.book.page(report.digest)
        if stage == "joint":
            page.read_joint(gm, needs_backward=kind == "joint")
        context = dataclasses.replace(
            self.context,
            is_backward=kind == "backward",
            choices=self._choices(),
            params=dict(page.params),
        )
        budget = default_budget_bytes()
        spot = Spot(self.book, page, self.context.world_size, budget)
        passes = [_bound(each, spot) for each in self._passes_of(stage)]
        level = logging.INFO if self.debug_log else logging.DEBUG
        manager = PassManager(passes, context, self.dump_dir, level)
        manager.run(gm, context, f"{report.name}.{kind}", report)
        spot.leave(gm, context)
        if stage == "lowered" and self._sees_beyond and self.agree is not None:
            # Nothing but their own care makes such passes do the same on all ranks.
            residents = ", ".join(sorted(self.book.residents))
            self.agree(f"{report.name}.{kind} as woven", f"{_digest(gm)}, resident: {residents}")
        if self.backend == "inductor" and kind != "joint":
            woven = sidecar.Woven(report.collectives, report.plan)
            sidecar.save(self._sidecar_name(report), woven)

    def _passes_of(self, stage: str) -> list[GraphPass]:
        """Return the passes of a stage; residents that passes ask for are read at the end."""
        found = [each for each in self.passes if each.stage == stage]
        if stage == "lowered" and self.book.residents:
            found = [each for each in found if each.name != SELECTIVE]
            found.append(torchloom.passes.PASSES[SELECTIVE])
        return found

    def _choices(self) -> Choices | None:
        """Return what the plan chose, and the residents that passes asked for."""
        planned = self.context.choices
        if not self.book.residents:
            return planned
        planned = planned or Choices()
        return dataclasses.replace(planned, resident=planned.resident | self.book.residents)

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


def _bound(each: GraphPass, spot: Spot) -> GraphPass:
    """Let a pass of another form know where it runs."""
    adapted = adapted_of(each)
    return each if adapted is None else dataclasses.replace(each, fn=adapted.at(spot))


def _is_built_in(each: GraphPass) -> bool:
    known = torchloom.passes.PASSES.get(each.name)
    return known is not None and known.fn is each.fn


def _digest(gm: fx.GraphModule) -> str:
    """Return a short hash of a captured graph that is equal on ranks that run the same program."""
    return hashlib.blake2b(graph_text(gm.graph).encode(), digest_size=8).hexdigest()


def _sources() -> tuple[str, ...]:
    """Source files of everything that shapes a woven graph."""
    packages = (torchloom.passes, torchloom.graph, torchloom.ops, torchloom.plan)
    folders = [Path(package.__path__[0]) for package in packages]
    return tuple(sorted(str(path) for folder in folders for path in folder.rglob("*.py")))
