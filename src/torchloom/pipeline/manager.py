"""The pass manager: runs passes, and owns everything that is the same for all of them.

Lint, the check of order, timing, before/after text, events and the error that names pass and node live here; a pass
holds its rewrite alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
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
    taken_notes,
)
from torchloom.log import get_logger
from torchloom.pipeline.keys import is_built_in
from torchloom.pipeline.report import GraphReport, PassReport
from torchloom.races import Reductions, find_races, find_unreduced, reductions_of, schedule_of
from torchloom.races.check import Kind

logger = get_logger(__name__)


@dataclass
class PassManager:
    """Runs the passes of one stage over graphs."""

    passes: Sequence[GraphPass]
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
        is_checked = any(
            each.stage == "lowered" or (each.stage == "joint" and not is_built_in(each))
            for each in self.passes
        )
        captured = reductions_of(schedule_of(gm.graph)) if is_checked else None
        changed: list[str] = []
        after = graph_text(gm.graph)
        for index, each in enumerate(self.passes, start=1):
            before = after
            started = time.perf_counter()
            num_edits = _run_one(each, gm, context, name, before)
            duration_s = time.perf_counter() - started
            found = PassReport(each.name, name, num_edits, duration_s, taken_notes(gm))
            after = graph_text(gm.graph)
            if each.stage != "captured" or num_edits or found.notes:
                into.passes.append(
                    found
                )  # of code that comes from a cache nothing is told but this
            self._tell(each, found, gm, before, after)
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
        if kind == "captured":
            return
        for op, count in op_counts(gm.graph).items():
            if op.startswith("torchloom."):
                into.collectives[f"{kind} {op}"] = count

    def _tell(
        self, each: GraphPass, found: PassReport, gm: fx.GraphModule, before: str, after: str
    ) -> None:
        if events.is_heard():
            edited = found.num_edits > 0
            events.emit(
                events.PassRan(
                    **asdict(found),
                    stage=each.stage,
                    compile_id=introspect.current_compile_id(),
                    before=before if edited else None,
                    after=after if edited else None,
                    curve=live_bytes(gm.graph),
                )
            )
        logger.log(
            self.log_level,
            "%s: pass %s made %d edits in %.1f ms",
            found.graph,
            found.name,
            found.num_edits,
            1e3 * found.duration_s,
        )

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
        if not is_built_in(each) and each.stage != "captured":
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


_SAID: Mapping[Kind, str] = {
    "read before arrival": "{at} reads {subject} before transfer {other} has arrived: wait for it first",
    "written under way": "{at} writes {subject}, which transfer {other} may still use: wait for it first",
    "freed under way": "the memory of {subject} is given back behind {at} while transfer {other} may still use it: wait "
    "for it first, and name its inputs in the wait",
    "used after free": "{at} uses {subject} after its memory was given back: free it once, behind all that use it",
    "read before written": "{at} reads {subject}, which nothing has written: write it first",
    "waited for without start": "{at} waits for no transfer: name all results of one start, its inputs and its handle, "
    "once and behind it",
    "never waited for": "transfer {subject} is never waited for: wait for it once",
}


def check_races(
    gm: fx.GraphModule, name: str, after: str, before: Reductions | None = None
) -> None:
    """Prove that no transfer of a graph can race with anything, and that its gradients are reduced as they were.

    Args:
        gm: the graph.
        name: of the graph, for the message.
        after: the pass that left the graph so, for the message.
        before: the reductions of the graph before the first pass; None: they are not checked.

    Raises:
        PassError: the order of the graph leaves a race open, or a gradient is not reduced once and returned.
    """
    schedule = schedule_of(gm.graph)
    races = find_races(schedule)
    lost = None
    if before is not None and before.reduced:
        lost = find_unreduced(before, reductions_of(schedule, before))
    if not races and lost is None:
        return
    lines = {node.name: line for line, node in enumerate(gm.graph.nodes, start=1)}

    def told(node: str) -> str:
        line = f" (line {lines[node]})" if node in lines else ""
        return f"{'return' if node == 'output' else '%' + node}{line}"

    if races:
        race = races[0]
        at = "" if race.at == len(schedule.events) else told(schedule.issued_by[race.at])
        subject, other = (told(each) if each else "" for each in (race.subject, race.other))
        what = _SAID[race.kind].format(at=at, subject=subject, other=other)
    else:
        assert lost is not None
        way = "returned by" if lost.is_reduced else "reduced exactly once, see"
        what = (
            f"gradient {told(lost.gradient)} of {lost.param!r} is not {way} {told(lost.at)}: reduce it once and return "
            "the result"
        )
    raise PassError(
        f"graph {name!r} is wrong after pass {after!r}: {what}, or leave the pass out with compile.disable_passes\n"
        f"{graph_text(gm.graph)}"
    )
