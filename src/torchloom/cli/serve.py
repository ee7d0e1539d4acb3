"""`torchloom serve build|check|inspect|why-miss|trust|bench-startup`: programs for every size, from a shell.

MODEL is `FILE.py:function`; the function returns the model and its contract, and perhaps options of
`torchloom.serve.build` as a dict.
"""

from __future__ import annotations

import inspect as python_inspect
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from torchloom import envs
from torchloom.cli.processes import interpreter, load_function
from torchloom.cli.terminal import doing, printable
from torchloom.errors import ServeError
from torchloom.serve import Box, Contract, Program, Store, build, counter
from torchloom.serve.call.variant import shown_variant
from torchloom.serve.model.target import Target
from torchloom.serve.store.entries import describe_entry, faults_of
from torchloom.serve.store.misses import why_miss

serve = typer.Typer(no_args_is_help=True, help="Compile models for serving, and look into stores.")

_MODEL = "FILE.py:function; the function returns (model, contract) or (model, contract, options)."
_STORE = "Folder that holds programs."

ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help=_MODEL)]
StoreArgument = Annotated[Path, typer.Argument(metavar="STORE", help=_STORE)]


class Given(NamedTuple):
    """What a user's function returned."""

    model: Callable[..., Any]
    contract: Contract
    options: Mapping[str, Any]


@serve.command("build")
def build_command(
    model: ModelArgument,
    store: StoreArgument,
    shapes: Annotated[str, typer.Option(help="prove, split, unbacked or bucket.")] = "",
) -> None:
    """Compile a model for its contract and store the program; one that fits is kept."""
    given = _given(model, shapes)
    started = time.perf_counter()
    with doing(f"proving and compiling for {given.contract}"):
        program = _built(given, store=store)
    seconds = time.perf_counter() - started
    typer.echo(f"{program.origin} in {seconds:.1f} s as {program.key} in {store}")
    typer.echo(_shown(program))
    reasons = sorted({each.why_not_stored for each in program.variants if each.why_not_stored})
    if reasons:
        raise ServeError(f"the program runs but cannot be stored: {'; '.join(reasons)}")


@serve.command()
def check(
    model: ModelArgument,
    shapes: Annotated[str, typer.Option(help="prove, split or unbacked.")] = "",
) -> None:
    """Prove that a model is one program for its contract, without compiling it."""
    given = _given(model, shapes)
    with doing(f"proving for {given.contract}"):
        program = _built(given, backend="eager", shapes=given.options.get("shapes", "prove"))
    typer.echo(_shown(program))


