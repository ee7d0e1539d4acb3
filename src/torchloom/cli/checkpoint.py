"""`torchloom checkpoint`: verify, list, show, export and import checkpoints.

These commands need no process group and no GPU, and execute nothing from a checkpoint.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from torchloom.checkpoints.choose import Candidate, candidate, candidates, chosen
from torchloom.checkpoints.contents import Contents, read_contents
from torchloom.checkpoints.deepspeed import import_deepspeed
from torchloom.checkpoints.folder import check_tag, is_checkpoint
from torchloom.checkpoints.manifest import check_names
from torchloom.checkpoints.save_model import export as export_weights
from torchloom.cli.terminal import print_table, writing
from torchloom.errors import CheckpointError, ConfigError
from torchloom.plan.text import show_bytes

checkpoint = typer.Typer(
    no_args_is_help=True, help="Verify, list, show, export and import checkpoints."
)

Folder = Annotated[Path, typer.Argument(help="A folder of checkpoints, or one checkpoint.")]
Tag = Annotated[str | None, typer.Option(help="Name of a checkpoint in the folder.")]

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_GB = 1e9
_WIDTH = 200


@checkpoint.command()
def verify(folder: Folder, tag: Tag = None) -> None:
    """Compare all files with their digests; the exit code is 1 if any file is damaged."""
    bad = 0
    for each in [_one(folder, tag)] if tag is not None else _all(folder):
        started = time.perf_counter()
        wrong = each.wrong()
        seconds = max(time.perf_counter() - started, 1e-9)
        if wrong:
            bad += 1
            print(f"{each.tag}: DAMAGED")
            for sentence in wrong:
                print(f"  {sentence}")
        elif each.manifest is not None:
            size = each.manifest.num_bytes
            print(
                f"{each.tag}: ok, {len(each.manifest.files)} files, {show_bytes(size)} in {seconds:.2f} s, "
                f"{size / seconds / _GB:.2f} GB/s"
            )
    if bad:
        raise typer.Exit(1)


@checkpoint.command("list")
def list_(folder: Folder) -> None:
    """List the checkpoints of a folder, newest first, and check names and sizes of their files."""
    columns = ("tag", "step", "saved", "ranks", "size", "state")
    print_table(map(_row, _all(folder)), *columns, width=_WIDTH)


def _row(each: Candidate) -> tuple[str, ...]:
    manifest = each.manifest
    if manifest is None:
        return each.tag, "", "", "", "", each.why_not
    wrong = check_names(each.path, manifest)
    state = wrong[0] if wrong else "complete" if manifest.is_latest else "complete, not latest"
    step, size = str(manifest.facts.get("step", "")), show_bytes(manifest.num_bytes)
    return each.tag, step, _time(manifest.saved_at), str(manifest.world_size), size, state


@checkpoint.command()
def show(folder: Folder, tag: Tag = None) -> None:
    """Show the contents of a checkpoint; without --tag, of the newest one."""
    found = _one(folder, tag)
    contents = read_contents(found.path)
    rows = ((name, str(value)) for name, value in _facts(found, contents))
    print_table(rows, "what", "value", width=_WIDTH)


@checkpoint.command()
def export(
    folder: Folder,
    to: Annotated[Path, typer.Option("--to", help="Folder to write to.")],
    tag: Tag = None,
    dtype: Annotated[
        str, typer.Option(help="Type of floating-point weights: bf16, fp16, fp32, or keep.")
    ] = "keep",
    shard_gb: Annotated[
        float, typer.Option(help="Size in GB after which a new file begins.")
    ] = 5.0,
    hf_config: Annotated[
        Path | None,
        typer.Option(help="File to copy as config.json.", show_default="the saved model's, if any"),
    ] = None,
) -> None:
    """Verify a checkpoint and write its weights as safetensors, with an index for several files."""
    config = None if hf_config is None else _config(hf_config)
    if dtype != "keep" and dtype not in _DTYPES:
        raise ConfigError(f"--dtype {dtype}: use bf16, fp16, fp32 or keep")
    if not 0 < shard_gb * _GB < math.inf:
        raise ConfigError(f"--shard-gb {shard_gb}: use a positive number of GB, such as 5")
    found = _one(folder, tag)
    wrong = found.wrong()
    if wrong:
        raise CheckpointError(f"checkpoint {found.tag!r} is damaged: {'; '.join(wrong[:3])}")
    contents = read_contents(found.path)
    with writing(to):
        for path in export_weights(contents, to, _DTYPES.get(dtype), int(shard_gb * _GB), config):
            print(f"{path}  {show_bytes(path.stat().st_size)}")
    left_out = [name for name in contents.params if f"model/{name}" not in contents.index]
    if left_out:
        print(f"left out, as when it was saved: {', '.join(left_out)}")


def _config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--hf-config {str(path)!r} cannot be read as JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"--hf-config {str(path)!r} holds no JSON object: name a config.json")
    return config


@checkpoint.command("import")
def import_(
    source: Annotated[
        Path, typer.Argument(help="A folder of DeepSpeed's checkpoints, or one checkpoint.")
    ],
    to: Annotated[Path, typer.Argument(help="Folder of checkpoints to write into.")],
    tag: Tag = None,
) -> None:
    """Write a checkpoint of DeepSpeed's (ZeRO 1 to 3, or universal) as one of torchloom's."""
    with writing(to):
        found = import_deepspeed(source, to, tag)
    facts = found.facts
    print(f"{found.path}  {len(facts['params'])} parameters, step {facts['global_steps']}")
    for note in found.notes:
        print(f"left out: {note}")


def _all(folder: Path) -> list[Candidate]:
    if is_checkpoint(folder):
        path = folder.resolve()
        return [candidate(path.parent, path.name)]
    found = candidates(folder)
    if not found:
        raise CheckpointError(f"no checkpoint in {str(folder)!r}: name a folder that holds some")
    return found


def _one(folder: Path, tag: str | None) -> Candidate:
    """Return the checkpoint that is asked for, by default the newest."""
    if tag is not None:
        return chosen(folder, check_tag(tag))[0]
    found = _all(folder)
    return next((each for each in found if each.manifest is not None), found[0])


def _facts(found: Candidate, contents: Contents) -> Iterator[tuple[str, object]]:
    facts, index = contents.facts, contents.index
    yield "path", contents.path
    yield "format", contents.facts["format"]
    if found.manifest is not None:
        yield "saved", _time(found.manifest.saved_at)
        yield "by torchloom", found.manifest.facts.get("torchloom")
        yield "size", show_bytes(found.manifest.num_bytes)
    yield "step", facts.get("global_steps")
    yield "samples", facts.get("global_samples")
    yield "ranks", contents.world_size
    yield "ZeRO stage", facts.get("stage")
    numel = sum(int(torch.Size(shape).numel()) for shape in contents.params.values())
    yield "parameters", f"{numel:,} in {len(contents.params)} tensors"
    yield "optimizer states", sum(key.startswith("optim/") for key in index)
    yield "gradients", "yes" if any("grad/" in key for key in index) else "none"
    if contents.own:
        yield "differs by rank", ", ".join(sorted(contents.own))
    for name in ("groups", "scheduler", "loader", "client_state"):
        if name in contents.trees:
            yield name, _shortened(contents.value(name))


def _shortened(value: object) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 400 else f"{text[:400]}..."


def _time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
