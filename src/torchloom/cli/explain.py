"""`torchloom explain FILE.py[:function]`: run it, watched, and say on one screen what was compiled.

A script runs as `python FILE.py ARGS` would. A function is called without arguments; if it is not
compiled itself, it is compiled for the call.
"""

from __future__ import annotations

import importlib.util
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

from torchloom.errors import InspectError
from torchloom.inspect import Watch
from torchloom.inspect import explain as explain_function
from torchloom.records import Session, save_record
from torchloom.records.summary import summary


def explain(
    target: Annotated[str, typer.Argument(help="FILE.py, or FILE.py:function.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Arguments of the script, after --.")
    ] = None,
    record: Annotated[
        Path | None, typer.Option("--record", help="Also write the record, as JSON.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option("--report", "-o", help="Also write the HTML report.")
    ] = None,
) -> None:
    """Run a script or a function and show what torch.compile did with it."""
    path, _, name = target.rpartition(":") if _names_function(target) else (target, "", "")
    file = Path(path)
    if not file.is_file():
        raise InspectError(f"there is no file {path!r}: write FILE.py or FILE.py:function")
    session = _call(file, name) if name else _run(file, arguments or [])
    typer.echo(summary(session))
    if record is not None:
        typer.echo(f"record  {save_record(session, record)}")
    if report is not None:
        from torchloom.report.page import write_page

        typer.echo(f"report  {write_page(session, report)}")


def _names_function(target: str) -> bool:
    return target.rpartition(":")[2].isidentifier() and ".py:" in target


def _run(file: Path, arguments: list[str]) -> Session:
    before = sys.argv
    sys.argv = [str(file), *arguments]
    sys.path.insert(0, str(file.resolve().parent))
    watch = Watch()
    try:
        with watch:
            runpy.run_path(str(file), run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            typer.echo(f"the script ended with exit code {end.code}", err=True)
    finally:
        sys.argv = before
        sys.path.pop(0)
    return watch.record


def _call(file: Path, name: str) -> Session:
    module = _load(file)
    fn = getattr(module, name, None)
    if not callable(fn):
        known = ", ".join(n for n, v in vars(module).items() if callable(v) and n[0] != "_")
        raise InspectError(f"{file} has no function {name!r}; it has {known or 'none'}")
    watch = Watch()
    with watch:
        fn()
    if any(True for _ in watch.record.entries()):
        return watch.record
    return explain_function(fn).record


def _load(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None, file
    assert spec.loader is not None, file
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    sys.path.insert(0, str(file.resolve().parent))
    spec.loader.exec_module(module)
    return module
