"""Writes the page: one HTML file with its styles, its scripts, the record and its views inside it.

A pass begins with the graph that the pass before it left, and gzip looks back only 32 KB: without the table of
repeated texts, the page of a large model would carry most graphs twice.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from torchloom.files import write_whole
from torchloom.records import Session, to_json
from torchloom.report.page.comparison import ComparedRun, comparison
from torchloom.report.page.entries import entry_views
from torchloom.report.page.figures import RunFigures, run_figures
from torchloom.report.page.functions import function_view
from torchloom.report.page.index import Index
from torchloom.report.page.overview import overview
from torchloom.report.page.run_time import MeasuredSteps
from torchloom.report.page.timeline import event_rows, timeline

_SCRIPTS = (
    "elements", "data", "colour", "code", "line_chart", "lanes", "timeline", "search", "graph_parse",
    "graph_groups", "graph_layout", "graph_draw", "graph_detail", "graph_view", "graphs", "passes",
    "entry", "app",
)  # fmt: skip
"""In the order in which they are joined; they share one scope."""
_STYLES = ("theme", "style", "code", "charts", "graph", "run")
_LIBRARIES = ("htm-preact-3.1.1", "uplot-1.6.32", "dagre-3.1.3", "jsdiff-5.2.0")
_MIN_SHARED = 256
"""Shortest text, in characters, that goes into the table of texts."""


def render_page(
    session: Session, *, title: str | None = None, run: str | Path | None = None
) -> str:
    """Return one HTML document that shows a record; it loads nothing from anywhere.

    Args:
        session: what a watch recorded.
        title: the page's heading; made from the record if left out.
        run: the folder of the run; its `metrics.jsonl` and the records of other ranks are shown as well.
    """
    data = {"record": to_json(session), **views(session, run_figures(session, run))}
    return _document(title or _title(session), data, session.torchloom)


def render_comparison(before: ComparedRun, after: ComparedRun) -> str:
    """Return one HTML document that shows two runs side by side; it loads nothing from anywhere.

    Args:
        before: what a watch recorded, with its name and the folder of the run.
        after: the run to compare it with.
    """
    data = {"compare": comparison(before, after)}
    return _document(f"{before.name} and {after.name}", data, after.session.torchloom)


def write_page(
    session: Session,
    path: str | Path,
    *,
    title: str | None = None,
    run: str | Path | None = None,
) -> Path:
    """Write the page of a record; readers see the whole file or none.

    Args:
        session: what a watch recorded.
        path: the file; folders above it are made.
        title: the page's heading; made from the record if left out.
        run: as for `render_page`.

    Returns:
        The path.

    Raises:
        OSError: the file cannot be written.
    """
    return write_whole(path, render_page(session, title=title, run=run))


def views(session: Session, run: RunFigures | None) -> dict[str, Any]:
    """Return all that the page says of a record in words; functions and entries in the record's order."""
    index = Index(session)
    steps = MeasuredSteps(index)
    number = {id(item): i for i, item in enumerate(index.functions)}
    return {
        "overview": overview(index, run, steps),
        "timeline": timeline(index, steps),
        "events": event_rows(session.events, steps),
        "functions": [
            {"id": item.id, "name": item.name, "depth": item.depth, "place": index.place(item.fn),
             "view": function_view(index, item)}
            for item in index.functions
        ],
        "entries": [
            {"id": item.id, "name": item.name, "owner": number[id(item.owner)],
             "views": entry_views(index, item)}
            for item in index.entries
        ],
        "breaks": [
            {"owner": number[id(each.owner)], "reason": each.each.reason, "place": index.short(each.each.place),
             "explanation": each.each.explanation}
            for each in index.breaks
        ],
    }  # fmt: skip


def _document(title: str, data: dict[str, Any], torchloom: str) -> str:
    libraries = [f"vendor/{name}" for name in _LIBRARIES]
    own = "\n".join(_asset(f"{name}.js") for name in _SCRIPTS)
    script = "\n".join(
        [
            *(_asset(f"{name}.min.js") for name in libraries),
            f'(() => {{\n"use strict";\n{own}}})();\n',
        ]
    )
    # An end tag inside a script, even in a string, would end it for the HTML parser.
    if re.search(r"</script|<!--", script, re.IGNORECASE):
        raise AssertionError("a script of the page holds text that ends or comments out a script")
    styles = ["vendor/uplot-1.6.32.min", *_STYLES]
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True
    )
    return environment.from_string(_asset("page.html.j2")).render(
        title=title,
        style="\n".join(_asset(f"{name}.css") for name in styles),
        script=script,
        script_hash=f"sha256-{_base64(hashlib.sha256(script.encode()).digest())}",
        record=_packed(data),
        licences=[
            (name, _asset(f"{path}.LICENSE.txt"))
            for name, path in zip(_LIBRARIES, libraries, strict=True)
        ],
        torchloom=torchloom,
    )


def _title(session: Session) -> str:
    served = [str(row.data.get("model")) for row in session.events if row.kind == "ProgramReady"]
    if served:
        return f"torchloom programs: {', '.join(dict.fromkeys(served))}"
    known = list(dict.fromkeys(function.name for function in session.functions))
    names, more = ", ".join(known[:3]), ", ..." if len(known) > 3 else ""
    rank = f", rank {session.rank} of {session.world_size}" if session.world_size > 1 else ""
    is_run = any(row.kind == "PhaseRan" for row in session.events)
    what = "torchloom run" if is_run else "torch.compile record"
    return f"{what}: {names or 'nothing compiled'}{more}{rank}"


@cache
def _asset(name: str) -> str:
    text = files("torchloom.report.page").joinpath("assets").joinpath(name).read_text("utf-8")
    return text.replace(
        "\r\n", "\n"
    )  # as HTML parsers do: the hash of the script is taken after them


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _packed(data: dict[str, Any]) -> str:
    """Return plain data as base64 of gzip of JSON, with each long text once; equal data gives equal text."""
    table: dict[str, int] = {}
    rest = _shared(data, table)
    shared = {"texts": list(table), **rest}
    raw = json.dumps(shared, ensure_ascii=False, separators=(",", ":"), default=str)
    # Python writes lone surrogates that UTF-8 cannot hold, for instance from undecodable paths.
    return _base64(gzip.compress(raw.encode("utf-8", errors="replace"), 9, mtime=0))


def _shared(value: Any, table: dict[str, int]) -> Any:
    """Return the data with each long text as `{"$text": its index in the table}`, and floats that are not finite as text."""
    if isinstance(value, str):
        is_long = len(value) >= _MIN_SHARED
        return {"$text": table.setdefault(value, len(table))} if is_long else value
    if isinstance(value, dict):
        return {key: _shared(each, table) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_shared(each, table) for each in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)  # JSON of browsers has no NaN
    return value
