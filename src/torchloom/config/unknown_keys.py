"""Tell users of keys that torchloom does not know: "did you mean ...?".

A misspelt key is an error, any other unknown key a warning.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Iterator

from torchloom.config.fields import Section
from torchloom.config.findings import Findings, nearest
from torchloom.config.jsonc import join
from torchloom.config.kinds import show
from torchloom.config.schema import ConfigSchema

_HOMES = {
    **{f"{name}": f"optimizer.params.{name}" for name in ("lr", "betas", "eps", "weight_decay")},
    "momentum": "optimizer.params.momentum",
    "learning_rate": "optimizer.params.lr",
    "batch_size": "train_batch_size",
    **{
        name: f"scheduler.params.{name}"
        for name in ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
    },
}


def tell_unknown(of: type[Section], name: str, parent: str, findings: Findings) -> None:
    """Add what is said of an unknown key.

    Args:
        of: the section in which it stands.
        name: the key.
        parent: the path of the section, as the user wrote it.
        findings: collects errors, notes and hints.
    """
    names = [each for key in of.keys.values() for each in (key.name, *key.aliases, *key.old)]
    if (meant := misspelt(name, names)) is not None:
        findings.error(join(parent, name), "unknown key", f"did you mean {join(parent, meant)}?")
        return
    close = nearest(name, of.keys)
    suggestion = join(parent, close) if close else _elsewhere(name)
    ending = f"did you mean {suggestion}?" if suggestion else "remove it or check its spelling"
    findings.warn(join(parent, name), f"unknown key, ignored: {ending}")


def without_dotted(tree: dict[str, object], findings: Findings) -> dict[str, object]:
    """Return the top level without dotted keys, which are ignored with a warning."""
    for name in tree:
        if "." in name:
            known = name if name in known_paths() else nearest(name, known_paths())
            nested = show(tree[name])
            for part in reversed((known or name).split(".")):
                nested = f"{{{show(part)}: {nested}}}"
            findings.warn(name, f"a dotted key is ignored, as DeepSpeed does; nest it: {nested}")
    return {name: value for name, value in tree.items() if "." not in name}


@functools.cache
def known_paths() -> tuple[str, ...]:
    """Return the dotted path of every key of the schema."""
    return tuple(_paths(ConfigSchema, ""))


def misspelt(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that `word` misspells: one edit away, or two from 9 letters on.

    Example:
        >>> misspelt("zero_optimisation", ["zero_optimization"]), misspelt("notes", ["nodes_x"])
        ('zero_optimization', None)
    """
    if len(word) < 4:
        return None
    edits = 1 if len(word) < 9 else 2
    as_long = [name for name in known if abs(len(name) - len(word)) <= edits]
    cutoff = 1 - edits / len(word) - 1e-9
    return next(iter(difflib.get_close_matches(word.lower(), as_long, 1, cutoff)), None)


def _paths(of: type[Section], path: str) -> Iterator[str]:
    for key in of.keys.values():
        here = join(path, key.name)
        yield here
        if key.section is not None:
            yield from _paths(key.section, here)


def _elsewhere(name: str) -> str | None:
    """Return the known path that ends in this name, when the key only sits in the wrong place."""
    last_parts = {path.rpartition(".")[2]: path for path in reversed(known_paths())} | _HOMES
    close = nearest(name, last_parts) if name not in last_parts else name
    return last_parts[close] if close else None
