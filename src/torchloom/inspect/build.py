"""From the rows of the trace to a record."""

from __future__ import annotations

import inspect
import json
import linecache
import re
import tokenize
from collections.abc import Mapping, Sequence
from types import CodeType
from typing import TYPE_CHECKING, Any

from torchloom import events
from torchloom._torch import introspect
from torchloom.inspect.breaks import first_reason, parse_break
from torchloom.inspect.english import guard_in_words, without_addresses
from torchloom.inspect.guards import guards_of
from torchloom.inspect.hits import graph_name
from torchloom.inspect.kernels import parse_kernels
from torchloom.inspect.pseudo import pseudo_source
from torchloom.inspect.recompiles import parse_reasons
from torchloom.inspect.spans import SpanReader
from torchloom.inspect.tap import Row
from torchloom.inspect.trigger import trigger_of
from torchloom.records import (
    Artifact,
    CacheUse,
    Entry,
    EventRow,
    Function,
    Guard,
    PassRun,
    Session,
)

if TYPE_CHECKING:
    from torchloom.inspect.watch import Compiled

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
    r"|compiled_function_.*|compiled_fn_.*|runtime_.*"
)
"""Kinds that are read elsewhere or say nothing that the record does not say otherwise."""
_GRAPH_ID = re.compile(r"^\s*# graph id: \d+\n?", re.M)
_RESUME = re.compile(r"(?:torch_dynamo_resume_in_)+(.*?)_at_(\d+)")

Key = tuple[int, int, int]
"""(epoch, frame id, version)."""


def build_session(
    rows: Sequence[Row],
    compiled: Sequence[Compiled],
    counts: Mapping[str, int],
    heard: Sequence[events.Event],
) -> Session:
    """Return the record of one watch.

    Args:
        rows: from the tap, in order.
        compiled: code objects that Dynamo rewrote.
        counts: calls by the global name of an entry's graph.
        heard: events of torchloom.
    """
    builder = _Builder()
    codes = {each.row: [] for each in compiled}
    for each in compiled:
        codes[each.row].append(each)
    for index, row in enumerate(rows):
        for each in codes.pop(index, ()):
            builder.code(each)
        builder.row(row)
    for left in codes.values():
        for each in left:
            builder.code(each)
    return builder.finish(counts, heard)


