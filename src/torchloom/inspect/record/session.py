"""From the rows of the trace to a record."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from types import CodeType
from typing import Any

from torchloom import events
from torchloom._torch import introspect
from torchloom.inspect.heard import Compile, Compiled, Key
from torchloom.inspect.listen.eager_calls import EagerCalls, is_limit
from torchloom.inspect.listen.hit_counter import graph_name
from torchloom.inspect.listen.trace import Row
from torchloom.inspect.live.guards import guards_of
from torchloom.inspect.live.places import Places, user_stack
from torchloom.inspect.live.rewritten import continuation
from torchloom.inspect.pseudo import bytecode_listing, pseudo_source
from torchloom.inspect.record.arguments import trigger_of
from torchloom.inspect.record.functions import functions_of
from torchloom.inspect.record.kernels import parse_kernels
from torchloom.inspect.record.memory import MEMORY_EVENTS, note_memory
from torchloom.inspect.record.recompile_outcomes import explain_recompiles
from torchloom.inspect.record.recompile_reasons import parse_reason, parse_reasons
from torchloom.inspect.record.source_names import name_sources
from torchloom.inspect.record.spans import SpanReader
from torchloom.inspect.wording.breaks import first_reason, parse_break, without_debug_context
from torchloom.inspect.wording.english import without_addresses
from torchloom.inspect.wording.hider import Hider, Words, told
from torchloom.records import (
    Artifact,
    CacheUse,
    Entry,
    EventRow,
    PassRun,
    Session,
)

_GRAPHS = {
    "dynamo_output_graph": ("dynamo", "captured by Dynamo"),
    "before_pre_grad_graph": ("pre_grad", "before pre-grad passes"),
    "aot_joint_graph": ("joint", "joint graph"),
    "aot_forward_graph": ("forward", "forward"),
    "aot_backward_graph": ("backward", "backward"),
    "aot_inference_graph": ("inference", "inference"),
    "before_post_grad_graph": ("before_post_grad", "before post-grad passes"),
    "inductor_post_grad_graph": ("post_grad", "after post-grad passes"),
    "inductor_output_code": ("output_code", "generated code"),
    "fx_graph_runnable": ("runnable", "runnable repro"),
}
_CACHES = {"fx_graph_cache": "fx_graph", "aotautograd_cache": "aotautograd"}
_QUIET = re.compile(
    r"str|stack|describe_.*|dump_file|torch_version|exported_program|chromium_event|cache_.*"
    r"|.*_metadata|.*_BYTECODE|aot_.*|inductor_.*|.*_pre_grad_graph|guard_added.*|create_.*symbol"
    r"|symbolic_.*|.*_runtime|rank_.*|min_cut_.*|triton_.*|pre_decomp_.*|post_decomp_.*|graph_dump"
    r"|torch\._functorch.*|.*_config|expression_created|propagate_.*|dynamo_side_effects.*|link"
    r"|graph_break_dup.*|.*_compute_nodes.*|dynamo_timed.*|.*_prologue|.*_epilogue"
    r"|compiled_autograd_.*|compiled_function_.*|compiled_fn_.*|runtime_.*"
)
"""Kinds that are read elsewhere or say nothing that the record does not say otherwise."""
_GRAPH_ID = re.compile(r"^\s*# graph id: \d+\n?", re.M)


def build_session(
    rows: Sequence[Row],
    compiled: Sequence[Compiled],
    counts: Mapping[str, int],
    heard: Sequence[events.Event],
    *,
    eager: EagerCalls | None = None,
    num_resets: int = 0,
) -> Session:
    """Return the record of one watch.

    Args:
        rows: from the tap, in order.
        compiled: code objects that Dynamo rewrote.
        counts: calls by the global name of an entry's graph.
        heard: events of torchloom.
        eager: calls that ran eagerly because nothing fitted.
        num_resets: how often Dynamo was reset.
    """
    codes = [code for each in compiled for code in (each.original, *each.traced)]
    codes += [row.code for row in rows if row.code is not None]
    builder = _Builder(Hider(Words(codes)))
    for each in compiled:
        builder.code(each)
    for row in rows:
        builder.row(row)
    builder.session.num_resets = num_resets
    return builder.finish(counts, heard, EagerCalls() if eager is None else eager)


class _Builder:
    """Collects what belongs to each compile, then hangs entries under functions."""

    def __init__(self, hider: Hider) -> None:
        self.session, self.hider = Session(), hider
        self.compiles: dict[Key, Compile] = {}
        self.tensors: dict[tuple[Any, Any], Any] = {}
        self.places = Places(introspect.interned_files(), hider)
        self.spans = SpanReader()

    # -- reading

    def row(self, row: Row) -> None:
        """Read one row of the trace."""
        if row.kind == "chromium_event":
            self.spans.read(row)
        elif row.kind == "str" and isinstance(row.body, (list, tuple)):
            path, number = row.body
            self.places.files[number] = path
        elif row.frame_id is None or row.frame_compile_id is None:
            self._orphan(row)
        else:
            compile_ = self._compile((row.epoch, int(row.frame_id), int(row.frame_compile_id)))
            if row.code is not None:
                compile_.code = row.code
                compile_.wrapped = row.wrapped
            if row.kind == "dynamo_start":
                self._start(compile_, row)
            self._into(compile_, row)

    def code(self, each: Compiled) -> None:
        """Note the code that Dynamo wrote for an entry."""
        # What compiled autograd hands over is called "!0/1/0".
        parts = each.compile_id.strip("[]").split("/")[-2:]
        if len(parts) == 2 and all(part.isdigit() for part in parts):
            compile_ = self._compile((each.epoch, int(parts[0]), int(parts[1])))
            compile_.rewritten = each
            compile_.code = each.original
            compile_.wrapped = each.wrapped

    def _start(self, compile_: Compile, row: Row) -> None:
        entry = compile_.entry
        stack = row.body.get("stack") if isinstance(row.body, Mapping) else None
        compile_.stack = compile_.stack or stack or []
        compile_.calls = compile_.calls or row.calls
        entry.attempts = max(entry.attempts, row.attempt + 1)
        if row.attempt:  # Dynamo starts over: its last graph is the one that counts
            entry.artifacts = [a for a in entry.artifacts if a.kind != "dynamo"]

    def _compile(self, key: Key) -> Compile:
        if key not in self.compiles:
            entry = Entry(compile_id=f"{key[1]}/{key[2]}", epoch=key[0])
            self.compiles[key] = Compile(key, entry)
        return self.compiles[key]

    def _into(self, compile_: Compile, row: Row) -> None:
        kind, entry = row.kind, compile_.entry
        if kind in _GRAPHS:
            self._graph(entry, row)
        elif kind in ("describe_tensor", "describe_source") and isinstance(row.body, Mapping):
            self._described(compile_, row.body)
        elif kind == "dynamo_guards":
            compile_.guard_rows = _json(row.payload, [])
        elif kind == "dynamo_cpp_guards_str":
            entry.guard_check_us = row.warm_guards_us
        elif kind == "recompile_reasons":
            entry.recompiles += parse_reasons(row.payload or "", self.hider)
        elif kind == "dynamo_graph_break_reason":
            entry.breaks.append(parse_break(row.payload or "", self.hider.words))
        elif kind in ("compilation_metrics", "bwd_compilation_metrics"):
            compile_.hit_limit |= is_limit(row)
            self._metrics(entry, kind, row.body)
        elif kind == "dynamo_error":
            entry.status = f"failed: {first_reason(row.payload or '')}"
        elif kind.startswith(tuple(_CACHES)):
            self._cache(entry, row)
        elif kind != "dynamo_start" and not _QUIET.fullmatch(kind):
            self.session.unknown[kind] = self.session.unknown.get(kind, 0) + 1

    def _described(self, compile_: Compile, body: Mapping[str, Any]) -> None:
        """Note the size that came from a source: Dynamo tells of the tensor, then of its source."""
        tensor = (body.get("describer_id"), body.get("id"))
        if "size" in body:
            self.tensors[tensor] = body["size"]
        elif tensor in self.tensors:
            compile_.sizes.setdefault(str(body.get("source")), self.tensors[tensor])

    def _graph(self, entry: Entry, row: Row) -> None:
        kind, title = _GRAPHS[row.kind]
        text = _GRAPH_ID.sub("", row.payload or "")
        if kind in ("output_code", "post_grad", "before_post_grad", "runnable"):
            earlier = sum(a.kind == kind for a in entry.artifacts)
            side = ("forward", "backward")[earlier] if earlier < 2 else str(earlier)
            has_backward = any(a.kind in ("backward", "forward") for a in entry.artifacts)
            title = f"{title}, {side}" if has_backward else title
        entry.artifacts.append(
            Artifact(kind=kind, title=title, text=text, num_bytes=len(text.encode()))
        )
        if kind == "output_code":
            graphs = [a.text for a in entry.artifacts if a.kind == "post_grad"]
            entry.kernels += parse_kernels(text, graphs[-1] if graphs else "")

    def _cache(self, entry: Entry, row: Row) -> None:
        for prefix, cache in _CACHES.items():
            outcome = row.kind.removeprefix(f"{prefix}_")
            if row.kind.startswith(prefix) and outcome in ("hit", "miss", "bypass"):
                details = _json(row.payload, {})
                reason = ""
                if isinstance(details, dict):
                    reason = str(details.get("cache_bypass_reason") or "")
                entry.caches.append(CacheUse(cache=cache, outcome=outcome, reason=reason))

    def _metrics(self, entry: Entry, kind: str, body: Any) -> None:
        if not isinstance(body, Mapping):
            return
        side = "backward" if kind.startswith("bwd") else "forward"
        kept = {key: body[key] for key in _METRICS if body.get(key) is not None}
        if "fail_reason" in kept:  # what follows the first line may show values
            kept["fail_reason"] = first_reason(str(kept["fail_reason"]))
        if "recompile_reason" in kept:
            kept["recompile_reason"] = parse_reason(str(kept["recompile_reason"]), self.hider).text
        entry.metrics[side] = kept
        times = [
            part.get("entire_frame_compile_time_s") or part.get("inductor_compile_time_s") or 0.0
            for part in (entry.metrics.get("forward", {}), entry.metrics.get("backward", {}))
        ]
        entry.metrics["compile_s"] = float(sum(times))

    def _orphan(self, row: Row) -> None:
        if row.kind in ("dynamo_graph_break_reason", "dynamo_error"):
            self.session.orphans.append(self._orphaned(row.payload or row.kind))
        elif not _QUIET.fullmatch(row.kind) and row.kind not in _GRAPHS:
            self.session.unknown[row.kind] = self.session.unknown.get(row.kind, 0) + 1

    def _orphaned(self, text: str) -> str:
        lines = without_debug_context(text).splitlines(keepends=True)
        return "".join(
            told(line.rstrip("\n"), self.hider.words) + "\n" * line.endswith("\n")
            if line.lstrip().startswith(("Explanation:", "Hint:"))
            else line
            for line in lines
        )

    # -- putting together

    def finish(
        self, counts: Mapping[str, int], heard: Sequence[events.Event], eager: EagerCalls
    ) -> Session:
        for compile_ in self.compiles.values():
            self._fill_or_say(compile_, counts)
        for compile_ in self.compiles.values():
            explain_recompiles(compile_.entry)
            name_sources(compile_)
        self._passes(heard)
        note_memory(self.session, heard)
        self.session.functions = functions_of(self.compiles, self.places, eager)
        self.session.num_unknown_eager_calls = eager.num_unknown
        self.session.events = [
            EventRow(kind=type(event).__name__, at_s=event.at_s, data=_plain(event))
            for event in heard
            if not isinstance(event, MEMORY_EVENTS)
        ]
        self.hider.in_record(self.session)
        return self.session

    def _fill_or_say(self, compile_: Compile, counts: Mapping[str, int]) -> None:
        """Complete an entry; one that cannot be read must not hide the others."""
        try:
            self._fill(compile_, counts)
        except Exception as error:  # noqa: BLE001
            name = compile_.entry.compile_id
            self.session.orphans.append(f"entry {name} is incomplete: {type(error).__name__}")

    def _fill(self, compile_: Compile, counts: Mapping[str, int]) -> None:
        entry, rewritten = compile_.entry, compile_.rewritten
        if rewritten is not None:
            original = rewritten.original
            entry.pseudo_source = pseudo_source(
                rewritten.transformed, original.co_name, original=original
            )
            entry.bytecode = _disassembled(rewritten.transformed, original)
            entry.original_bytecode = _disassembled(original, original)
            entry.continuations = [continuation(*each) for each in rewritten.continuations]
            entry.num_hits = counts.get(graph_name(rewritten.transformed) or "", 0)
            live = _live(rewritten)
            if live is not None:
                entry.backend = introspect.backend_name(live)
                entry.guards = guards_of(live.guard_manager, self.hider)
                if introspect.is_invalid(live.guard_manager):
                    entry.status = "invalidated: what it guards on is gone"
            elif not entry.status.startswith("failed"):
                entry.status = "invalidated: its module or closure is gone, or it was reset"
        self.places.add_user_lines(compile_)
        entry.stack = user_stack(compile_)
        entry.trigger = trigger_of(entry.guards, compile_.sizes)
        entry.spans = self.spans.of(entry.compile_id, entry.epoch)

    def _passes(self, heard: Sequence[events.Event]) -> None:
        for event in heard:
            if not isinstance(event, events.PassRan) or event.compile_id is None:
                continue
            parts = event.compile_id.strip("[]").split("/")
            if len(parts) != 2 or not all(part.isdigit() for part in parts):
                continue
            candidates = [key for key in self.compiles if key[1:] == (int(parts[0]), int(parts[1]))]
            if candidates:
                run = PassRun(
                    name=event.name,
                    stage=event.stage,
                    graph=event.graph,
                    num_edits=event.num_edits,
                    duration_s=event.duration_s,
                    before=event.before,
                    after=event.after,
                    curve=None if event.curve is None else list(event.curve),
                )
                self.compiles[max(candidates)].entry.passes.append(run)


_METRICS = (
    "co_name",
    "co_filename",
    "co_firstlineno",
    "graph_op_count",
    "graph_node_count",
    "graph_input_count",
    "entire_frame_compile_time_s",
    "backend_compile_time_s",
    "inductor_compile_time_s",
    "code_gen_time_s",
    "dynamo_time_before_restart_s",
    "fail_type",
    "fail_reason",
    "recompile_reason",
    "inductor_fx_remote_cache_hit_count",
    "inductor_fx_local_cache_hit_count",
    "inductor_fx_local_cache_miss_count",
    "guard_latency_us",
)


def _live(rewritten: Compiled) -> Any:
    """Return torch's entry for a compiled code object, None when it is gone."""
    return next(
        (
            entry
            for entry in introspect.cache_entries(rewritten.original)
            if entry.code is rewritten.transformed
        ),
        None,
    )


def _disassembled(code: CodeType, original: CodeType) -> str:
    return without_addresses(bytecode_listing(code, original))


def _json(text: str | None, default: Any) -> Any:
    try:
        return json.loads(text) if text else default
    except ValueError:
        return default


def _plain(event: events.Event) -> dict[str, Any]:
    """Return an event as data; the texts of graphs stand in the entries already."""
    data = event.to_dict()
    for name in ("before", "after", "curve", "at_s", "kind"):
        data.pop(name, None)
    return data