@serve.command()
def inspect(
    store: StoreArgument,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what programs a store holds, and whether they are whole."""
    broken, entries = Store(store).look()
    if as_json:
        typer.echo(json.dumps({"broken": broken, "programs": entries}))
        return
    for line in broken:
        typer.echo(f"not used  {printable(line)}")
    for name, entry in entries.items():
        typer.echo(_entry(name, entry))
        record = Store(store).record_path(name.rpartition("-")[0])
        if record.exists():
            typer.echo(f"    record of its build: torchloom report {record} -o report.html")
        for fault in faults_of(entry, Store(store)):
            typer.echo(f"    damaged: {fault}")
    size = sum(path.stat().st_size for path in store.rglob("*") if path.is_file())
    count = f"{len(entries)} program{'' if len(entries) == 1 else 's'}"
    typer.echo(f"{count}, {size / 1e6:.1f} MB in {store}")


@serve.command("why-miss")
def why_miss_command(store: StoreArgument, model: ModelArgument) -> None:
    """Say why no program in a store fits a model; exit code 1 if none does."""
    given = _given(model)
    lines = why_miss(Store(store), Target(given.model), given.contract)
    typer.echo("\n".join(lines) or "a program fits")
    if lines:
        raise typer.Exit(1)


@serve.command()
def trust(
    store: StoreArgument,
    yes: Annotated[bool, typer.Option("--yes", help="Sign without asking.")] = False,
) -> None:
    """Sign the programs of a store that came from elsewhere, after showing what they hold.

    A program is code. Once it is signed it runs as you, whenever it is loaded.
    """
    given = Store(store)
    given.check()
    known = given.entries()
    entries, unread = given.unverified()
    for line in unread:
        typer.echo(f"not signed  {printable(line)}")
    waiting = [name for name in entries if name not in known]
    if not waiting:
        typer.echo(f"nothing to sign: {len(known)} programs are signed already")
        return
    whole = []
    for name in waiting:
        lines, faults = describe_entry(entries[name], given)
        typer.echo(printable(f"{name}  {'; '.join(lines)}"))
        for fault in faults:
            typer.echo(printable(f"    not signed: {fault}"))
        whole += [] if faults else [name]
    if not whole:
        raise ServeError(f"nothing in {store} can be signed: what is damaged has to be built again")
    if not yes and not typer.confirm(f"Let these {len(whole)} run as code of yours?"):
        raise typer.Exit(1)
    for name in whole:
        given.sign(name, entries[name])
    typer.echo(f"signed {len(whole)} with {envs.key_file()}")


@serve.command("bench-startup")
def bench_startup(
    model: ModelArgument,
    repeats: Annotated[int, typer.Option(help="Starts of each kind.")] = 3,
) -> None:
    """Time cold and warm starts in processes of their own, from a fresh store."""
    with tempfile.TemporaryDirectory() as folder, doing(f"starting {2 * repeats} processes"):
        rows: dict[str, list[dict[str, float]]] = {"cold": [], "warm": []}
        for number in range(repeats):
            store = Path(folder) / str(number)
            for kind in rows:
                rows[kind].append(_start(model, store, Path(folder) / f"cache{number}-{kind}"))
    for kind, samples in rows.items():
        phases = ", ".join(
            f"{name} {statistics.median(sample[name] for sample in samples):.2f} s"
            for name in ("import torch", "make the model", "program", "first call")
        )
        counts = samples[0]
        typer.echo(
            f"{kind}  {phases}; {counts['traces']} traces, {counts['pieces']} graphs compiled"
        )


_CHILD = """
import json, sys, time
began = time.perf_counter()
import torch
imported = time.perf_counter()
from torchloom.cli.serve import start_once
print(json.dumps(start_once(sys.argv[1], sys.argv[2], began, imported)))
"""


def start_once(model: str, store: str, began: float, imported: float) -> dict[str, float]:
    """Start a program in this process; return the seconds of each phase and what was counted."""
    import torch

    given = _given(model)
    made = time.perf_counter()
    program = _built(given, store=store)
    ready = time.perf_counter()
    args = given.contract.example()
    with torch.inference_mode(given.contract.grad == "inference"), torch.no_grad():
        program(**args)
    return {
        "import torch": imported - began,
        "make the model": made - imported,
        "program": ready - made,
        "first call": time.perf_counter() - ready,
        "traces": counter.num_traces,
        "pieces": counter.num_pieces,
    }


def _start(model: str, store: Path, cache: Path) -> dict[str, float]:
    """Start a process whose compiler's cache is empty."""
    environment = envs.child_environment({"TORCHINDUCTOR_CACHE_DIR": str(cache)})
    command = [*interpreter(), "-c", _CHILD, model, str(store)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no output"]
        raise ServeError(f"starting {model} failed: {last[0]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def _given(model: str, shapes: str = "") -> Given:
    """Call the user's function; `shapes` of the command line comes before what that returned."""
    found = load_function(model)()
    if not isinstance(found, tuple) or len(found) not in (2, 3):
        raise ServeError(f"{model} returned {type(found).__name__}: return (model, contract)")
    given = Given(found[0], found[1], found[2] if len(found) == 3 else {})
    if not isinstance(given.contract, Contract):
        raise ServeError(f"{model} returned {given.contract!r} where a Contract has to be")
    known = set(python_inspect.signature(build).parameters)
    unknown = sorted(given.options.keys() - known)
    if unknown:
        raise ServeError(f"{model} returned the option {unknown[0]!r}, which `build` does not take")
    return given._replace(options={**given.options, "shapes": shapes}) if shapes else given


def _built(given: Given, **options: Any) -> Program:
    """Build a program, and refuse where compiling is turned off: nothing would be proven or stored."""
    program = build(given.model, given.contract, **{**given.options, **options})
    if program.why_eager:
        raise ServeError(
            f"nothing is compiled under {program.why_eager}: unset it for this command"
        )
    return program


def _shown(program: Program) -> str:
    """Return what a program is made of, a line for each part."""
    lines = [f"contract  {program.contract}"]
    for variant in program.variants:
        lines.append(
            f"program   {shown_variant(variant)}: {variant.num_calls} graphs, {len(variant.pieces)} of them different"
        )
        lines += [f"          {verdict}" for verdict in variant.verdicts]
    return "\n".join(lines)


def _entry(name: str, entry: Mapping[str, Any]) -> str:
    factors = entry["factors"]
    machine = ", ".join(f"{key} {value}" for key, value in factors["machine"].items())
    called = f" ({factors['name']!r})" if factors["name"] else ""
    dims = factors["contract"]["dims"]
    lines = [f"{name}  {factors['model']}{called}", f"    for {machine}"]
    lines.append(f"    contract: {', '.join(dims) or 'nothing varies'}")
    lines += [
        f"    program for {Box.from_json(each['box'])}: {each['num_calls']} graphs, "
        f"{len(each['pieces'])} of them different"
        for each in entry["variants"]
    ]
    return "\n".join(lines)
