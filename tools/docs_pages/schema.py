"""The reference of docs/config.md: lists of all keys, optimizers and schedules, from the schema."""

from __future__ import annotations

from docs_pages.lists import listed
from torchloom.config.fields import Key, Section
from torchloom.config.kinds import show
from torchloom.config.optimizer import DEEPSPEED_ONLY, TABLES
from torchloom.config.scheduler import SCHEDULES
from torchloom.config.schema import ConfigSchema

_OUTCOMES = "migrating/deepspeed.md#configuration"
_DISPLAY = {"adamw": "AdamW", "adam": "Adam", "sgd": "SGD", "muon": "Muon"}


def render_reference() -> str:
    """Return the lists of all keys, optimizers and schedules as Markdown.

    Example:
        >>> "`stage3_param_persistence_threshold`" in render_reference()
        True
    """
    places: dict[type[Section], list[str]] = {}
    _find_sections(ConfigSchema, "", places)
    sections = [_section_table(of, paths) for of, paths in places.items()]
    return "\n\n".join((*sections, _optimizers(), _schedules()))


def _find_sections(of: type[Section], path: str, places: dict[type[Section], list[str]]) -> None:
    """Collect each section with the paths at which it stands."""
    places.setdefault(of, []).append(path)
    for key in of.keys.values():
        if key.section is not None:
            _find_sections(key.section, f"{path}.{key.name}" if path else key.name, places)


def _section_table(of: type[Section], paths: list[str]) -> str:
    keys = of.keys.values()
    title = ", ".join(f"`{path}`" for path in paths if path) or "Top level"
    summary = (of.__doc__ or "").strip().splitlines()[0]
    used = [key for key in keys if key.treatment == "used"]
    others = [key for key in keys if key.treatment != "used"]
    return "\n\n".join(
        [
            f"### {title}",
            *([summary] if any(paths) else ()),
            *([_list(used, is_top=not any(paths))] if used else ()),
            *([_others(others)] if others else ()),
        ]
    )


def _list(keys: list[Key], *, is_top: bool) -> str:
    """Return a line for each key; at the top, the heading of a section without another name tells it."""
    shown = [key for key in keys if not (is_top and key.section) or key.aliases or key.old]
    return listed((_names(key), _default(key), key.doc) for key in shown)


def _others(keys: list[Key]) -> str:
    """Return the keys that are hints, change nothing or are refused, in a sentence."""
    names = ", ".join(f"`{name}`" for key in keys for name in (key.name, *key.aliases, *key.old))
    return f"[Other keys]({_OUTCOMES}): {names}."


def _names(key: Key) -> str:
    also = [f"`{name}`" for name in key.aliases]
    also += [f"`{name}` (deprecated)" for name in key.old]
    return f"`{key.name}`" + (f"; also {', '.join(also)}" if also else "")


def _default(key: Key) -> str:
    if key.section is not None or key.free_form or key.default in (None, "", ()):
        return ""
    return f"`{show(key.default)}`"


def _optimizers() -> str:
    rows: dict[str, list[str]] = {}
    for name, table in TABLES.items():
        ours = ", ".join(f"`{param}`" for param in table if param not in DEEPSPEED_ONLY)
        theirs = ", ".join(f"`{param}`" for param in table if param in DEEPSPEED_ONLY)
        translated = f"; translated: {theirs}" if theirs else ""
        rows.setdefault(ours + translated, []).append(f"`{_DISPLAY[name]}`")
    lines = ((", ".join(names), "", params) for params, names in rows.items())
    return f"### `optimizer.type` and its `params`\n\n{listed(lines)}"


def _schedules() -> str:
    lines: list[tuple[str, str, str]] = []
    for name, schedule in SCHEDULES.items():
        params = [
            f"**`{param}`**" if param in schedule.required else f"`{param}`"
            for param in schedule.table
        ]
        lines.append((f"`{name}`", "", ", ".join(params)))
    return f"### `scheduler.type` and its `params` (required ones in bold)\n\n{listed(lines)}"
