"""The pass manager: runs passes, and owns everything that is the same for all of them.

Lint, the check of order, timing, before/after text, events and the error that names pass and node live here; a pass
holds its rewrite alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import fx

from torchloom import events
from torchloom._torch import introspect
from torchloom.errors import PassError
from torchloom.files import write_whole
from torchloom.graph import (
    GraphPass,
    PassContext,
    graph_text,
    live_bytes,
    op_counts,
    record_values,
)
from torchloom.log import get_logger
from torchloom.pipeline.keys import is_built_in
from torchloom.pipeline.races import check_races
from torchloom.pipeline.report import GraphReport, PassReport
from torchloom.races import reductions_of, schedule_of

logger = get_logger(__name__)


@dataclass
class PassManager:
    """Runs the passes of one stage over graphs."""

    passes: Sequence[GraphPass]
    context: PassContext
    dump_dir: Path | None = None
    log_level: int = logging.DEBUG
    is_trial: bool = False
    """A trial on a copy that nobody will run: without events and without lint."""

    def run(self, gm: fx.GraphModule, context: PassContext, name: str, into: GraphReport) -> None:
        """Run every pass over `gm` in place.

        Args:
            gm: the graph; recompiled when all passes have run.
            context: what the passes may know.
            name: the graph's name in reports and dumps, e.g. `"graph0.forward"`.
            into: receives one record per pass.

        Raises:
            PassError: a pass raised or broke the graph, left a race open or a gradient not reduced once; the text holds
                pass, node and graph.
        """
        if self.is_trial:
            for each in self.passes:
                _run_one(each, gm, context, name, None)
            return
        self._dump(gm, name, 0, "captured")
        # Transfers are placed by lowered passes; joint ones of ours keep gradients as they are.
        is_checked = any(each.stage == "lowered" or not is_built_in(each) for each in self.passes)
        captured = reductions_of(schedule_of(gm.graph)) if is_checked else None
        changed: list[str] = []
        after = graph_text(gm.graph)
        for index, each in enumerate(self.passes, start=1):
            before = after
            started = time.perf_counter()
            num_edits = _run_one(each, gm, context, name, before)
            duration = time.perf_counter() - started
            after = graph_text(gm.graph)
            into.passes.append(PassReport(each.name, name, num_edits, duration))
            if events.is_heard():
                edited = num_edits > 0
                events.emit(
                    events.PassRan(
                        name=each.name,
                        stage=each.stage,
                        graph=name,
                        num_edits=num_edits,
                        duration_s=duration,
                        compile_id=introspect.current_compile_id(),
                        before=before if edited else None,
                        after=after if edited else None,
                        curve=live_bytes(gm.graph),
                    )
                )
            logger.log(
                self.log_level,
                "%s: pass %s made %d edits in %.1f ms",
                name,
                each.name,
                num_edits,
                1e3 * duration,
            )
            if after != before:
                self._dump(gm, name, index, each.name)
                changed.append(each.name)
            # Passes of ours that follow each other are checked together: that takes a third of the time.
            near = self.passes[index - 1 : index + 1]
            is_end = index == len(self.passes) or not all(map(is_built_in, near))
            if changed and is_end and captured is not None:
                check_races(gm, name, "', '".join(changed), captured)
                changed = []
        gm.recompile()
        kind = name.rsplit(".", 1)[-1]
        for op, count in op_counts(gm.graph).items():
            if op.startswith("torchloom."):
                into.collectives[f"{kind} {op}"] = count

    def _dump(self, gm: fx.GraphModule, name: str, index: int, label: str) -> None:
        if self.dump_dir is not None:
            path = self.dump_dir / f"{name}.{index:02d}.{label}.txt"
            write_whole(path, graph_text(gm.graph))


def _run_one(
    each: GraphPass, gm: fx.GraphModule, context: PassContext, name: str, before: str | None
) -> int:
    """Run a pass; `before` is the graph's text, None for a trial."""
    try:
        if each.memory_budget_bytes is not None:
            context = replace(context, memory_budget_bytes=each.memory_budget_bytes)
        num_edits = each(gm, context)
        if before is not None:
            gm.graph.lint()
        if not is_built_in(each):
            record_values(gm.graph)
    except Exception as error:  # a pass, also a user's own, may raise anything
        after = graph_text(gm.graph)
        raise PassError(
            f"pass {each.name!r} broke graph {name!r} ({_culprit(error, gm)}): {error}\n"
            "Disable it with compile.disable_passes, or fix it.\n"
            + ("" if before is None else f"--- before\n{before}")
            + f"--- after\n{after}"
        ) from error
    return num_edits


def _culprit(error: Exception, gm: fx.GraphModule) -> str:
    """Name the first node that the error's text mentions."""
    text = str(error)
    for node in gm.graph.nodes:
        if node.name in text:
            return f"at node %{node.name}"
    return f"{type(error).__name__}"
