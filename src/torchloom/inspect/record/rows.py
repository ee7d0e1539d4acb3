"""Reads the rows of the trace, in order, into one `Compile` for each attempt of Dynamo, with its graphs and kernels."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from torchloom.inspect.collected import Rewriting, Row
from torchloom.inspect.live.guards import is_library
from torchloom.inspect.record.compiles import Compile, CompileKey
from torchloom.inspect.record.recompiles import parse_reason, parse_reasons
from torchloom.inspect.wording.breaks import first_reason, parse_break, without_debug_context
from torchloom.inspect.wording.hider import Hider, told
from torchloom.records import Artifact, CacheUse, Entry, Kernel, Span


class SpanReader:
    """Pairs begin and end events; those of one thread nest."""

    def __init__(self) -> None:
        self._open: dict[Any, list[Mapping[str, Any]]] = {}
        self._done: dict[tuple[int, str], list[Span]] = {}

    def read(self, row: Row) -> None:
        """Take one `chromium_event`."""
        event = _event(row)
        name, at = event.get("name"), event.get("ts")
        if not isinstance(name, str) or not isinstance(at, (int, float)):
            return
        stack = self._open.setdefault(event.get("tid", 0), [])
        if event["ph"] == "B":
            stack.append(event)
        elif event["ph"] == "E":
            # Not all ends come in order: compiles of C++ end while other phases are open.
            index = next((i for i in reversed(range(len(stack))) if stack[i]["name"] == name), None)
            begin = {} if index is None else stack.pop(index)
            owner = _owner(event) or _owner(begin)
            if owner and index is not None:
                start = float(begin["ts"])
                span = Span(name=name, start_us=start, duration_us=at - start, depth=index)
                self._done.setdefault((row.epoch, owner), []).append(span)

    def of(self, compile_id: str, epoch: int) -> list[Span]:
        """Return the phases of an entry in order of their start."""
        found = self._done.get((epoch, compile_id), [])
        return sorted(found, key=lambda span: (span.start_us, span.depth))


def _event(row: Row) -> Mapping[str, Any]:
    found = row.body if isinstance(row.body, Mapping) else {}
    found = found if "ph" in found else _json(row.payload, {})
    return found if isinstance(found, Mapping) and "ph" in found else {}


def _owner(event: Mapping[str, Any]) -> str:
    """Return the id of the compile that an event belongs to, where it says so."""
    args = event.get("args")
    return str(args.get("compile_id") or "").strip("[]") if isinstance(args, Mapping) else ""


_CACHE = re.compile("(fx_graph|aotautograd)_cache_(hit|miss|bypass)")
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


class RowReader:
    """Collects what belongs to each compile.

    Args:
        hider: notes the keys that guards and reasons name.
    """

    def __init__(self, hider: Hider) -> None:
        self.compiles: dict[CompileKey, Compile] = {}
        self.spans = SpanReader()
        self.orphans: list[str] = []
        """Errors and breaks that were logged about no compile in particular."""
        self._hider = hider
        self._tensors: dict[tuple[Any, Any], Any] = {}

    def rewriting(self, each: Rewriting) -> None:
        """Note the code that Dynamo wrote for an entry."""
        # What compiled autograd hands over is called "!0/1/0".
        parts = each.compile_id.strip("[]").split("/")[-2:]
        if len(parts) == 2 and all(part.isdigit() for part in parts):
            compile_ = self._compile((each.epoch, int(parts[0]), int(parts[1])))
            compile_.rewritten = each
            compile_.code = each.original
            compile_.wrapped = each.wrapped

    def row(self, row: Row) -> None:
        """Read one row of the trace."""
        if row.kind == "chromium_event":
            self.spans.read(row)
        elif row.frame_id is None or row.frame_compile_id is None:
            if row.kind in ("dynamo_graph_break_reason", "dynamo_error"):
                self.orphans.append(self._orphaned(row.payload or row.kind))
        else:
            compile_ = self._compile((row.epoch, int(row.frame_id), int(row.frame_compile_id)))
            if row.code is not None:
                compile_.code = row.code
                compile_.wrapped = row.wrapped
            if row.kind == "dynamo_start":
                _start(compile_, row)
            self._into(compile_, row)

    def _compile(self, key: CompileKey) -> Compile:
        if key not in self.compiles:
            entry = Entry(compile_id=f"{key[1]}/{key[2]}", epoch=key[0])
            self.compiles[key] = Compile(key, entry)
        return self.compiles[key]

    def _into(self, compile_: Compile, row: Row) -> None:
        kind, entry = row.kind, compile_.entry
        if kind in GRAPHS:
            add_graph(entry, row)
        elif kind in ("describe_tensor", "describe_source") and isinstance(row.body, Mapping):
            self._described(compile_, row.body)
        elif kind == "dynamo_cpp_guards_str":
            entry.guard_check_us = row.warm_guards_us
        elif kind == "recompile_reasons":
            entry.recompiles += parse_reasons(row.payload or "", self._hider.check)
        elif kind == "dynamo_graph_break_reason":
            found = parse_break(row.payload or "", self._hider.words)
            found.user_stack = [each for each in found.user_stack if not is_library(each)]
            entry.breaks.append(found)
        elif kind in ("compilation_metrics", "bwd_compilation_metrics"):
            compile_.hit_limit |= row.is_limit
            self._metrics(entry, kind, row.body)
        elif kind == "dynamo_error":
            entry.status = f"failed: {first_reason(row.payload or '')}"
        elif used := _CACHE.fullmatch(kind):
            details = _json(row.payload, {})
            why = details.get("cache_bypass_reason") if isinstance(details, dict) else ""
            entry.caches.append(CacheUse(cache=used[1], outcome=used[2], reason=str(why or "")))

    def _described(self, compile_: Compile, body: Mapping[str, Any]) -> None:
        """Note the size of a tensor of the call: Dynamo logs the tensor first, then its source."""
        tensor = (body.get("describer_id"), body.get("id"))
        if "size" in body:
            self._tensors[tensor] = body["size"]
        elif tensor in self._tensors:
            compile_.sizes.setdefault(str(body.get("source")), self._tensors[tensor])

    def _metrics(self, entry: Entry, kind: str, body: Any) -> None:
        if not isinstance(body, Mapping):
            return
        side = "backward" if kind.startswith("bwd") else "forward"
        kept = {key: body[key] for key in _METRICS if body.get(key) is not None}
        if "fail_reason" in kept:  # what follows the first line may show values
            kept["fail_reason"] = first_reason(str(kept["fail_reason"]))
        if "recompile_reason" in kept:
            kept["recompile_reason"] = parse_reason(
                str(kept["recompile_reason"]), self._hider.check
            ).text
        entry.metrics[side] = kept
        times = [
            part.get("entire_frame_compile_time_s") or part.get("inductor_compile_time_s") or 0.0
            for part in (entry.metrics.get("forward", {}), entry.metrics.get("backward", {}))
        ]
        entry.metrics["compile_s"] = float(sum(times))

    def _orphaned(self, text: str) -> str:
        lines = without_debug_context(text).splitlines(keepends=True)
        return "".join(
            told(line.rstrip("\n"), self._hider.words) + "\n" * line.endswith("\n")
            if line.lstrip().startswith(("Explanation:", "Hint:"))
            else line
            for line in lines
        )


def _start(compile_: Compile, row: Row) -> None:
    entry = compile_.entry
    compile_.calls = compile_.calls or row.calls
    entry.attempts = max(entry.attempts, row.attempt + 1)
    if row.attempt:  # Dynamo has restarted its analysis: only its last graph counts
        entry.artifacts = [a for a in entry.artifacts if a.kind != "dynamo"]


def _json(text: str | None, default: Any) -> Any:
    try:
        return json.loads(text) if text else default
    except ValueError:
        return default


_KERNEL = re.compile(
    r"^(\w+) = async_compile\.(cpp_pybinding|cpp|triton|cutedsl|pallas)\((.*?)('''|\"\"\")(.*?)\4",
    re.S | re.M,
)
_NODES = re.compile(r"Source Nodes: \[([^\]]*)\]|Topologically Sorted Source Nodes: \[([^\]]*)\]")
_ATEN = re.compile(r"torch\.ops\.aten\.(\w+)")
_LANGUAGES = {"cpp_pybinding": "C++", "cpp": "C++", "triton": "Triton"}


def parse_kernels(code: str, graph: str = "") -> list[Kernel]:
    """Return the kernels that a generated module defines, with what each computes.

    Args:
        code: a module that Inductor wrote.
        graph: text of the graph that it was made of, whose operators give a kernel's name meaning.
    """
    nodes = _nodes_by_kernel(code)
    known = set(_ATEN.findall(graph))
    return [
        Kernel(
            name=match.group(1),
            language=_LANGUAGES.get(match.group(2), match.group(2)),
            source=match.group(5).strip("\n"),
            nodes=nodes.get(match.group(1)) or _ops_in_name(match.group(1), known),
        )
        for match in _KERNEL.finditer(code)
    ]


def _ops_in_name(name: str, known: set[str]) -> list[str]:
    """Read the operators that Inductor joined into the name of a fused kernel.

    Example:
        >>> _ops_in_name("cpp_fused_add_native_layer_norm_0", {"add", "native_layer_norm"})
        ['add', 'native_layer_norm']
    """
    longest_first = "|".join(sorted(known, key=len, reverse=True)) or "(?!)"
    return re.findall(rf"(?<=_)(?:{longest_first})(?=_)", name.partition("fused")[2])


def _nodes_by_kernel(code: str) -> dict[str, list[str]]:
    """Read the comment that stands above the first call of each kernel."""
    found: dict[str, list[str]] = {}
    waiting: list[str] = []
    for line in code.splitlines():
        match = _NODES.search(line)
        if match:
            names = (match.group(1) or match.group(2) or "").split(",")
            waiting = [name.strip() for name in names if name.strip()]
            continue
        called = re.match(r"\s+(\w+)(?:\.run)?\(", line)
        if called and waiting:
            found.setdefault(called.group(1), waiting)
            waiting = []
    return found


GRAPHS = {
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
"""Kind and title of an artifact by the kind of the trace's row."""
_ONE_EACH_SIDE = ("output_code", "post_grad", "before_post_grad", "runnable")
"""Kinds that torch logs once for the forward graph and once for the backward graph."""
_GRAPH_ID = re.compile(r"^\s*# graph id: \d+\n?", re.M)


def add_graph(entry: Entry, row: Row) -> None:
    """Add a graph, or generated code with its kernels, to an entry.

    Args:
        entry: gets the artifact.
        row: of a kind in `GRAPHS`.
    """
    kind, title = GRAPHS[row.kind]
    text = _GRAPH_ID.sub("", row.payload or "")
    if kind in _ONE_EACH_SIDE:
        earlier = sum(a.kind == kind for a in entry.artifacts)
        side = ("forward", "backward")[earlier] if earlier < 2 else str(earlier)
        has_backward = any(a.kind in ("backward", "forward") for a in entry.artifacts)
        title = f"{title}, {side}" if has_backward else title
    entry.artifacts.append(Artifact(kind=kind, title=title, text=text))
    if kind == "output_code":
        graphs = [a.text for a in entry.artifacts if a.kind == "post_grad"]
        entry.kernels += parse_kernels(text, graphs[-1] if graphs else "")
