"""The page: one HTML file with its styles, its scripts and the record inside it."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined, Template

from torchloom.files import write_whole
from torchloom.records import Session
from torchloom.report.page.comparison import ComparedRun, comparison
from torchloom.report.page.figures import run_figures
from torchloom.report.page.payload import pack, pack_data

_SCRIPTS = (
    "elements.js",
    "data.js",
    "colour.js",
    "code.js",
    "line_chart.js",
    "lanes.js",
    "timeline.js",
    "search.js",
    "graph_parse.js",
    "graph_groups.js",
    "graph_layout.js",
    "graph_draw.js",
    "graph_detail.js",
    "graph_view.js",
    "graphs.js",
    "passes.js",
    "entry.js",
    "app.js",
)
"""In the order in which they are joined; they share one scope."""
_STYLES = ("theme.css", "style.css", "code.css", "charts.css", "graph.css", "run.css")
_LIBRARIES = ("htm-preact-3.1.1", "uplot-1.6.32", "dagre-3.1.3", "jsdiff-5.2.0")


def render_page(
    session: Session, *, title: str | None = None, run: str | Path | None = None
) -> str:
    """Return one HTML document that shows a record; it loads nothing from anywhere.

    Args:
        session: what a watch recorded.
        title: the page's heading; made from the record if left out.
        run: the folder of the run; its `metrics.jsonl` and the records of other ranks are shown as well.
    """
    packed = pack(session, run_figures(session, run))
    return _document(title or _title(session), packed, session.torchloom)


def render_comparison(before: ComparedRun, after: ComparedRun) -> str:
    """Return one HTML document that shows two runs side by side; it loads nothing from anywhere.

    Args:
        before: what a watch recorded, with its name and the folder of the run.
        after: the run to compare it with.
    """
    packed = pack_data({"compare": comparison(before, after)})
    return _document(f"{before.name} and {after.name}", packed, after.session.torchloom)


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


def _document(title: str, packed: str, torchloom: str) -> str:
    script = _script()
    return _template().render(
        title=title,
        style=_style(),
        script=script,
        script_hash=_hash(script),
        record=packed,
        licences=[(name, _asset(f"vendor/{name}.LICENSE.txt")) for name in _LIBRARIES],
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
def _script() -> str:
    libraries = [_asset(f"vendor/{name}.min.js") for name in _LIBRARIES]
    own = "\n".join(_asset(name) for name in _SCRIPTS)
    script = "\n".join([*libraries, f'(() => {{\n"use strict";\n{own}}})();\n'])
    # An end tag inside a script, even in a string, would end it for the HTML parser.
    if re.search(r"</script|<!--", script, re.IGNORECASE):
        raise AssertionError("a script of the page holds text that ends or comments out a script")
    return script


@cache
def _style() -> str:
    return "\n".join(_asset(name) for name in ("vendor/uplot-1.6.32.min.css", *_STYLES))


@cache
def _asset(name: str) -> str:
    text = files("torchloom.report.page").joinpath("assets").joinpath(name).read_text("utf-8")
    return text.replace("\r\n", "\n")  # as HTML parsers do: the hash below is taken after them


def _hash(script: str) -> str:
    digest = hashlib.sha256(script.encode("utf-8")).digest()
    return "sha256-" + base64.b64encode(digest).decode("ascii")


def _template() -> Template:
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True
    )
    return environment.from_string(_asset("page.html.j2"))
