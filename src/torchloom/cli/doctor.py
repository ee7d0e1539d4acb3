"""`torchloom doctor` and `torchloom backends`: what works on this machine, what does not, and what to do.

ok      works
note    works, with something to know
FAIL    a part of torchloom cannot work here; the exit code is then 1
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from rich.text import Text

import torchloom
from torchloom import envs
from torchloom._torch.inductor import bisect_status_file, inductor_cache_dir
from torchloom._torch.resolve import absent, is_expected
from torchloom.backends import BackendInfo, describe_backends
from torchloom.backends.claims import cpp_compiler
from torchloom.cli.exposure import CheckFinding, exposed
from torchloom.cli.processes import interpreter
from torchloom.cli.terminal import print_table
from torchloom.compiler.support import why_unsupported
from torchloom.errors import ConfigError

TORCH_RANGE = ">=2.11"
"""As in pyproject.toml; there is no upper bound, so that a new torch can be tried on the day it comes out."""
NEWEST_TESTED = "2.15"
"""The newest torch that the test matrix in .github/workflows/ci.yml names."""
_SWITCHES = {
    "TORCH_COMPILE_DISABLE": "torch.compile does nothing at all",
    "TORCHDYNAMO_DISABLE": "torch.compile does nothing at all",
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "every process compiles everything anew",
    "TORCHDYNAMO_SUPPRESS_ERRORS": "compiler errors become silent eager runs",
    "TORCH_COMPILE_OVERRIDE_BACKENDS": "some graphs go to other backends than asked",
    "TORCH_TRACE": "every compile writes a trace to disk",
}
_MIN_FREE_BYTES = 1 << 30


def doctor(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(help="Stores, checkpoints: say whether others can write to them."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list.")] = False,
    probe: Annotated[
        bool, typer.Option("--probe", help="Also compile and run a small function (half a minute).")
    ] = False,
) -> None:
    """Show what works on this machine, and what to do where something does not."""
    checks: list[Callable[[], Iterator[CheckFinding]]] = [
        _versions,
        _internals,
        _compiler,
        _devices,
        _caches,
        _switches,
        _process_groups,
        lambda: exposed(folders or (), _run),
        _extras,
        *([_probe] if probe else []),
    ]
    findings = [finding for check in checks for finding in check()]
    if as_json:
        typer.echo(json.dumps([finding._asdict() for finding in findings], indent=2))
    else:
        _print(findings)
    if any(finding.state == "FAIL" for finding in findings):
        raise typer.Exit(1)


def _print(findings: list[CheckFinding]) -> None:
    styles = {"ok": "green", "note": "yellow", "FAIL": "bold red"}
    rows: list[tuple[Any, ...]] = []
    for each in findings:
        rows.append((Text(each.state, styles[each.state]), each.about, each.what))
        rows += [("", "", f"-> {each.cure}")] if each.cure else []
    print_table(rows)


def _versions() -> Iterator[CheckFinding]:
    yield CheckFinding("ok", "torchloom", torchloom.__version__)
    yield CheckFinding("ok", "Python", f"{platform.python_version()} on {platform.platform()}")
    yield _torch_version(torch.__version__)
    cure = "use a Python that this torch supports"
    yield CheckFinding.of("torch.compile", "supported here", why_unsupported(), cure)


def _torch_version(found: str) -> CheckFinding:
    numbers = Version(found).release
    if not SpecifierSet(TORCH_RANGE).contains(Version(found).base_version):
        cure = f"install a torch of {TORCH_RANGE}: pip install 'torch{TORCH_RANGE}'"
        return CheckFinding("FAIL", "torch", found, cure)
    if numbers[:2] > Version(NEWEST_TESTED).release:
        what = f"{found}, newer than {NEWEST_TESTED}, the newest that was tested"
        cure = "torchloom reads torch's internals: where something breaks, install 'torch~={}.0'"
        return CheckFinding("note", "torch", what, cure.format(NEWEST_TESTED))
    return CheckFinding("ok", "torch", found)


def _internals() -> Iterator[CheckFinding]:
    """Say which internals of torch are missing, and what that costs."""
    for row, reason in absent():
        what = f"{reason}: {row.without}"
        if not is_expected(row):
            yield CheckFinding("note", "torch's internals", f"{what} ({row.name}: {row.versions})")
            continue
        cure = f"install 'torch~={NEWEST_TESTED}.0', or a torchloom that knows torch {torch.__version__}"
        state = "FAIL" if row.is_needed else "note"
        yield CheckFinding(state, "torch's internals", what, cure)


def _compiler() -> Iterator[CheckFinding]:
    path = cpp_compiler()
    if path is None:
        yield CheckFinding(
            "FAIL",
            "C++ compiler",
            "none found: Inductor cannot compile for the CPU",
            "install g++ (apt install g++), or set CXX; backend 'aot_eager' needs none",
        )
        return
    told = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    first = (told.stdout or told.stderr).splitlines()
    yield CheckFinding("ok", "C++ compiler", f"{path}: {first[0] if first else 'version unknown'}")


def _devices() -> Iterator[CheckFinding]:
    if not torch.cuda.is_available():
        yield CheckFinding(
            "ok", "devices", f"CPU, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
        )
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        facts = torch.cuda.get_device_properties(index)
        yield CheckFinding("ok", "devices", f"{facts.name}, {facts.total_memory / 2**30:.0f} GiB")
    if torch.cuda.is_available() and find_spec("triton") is None:
        yield CheckFinding("FAIL", "Triton", "not installed", "pip install triton")


def _caches() -> Iterator[CheckFinding]:
    folder = Path(envs.get_str("TORCHINDUCTOR_CACHE_DIR", ""))
    try:
        folder = Path(inductor_cache_dir())  # torch makes it
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        yield CheckFinding(
            "FAIL", "compile cache", f"{folder}: {error}", "set TORCHINDUCTOR_CACHE_DIR to a folder"
        )
        return
    cure = "free space, or set TORCHINDUCTOR_CACHE_DIR"
    yield _space("compile cache", f"{folder}, ", folder, cure)
    left_over = bisect_status_file()
    if left_over is not None:
        yield CheckFinding(
            "FAIL",
            "bisection",
            f"{left_over} is left over from a bisection: it changes what every torch.compile does",
            f"rm {left_over}",
        )


def _switches() -> Iterator[CheckFinding]:
    for name, effect in _SWITCHES.items():
        value = envs.get_str(name, "")
        if value not in ("", "0"):
            yield CheckFinding("note", "environment", f"{name}={value}: {effect}", f"unset {name}")


def _process_groups() -> Iterator[CheckFinding]:
    if not dist.is_available():
        yield CheckFinding(
            "FAIL", "torch.distributed", "not in this torch", "install a usual torch"
        )
        return
    cure = "check that this host may connect to itself (127.0.0.1)"
    yield CheckFinding.of("gloo", "a process group could be made and used", _gloo_fails(), cure)
    if torch.cuda.is_available():
        lacks = None if dist.is_nccl_available() else "not in this torch"
        yield CheckFinding.of("NCCL", "built in", lacks, "")
    try:
        launch = envs.launch()
    except ConfigError as error:
        yield CheckFinding("FAIL", "launcher", str(error), "correct or unset the variable")
    else:
        if envs.is_launched():
            yield CheckFinding("ok", "launcher", f"rank {launch.rank} of {launch.world_size}")
    shared = Path("/dev/shm")
    if shared.is_dir():
        cure = "give the container more: docker run --shm-size=8g"
        yield _space("/dev/shm", "", shared, cure)


def _space(about: str, where: str, folder: Path, cure: str) -> CheckFinding:
    """Return a line on the free space of a folder, with a note if it is less than is usually needed."""
    free = shutil.disk_usage(folder).free
    what = f"{where}{free / 2**30:.1f} GiB free"
    return CheckFinding.of(about, what, what if free < _MIN_FREE_BYTES else None, cure, "note")


def _gloo_fails() -> str | None:
    """Make a world of one in a process of its own, so that this one keeps no group."""
    code = (
        "import torch, torch.distributed as dist\n"
        "from torchloom.launch.rendezvous import serve_store, stay_local\n"
        "stay_local()\n"
        "dist.init_process_group('gloo', store=serve_store(), rank=0, world_size=1)\n"
        "dist.all_reduce(torch.ones(1))\n"
        "dist.destroy_process_group()\n"
    )
    return _run(code, timeout_s=60)


def _extras() -> Iterator[CheckFinding]:
    for package, extra in (("transformers", "hf"), ("tensorboard", "tensorboard")):
        try:
            yield CheckFinding("ok", package, version(package))
        except PackageNotFoundError:  # noqa: PERF203
            cure = f"pip install 'torchloom[{extra}]'"
            yield CheckFinding("note", package, "not installed (optional)", cure)


def _probe() -> Iterator[CheckFinding]:
    code = (
        "import torch\n"
        "x = torch.randn(64, requires_grad=True)\n"
        "torch.compile(lambda x: (x.sin() * 2).relu().sum())(x).backward()\n"
        "assert x.grad is not None\n"
    )
    good = "compiled and ran a function, forward and backward"
    reason = _run(code, timeout_s=300)
    yield CheckFinding.of("Inductor", good, reason, "see the C++ compiler above")


def _run(code: str, timeout_s: float) -> str | None:
    """Run code in a fresh interpreter; return the last line of its error, or None."""
    environment = {
        name: value
        for name, value in envs.child_environment({}).items()
        if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    }
    try:
        done = subprocess.run(
            [*interpreter(), "-c", code],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {timeout_s:.0f} s"
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"exit code {done.returncode}"


_HIDDEN_TAGS = {"debug", "experimental"}


def backends(
    show_all: Annotated[
        bool, typer.Option("--all", "-a", help="Also show debug and experimental backends.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list.")] = False,
) -> None:
    """Show the backends of torch.compile, where they come from, and whether they work here."""
    rows = [row for row in describe_backends() if show_all or not _is_hidden(row)]
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(row) for row in rows], indent=2))
        return
    lines = []
    for row in rows:
        tags = "not loaded" if row.tags is None else ", ".join(row.tags)
        lines.append((row.name, str(row.origin), tags, row.why_not or "yes"))
        lines += [("", f"hides {loser}") for loser in row.hidden]
    print_table(lines, "backend", "from", "tags", "works here")
    if num_left_out := len(describe_backends()) - len(rows):
        typer.echo(f"{num_left_out} more for debugging and experiments: --all shows them")


def _is_hidden(row: BackendInfo) -> bool:
    return bool(_HIDDEN_TAGS & set(row.tags or ()))
