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
from torchloom import _torch, events
from torchloom.backends import lookup_backend
from torchloom.backends.graphs import copy_graph_module, name_of
from torchloom.capture import WeaveHooks, compile_with_aot, compile_with_inductor
from torchloom.capture.hooks import GraphKind
from torchloom.errors import PassError
from torchloom.graph import GraphPass, PassContext, graph_text
from torchloom.log import get_logger
from torchloom.pipeline import sidecar
from torchloom.pipeline.identity import identity_of
from torchloom.pipeline.manager import PassManager
from torchloom.pipeline.races import check_races
from torchloom.pipeline.report import CompileReport, GraphReport
from torchloom.shard.regather import LIVE

logger = get_logger(__name__)


@dataclass
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
    report: CompileReport = field(default_factory=CompileReport)

    def __call__(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], **_: Any
    ) -> Callable[..., Any]:
        """Compile one captured graph: the signature of a torch.compile backend."""
        name = f"graph{len(self.report.graphs)}"
        report = GraphReport(name, len(gm.graph.nodes), name_of(self.backend), _digest(gm))
        self.report.graphs.append(report)
        events.emit(events.CompileStarted(graph=name, num_nodes=report.num_nodes))
        if self.agree is not None:
            self.agree(f"the captured {name}", report.digest)
        started = time.perf_counter()
        unwoven = copy_graph_module(gm)  # compilers may rewrite the original
        try:
            compiled = self._compile(gm, example_inputs, report)
        except Exception as error:
            if self.strict or _pass_error(error) is None:
                raise
            compiled = self._fall_back(unwoven, report, error)
        report.duration_s += time.perf_counter() - started
        if report.from_cache and self.backend == "inductor":
            report.collectives.update(sidecar.load(self._sidecar_name(report)))
        events.emit(
            events.CompileFinished(
                graph=name, duration_s=report.duration_s, from_cache=report.from_cache
            )
        )
        return compiled

    def _compile(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], report: GraphReport
    ) -> Callable[..., Any]:
        hooks = WeaveHooks(
            joint=lambda joint, kind: self._weave("joint", joint, kind, report),
            lowered=lambda lowered, kind: self._weave("lowered", lowered, kind, report),
            key=self._cache_key(),
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

    @property
    def compiler_name(self) -> str:
        """What torch calls this backend in its messages."""
        return f"torchloom({name_of(self.backend)})"

    @cached_property
    def key(self) -> str:
        """Hash of all that woven graphs depend on besides the captured graph."""
        parts = [
            each.name if _is_built_in(each) else identity_of(each).text for each in self.passes
        ]
        return _torch.hash_files(_sources(), f"{parts}|{self.context.key()}").hex()

    def _cache_key(self) -> str | None:
        """Return the key under which compilers may cache, None where they must not."""
        own = [identity_of(each) for each in self.passes if not _is_built_in(each)]
        if self.dump_dir is not None or not all(identity.is_complete for identity in own):
            return None
        return self.key

    def _sidecar_name(self, report: GraphReport) -> str:
        return f"{report.digest}-{self.key}"

    def _weave(self, stage: str, gm: fx.GraphModule, kind: GraphKind, report: GraphReport) -> None:
        context = dataclasses.replace(self.context, is_backward=kind == "backward")
        passes = [each for each in self.passes if each.stage == stage]
        level = logging.INFO if self.debug_log else logging.DEBUG
        manager = PassManager(passes, context, self.dump_dir, level)
        manager.run(gm, context, f"{report.name}.{kind}", report)
        if stage == "lowered" and self.strict:
            check_races(gm, f"{report.name}.{kind}", [each.name for each in passes])
        if self.backend == "inductor" and kind != "joint":
            sidecar.save(self._sidecar_name(report), report.collectives)

    def _fall_back(
        self, gm: fx.GraphModule, report: GraphReport, error: Exception
    ) -> Callable[..., Any]:
        cause = _pass_error(error) or error
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


def _is_built_in(each: GraphPass) -> bool:
    return torchloom.passes.PASSES.get(each.name) is each


def _digest(gm: fx.GraphModule) -> str:
    """Return a short hash of a captured graph that is equal on ranks that run the same program."""
    return hashlib.blake2b(graph_text(gm.graph).encode(), digest_size=8).hexdigest()


def _pass_error(error: BaseException | None) -> PassError | None:
    """Find our error in the chain: compilers wrap what their hooks raise."""
    while error is not None:
        if isinstance(error, PassError):
            return error
        error = error.__cause__ or error.__context__
    return None


def _sources() -> tuple[str, ...]:
    """Source files of everything that shapes a woven graph."""
    packages = (torchloom.passes, torchloom.graph, torchloom.ops)
    folders = [Path(package.__path__[0]) for package in packages]
    return tuple(sorted(str(path) for folder in folders for path in folder.glob("*.py")))