class _Builder:
    """Collects what belongs to each entry, then hangs entries under functions."""

    def __init__(self) -> None:
        self.session = Session()
        self.epoch = 0
        self.entries: dict[Key, Entry] = {}
        self.codes: dict[Key, Compiled] = {}
        self.starts: dict[Key, Any] = {}
        self.guard_rows: dict[Key, list[dict[str, Any]]] = {}
        self.tensors: dict[tuple[Any, Any], Any] = {}
        self.sizes: dict[Key, dict[str, Any]] = {}
        self.files = introspect.interned_files()
        self.spans = SpanReader()

    # -- reading

    def row(self, row: Row) -> None:
        """Read one row of the trace."""
        if row.kind == "chromium_event":
            self.spans.read(row)
            return
        if row.kind == "str" and isinstance(row.body, (list, tuple)):
            path, number = row.body
            self.files[number] = path
            return
        if row.frame_id is None or row.frame_compile_id is None:
            self._orphan(row)
            return
        if row.kind == "dynamo_start":
            self._start(row)
        key = self._key(row)
        entry = self._entry(key)
        self._into(entry, key, row)

    def code(self, each: Compiled) -> None:
        """Note the code that Dynamo wrote for an entry."""
        parts = each.compile_id.strip("[]").split("/")
        if len(parts) == 2 and all(part.isdigit() for part in parts):
            key = (self.epoch, int(parts[0]), int(parts[1]))
            self._entry(key)
            self.codes[key] = each

    def _start(self, row: Row) -> None:
        key = self._key(row)
        if row.attempt == 0 and key in self.starts:
            # Ids begin anew: torch._dynamo.reset() was called.
            self.epoch += 1
            self.session.num_resets += 1
            key = self._key(row)
        self.starts.setdefault(key, row.body)
        entry = self._entry(key)
        entry.attempts = max(entry.attempts, row.attempt + 1)
        if row.attempt:  # Dynamo starts over: its last graph is the one that counts
            entry.artifacts = [a for a in entry.artifacts if a.kind != "dynamo"]

    def _key(self, row: Row) -> Key:
        return (self.epoch, int(row.frame_id or 0), int(row.frame_compile_id or 0))

    def _entry(self, key: Key) -> Entry:
        if key not in self.entries:
            self.entries[key] = Entry(compile_id=f"{key[1]}/{key[2]}", epoch=key[0])
        return self.entries[key]

    def _into(self, entry: Entry, key: Key, row: Row) -> None:
        kind = row.kind
        if kind in _GRAPHS:
            self._graph(entry, row)
        elif kind in ("describe_tensor", "describe_source") and isinstance(row.body, Mapping):
            self._described(key, row.body)
        elif kind == "dynamo_guards":
            self.guard_rows[key] = _json(row.payload, [])
        elif kind == "dynamo_cpp_guards_str":
            found = re.search(r"Guard latency = ([\d.]+) us", row.payload or "")
            entry.guard_check_us = float(found.group(1)) if found else None
        elif kind == "recompile_reasons":
            entry.recompiles += parse_reasons(row.payload or "")
        elif kind == "dynamo_graph_break_reason":
            entry.breaks.append(parse_break(row.payload or ""))
        elif kind in ("compilation_metrics", "bwd_compilation_metrics"):
            self._metrics(entry, kind, row.body)
        elif kind == "dynamo_error":
            entry.status = f"failed: {first_reason(row.payload or '')}"
        elif kind.startswith(tuple(_CACHES)):
            self._cache(entry, row)
        elif kind != "dynamo_start" and not _QUIET.fullmatch(kind):
            self.session.unknown[kind] = self.session.unknown.get(kind, 0) + 1

    def _described(self, key: Key, body: Mapping[str, Any]) -> None:
        """Note the size that came from a source: Dynamo tells of the tensor, then of its source."""
        tensor = (body.get("describer_id"), body.get("id"))
        if "size" in body:
            self.tensors[tensor] = body["size"]
        elif tensor in self.tensors:
            sizes = self.sizes.setdefault(key, {})
            sizes.setdefault(str(body.get("source")), self.tensors[tensor])

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
        entry.metrics[side] = kept
        times = [
            part.get("entire_frame_compile_time_s") or part.get("inductor_compile_time_s") or 0.0
            for part in (entry.metrics.get("forward", {}), entry.metrics.get("backward", {}))
        ]
        entry.metrics["compile_s"] = float(sum(times))

    def _orphan(self, row: Row) -> None:
        if row.kind in ("dynamo_graph_break_reason", "dynamo_error"):
            self.session.orphans.append(row.payload or row.kind)
        elif not _QUIET.fullmatch(row.kind) and row.kind not in _GRAPHS:
            self.session.unknown[row.kind] = self.session.unknown.get(row.kind, 0) + 1

    # -- putting together

    def finish(self, counts: Mapping[str, int], heard: Sequence[events.Event]) -> Session:
        for key, entry in self.entries.items():
            self._fill(key, entry, counts)
        self._passes(heard)
        self._hang()
        self.session.events = [
            EventRow(kind=type(event).__name__, at_s=event.at_s, data=_plain(event))
            for event in heard
        ]
        return self.session

    def _fill(self, key: Key, entry: Entry, counts: Mapping[str, int]) -> None:
        compiled = self.codes.get(key)
        if compiled is not None:
            entry.pseudo_source = pseudo_source(compiled.transformed, compiled.original.co_name)
            entry.bytecode = _disassembled(compiled.transformed)
            entry.num_hits = counts.get(graph_name(compiled.transformed) or "", 0)
            live = _live(compiled)
            if live is not None:
                entry.backend = introspect.backend_name(live)
                entry.guards = guards_of(live.guard_manager)
            elif not entry.status.startswith("failed"):
                entry.status = "invalidated: its module or closure is gone, or it was reset"
        self._user_lines(key, entry)
        entry.trigger = trigger_of(entry.guards, self.sizes.get(key, {}))
        entry.spans = self.spans.of(entry.compile_id, key[0])

    def _user_lines(self, key: Key, entry: Entry) -> None:
        """Add where in the user's code each guard was born, from the trace."""
        lines: dict[str, str] = {}
        for each in self.guard_rows.get(key, ()):
            stack = each.get("user_stack") or []
            if stack:
                frame = stack[-1]
                lines[without_addresses(str(each.get("code", "")))] = self._place(frame)
        if not entry.guards:
            for each in self.guard_rows.get(key, ()):
                code = str(each.get("code", ""))
                text = without_addresses(code)
                entry.guards.append(
                    Guard(
                        source="",
                        kind="",
                        text=text,
                        english=guard_in_words("", "", code),
                        user_line=lines.get(text),
                    )
                )
        compiled = self.codes.get(key)
        file = "" if compiled is None else compiled.original.co_filename
        for guard in entry.guards:
            place = lines.get(guard.text) or guard.user_line
            if place and not place.startswith("/"):
                path, _, line = place.rpartition(":")
                # Dynamo writes the end of a path; places inside of torch say nothing to a user.
                place = f"{file}:{line}" if file.endswith(path) else None
            guard.user_line = place

    def _place(self, frame: Mapping[str, Any]) -> str:
        number = frame.get("filename")
        path = self.files.get(number, str(number)) if isinstance(number, int) else str(number)
        return f"{path}:{frame.get('line')}"

    def _passes(self, heard: Sequence[events.Event]) -> None:
        for event in heard:
            if not isinstance(event, events.PassRan) or event.compile_id is None:
                continue
            parts = event.compile_id.strip("[]").split("/")
            if len(parts) != 2 or not all(part.isdigit() for part in parts):
                continue
            candidates = [key for key in self.entries if key[1:] == (int(parts[0]), int(parts[1]))]
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
                self.entries[max(candidates)].passes.append(run)

    def _hang(self) -> None:
        """Make functions of the entries, resume functions below the one that they continue."""
        functions: dict[tuple[int, int], Function] = {}
        for key in sorted(self.entries):
            owner = functions.get(key[:2])
            if owner is None:
                owner = functions[key[:2]] = self._function(key)
            entry = self.entries[key]
            if key in self.codes or not entry.status.startswith("failed"):
                owner.entries.append(entry)
            else:
                owner.skipped = entry.status
                owner.breaks += entry.breaks
            owner.num_hits += entry.num_hits
            owner.num_misses += 1
        roots: list[Function] = []
        for function in functions.values():
            match = _RESUME.fullmatch(function.name)
            parent = None
            if match:
                parent = next(
                    (
                        f
                        for f in functions.values()
                        if f.file == function.file
                        and f.epoch == function.epoch
                        and f.name.rpartition(".")[2] == match.group(1)
                    ),
                    None,
                )
            (roots if parent is None else parent.children).append(function)
        for function in functions.values():
            function.children.sort(key=lambda child: child.line)
        self.session.functions = roots

    def _function(self, key: Key) -> Function:
        same = [k for k in sorted(self.codes) if k[:2] == key[:2]]
        if same:
            code = self.codes[same[0]].original
            file, line = introspect.place_of(code)
            match = _RESUME.fullmatch(code.co_name)
            return Function(
                name=code.co_name,
                file=file,
                line=int(match.group(2)) if match else line,
                source=_source_of(code),
                frame_id=key[1],
                epoch=key[0],
            )
        # A capture of a whole function, as for serving, says no name.
        name, file, line = "captured graph" if self.entries[key].artifacts else "unknown", "", 0
        metrics = self.entries[key].metrics.get("forward", {})
        stack = (self.starts.get(key) or {}).get("stack") or []
        if stack:
            place = self._place(stack[-1])
            file, _, number = place.rpartition(":")
            name, line = str(stack[-1].get("name", name)), int(number or 0)
        name = str(metrics.get("co_name", name))
        file = str(metrics.get("co_filename", file))
        line = int(metrics.get("co_firstlineno", line) or 0)
        return Function(name=name, file=file, line=line, frame_id=key[1], epoch=key[0])


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


def _live(compiled: Compiled) -> Any:
    """Return torch's entry for a compiled code object, None when it is gone."""
    return next(
        (
            entry
            for entry in introspect.cache_entries(compiled.original)
            if entry.code is compiled.transformed
        ),
        None,
    )


def _source_of(code: CodeType) -> str:
    if _RESUME.fullmatch(code.co_name):  # the report shows that of the function it continues
        return ""
    file, line = introspect.place_of(code)
    try:
        return "".join(inspect.getblock(linecache.getlines(file)[line - 1 :]))
    except (OSError, IndexError, SyntaxError, tokenize.TokenError):
        return ""


def _disassembled(code: CodeType) -> str:
    import dis

    return without_addresses(dis.Bytecode(code).dis())


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
