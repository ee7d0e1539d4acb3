"""What a configuration says, beside what the user gave to the framework.

filled in      keys that are "auto", and some that are not there, by the framework's arguments
compared       keys that are written in both places: all that differ are told in one list
left out       keys that a framework's loop cannot follow, with a warning
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from torchloom import envs
from torchloom.errors import ConfigError
from torchloom.log import get_logger

logger = get_logger(__name__)

DEFAULT: Mapping[str, Any] = {"zero_optimization": {"stage": 3}}
"""What a run asks for that brings no configuration."""


@dataclass(frozen=True)
class Given:
    """A value of the configuration that the user gave to the framework as well."""

    path: str
    """Of its key, dotted."""
    value: object
    name: str
    """What the framework calls it."""
    fills: bool = False
    """Whether it counts also where the configuration does not have the key."""
    must_match: bool = True
    """Whether another value in the configuration is an error; otherwise the configuration's counts."""


def refuse_contradictions(tree: Mapping[str, Any], given: Sequence[Given], caller: str) -> None:
    """Compare what is written in a configuration with what the framework was given.

    Args:
        tree: the configuration.
        given: what the user gave to the framework.
        caller: the class that the user named.

    Raises:
        ConfigError: with all that differ.
    """
    told = [
        f"{each.path} is {written!r}, and {each.name} is {each.value!r}"
        for each in given
        if each.must_match
        and (written := value_at(tree, each.path)) is not None
        and not _equal(written, each.value)
    ]
    if told:
        raise ConfigError(
            f'the configuration contradicts what {caller} was given; make them equal, or write "auto" in '
            f"the configuration: {'; '.join(told)}"
        )


def warn_once(text: str) -> None:
    """Log a warning on the first rank alone."""
    if (dist.get_rank() if dist.is_initialized() else envs.launch().rank) == 0:
        logger.warning("%s", text)


def without_host_optimizer(tree: dict[str, Any], caller: str) -> dict[str, Any]:
    """Return the configuration without DeepSpeed's keys that put optimizer states on the host.

    About half of the files that people have ask for it, mostly where the shards would fit: a warning serves them
    better than a refusal.
    """
    zero = tree.get("zero_optimization")
    if not isinstance(zero, Mapping):
        return tree
    section = zero.get("offload_optimizer")
    device = section.get("device") if isinstance(section, Mapping) else None
    if device != "cpu" and zero.get("cpu_offload") is not True:
        return tree
    key = "offload_optimizer" if device == "cpu" else "cpu_offload"
    warn_once(
        f"zero_optimization.{key} is left out: {caller} steps the optimizer itself, so its states stay on the device, "
        "each rank those of its shards. If that is too much, give compile.memory_budget, or train with "
        "torchloom.initialize, which streams them from the host"
    )
    kept = {k: v for k, v in zero.items() if k not in ("offload_optimizer", "cpu_offload")}
    return {**tree, "zero_optimization": kept}


def with_filled(tree: dict[str, Any], given: Sequence[Given]) -> dict[str, Any]:
    """Return the configuration with the keys that it lacks and the framework knows."""
    found = dict(tree)
    for each in given:
        section, _, key = each.path.rpartition(".")
        if not each.fills or value_at(found, each.path, "auto") is not None:
            continue
        if not section:
            found[key] = each.value
        else:
            found[section] = {**(found.get(section) or {}), key: each.value}
    return found


def value_at(tree: Mapping[str, Any], path: str, auto: object = None) -> Any:
    """Return what is written at a dotted path; None if nothing is, `auto` for "auto"."""
    value: Any = tree
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return auto if value == "auto" else value


def _equal(written: object, given: object) -> bool:
    """Compare a value in a file, perhaps a number as text or a list, with one of Python."""
    if isinstance(written, (list, tuple)) and isinstance(given, (list, tuple)):
        return len(written) == len(given) and all(map(_equal, written, given))
    if isinstance(given, (int, float)) and not isinstance(given, bool):
        try:
            return math.isclose(float(written), float(given), rel_tol=1e-9)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            return False
    if isinstance(given, str) and isinstance(written, str):
        return written.lower() == given.lower()
    return written == given
