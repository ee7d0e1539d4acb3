"""Measured figures on disk: one JSON file for each machine, device and torch version.

The files lie beside compiled graphs (Inductor's cache folder), or in TORCHLOOM_CACHE_DIR. They are
replaced as a whole, never half written, and a figure that is there stays until it is measured anew
on purpose, so that what was chosen by it stays chosen.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
import re
from collections.abc import Mapping
from pathlib import Path

import torch

from torchloom import envs
from torchloom._torch.inductor import inductor_cache_dir
from torchloom.costs.hardware import known_device
from torchloom.costs.table import CostTable
from torchloom.errors import PlanError
from torchloom.files import from_plain, write_whole
from torchloom.log import get_logger

logger = get_logger(__name__)

_FORMAT = 1
# Variables by which the libraries under torch choose their code.
_SPEED_VARIABLES = (
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_CBWR",
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "ATEN_CPU_CAPABILITY",
)


def machine_facts(device: torch.device | str = "cpu") -> dict[str, str]:
    """Return what measured figures depend on besides the operator."""
    kind = torch.device(device)
    facts = {
        "cpu": _cpu_model(),
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(kind) if kind.type == "cuda" else "cpu",
    }
    chosen = {name: envs.get_str(name, "") for name in _SPEED_VARIABLES}
    return {**facts, **{name: value for name, value in chosen.items() if value}}


def table_path(device: torch.device | str = "cpu") -> Path:
    """Return the file of this machine's figures for a device."""
    facts = machine_facts(device)
    digest = hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=4).hexdigest()
    shown = facts["cpu"] if facts["device"] == "cpu" else facts["device"]
    slug = re.sub(r"[^a-z0-9]+", "-", shown.lower()).strip("-")[:48]
    return cache_dir() / f"{slug}-{facts['threads']}t-{digest}.json"


def cache_dir() -> Path:
    """Return the folder of cost tables."""
    root = envs.get_str("TORCHLOOM_CACHE_DIR", "")
    return (Path(root) if root else Path(inductor_cache_dir()) / "torchloom") / "costs"


def load_table(device: torch.device | str = "cpu", path: Path | None = None) -> CostTable:
    """Return this machine's table: modelled, with the figures that were measured here.

    A file that cannot be read counts as none, with a warning.

    Args:
        device: whose figures.
        path: the file, if not this machine's own; it must be there and readable.

    Raises:
        PlanError: `path` is given and is not a cost table.
    """
    fresh = CostTable(device=known_device(device))
    own = table_path(device)
    try:
        text = (path or own).read_text()
        return table_from_json(text)
    except FileNotFoundError as error:
        if path is not None:
            raise PlanError(f"there is no cost table at {path}: run torchloom calibrate") from error
        return fresh
    except (OSError, ValueError) as error:
        if path is not None:
            raise PlanError(
                f"{path} is not a cost table ({error}): write one with torchloom calibrate --out"
            ) from error
        logger.warning("the cost table %s is left aside: %s", own, error)
        return fresh


def save_table(
    table: CostTable,
    device: torch.device | str = "cpu",
    path: Path | None = None,
    *,
    replace: bool = False,
) -> Path:
    """Write a table atomically and return its file; operators of the file that is there stay.

    Args:
        table: what to write.
        device: whose figures.
        path: the file, if not this machine's own.
        replace: whether operators of the table win over those of the file.

    Raises:
        OSError: the file cannot be written.
    """
    target = path or table_path(device)
    there: dict[str, float] = {}
    if target.exists():
        try:
            there = table_from_json(target.read_text()).ops
        except ValueError as error:
            logger.warning("the cost table %s is written anew: %s", target, error)
    ops = {**there, **table.ops} if replace else {**table.ops, **there}
    text = table_to_json(dataclasses.replace(table, ops=ops), machine_facts(device))
    return write_whole(target, text)


def table_to_json(table: CostTable, machine: Mapping[str, str] | None = None) -> str:
    """Return a table as readable JSON; equal tables give equal texts."""
    record = {
        "format": _FORMAT,
        "machine": dict(machine or {}),
        "device": dataclasses.asdict(table.device),
        "network": dataclasses.asdict(table.network),
        "collectives": table.collectives,
        "figures": table.figures,
        "ops": {key: float(f"{us:.6g}") for key, us in table.ops.items()},
    }
    return json.dumps(record, indent=1, sort_keys=True) + "\n"


def table_from_json(text: str) -> CostTable:
    """Read what `table_to_json` wrote.

    Raises:
        ValueError: the text is something else, or of another version.
    """
    try:
        record = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(record, dict) or record.get("format") != _FORMAT:
        found = record.get("format") if isinstance(record, dict) else type(record).__name__
        raise ValueError(f"format {_FORMAT} was expected, found {found}")
    try:
        parts = {each.name: record[each.name] for each in dataclasses.fields(CostTable)}
        return from_plain(CostTable, parts, is_exact=True)
    except (KeyError, TypeError) as error:
        raise ValueError(f"a part is missing or malformed: {error}") from error


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
