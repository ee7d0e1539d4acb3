"""docs/cli.md: every command with its arguments and options, one line each, from what typer is given.

Typer's own objects are read, not the help that it prints: that depends on the terminal's width, and
the classes behind it on typer's version.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

import typer
from typer.models import ArgumentInfo, OptionInfo

from docs_pages.docstrings import parse
from docs_pages.lists import listed
from torchloom.cli import command_names, make_app


def commands() -> str:
    """Return a section for each command, in the order of `torchloom --help`."""
    return "\n\n".join("\n\n".join(_command(name)) for name in command_names())


def _command(name: str) -> Iterator[str]:
    app = make_app(name)
    for group in app.registered_groups:
        if group.name == name:
            yield from _group(name, group.typer_instance)
    for command in app.registered_commands:
        if command.name == name and command.callback is not None:
            yield f"## torchloom {name}"
            yield from _body(f"torchloom {name}", command.callback)


def _group(name: str, app: typer.Typer | None) -> Iterator[str]:
    assert app is not None, name
    yield f"## torchloom {name}"
    yield str(app.info.help)
    told: set[_Parameter] = set()
    for command in app.registered_commands:
        assert command.callback is not None, name
        whole = f"torchloom {name} {command.name or command.callback.__name__.replace('_', '-')}"
        yield f"### {whole}"
        yield from _body(whole, command.callback, told)


def _body(
    name: str, callback: Callable[..., Any], told: set[_Parameter] | None = None
) -> Iterator[str]:
    """Yield usage (if there are arguments), text and a list of what an earlier command has not told."""
    parameters = list(_parameters(callback))
    if any(each.usage for each in parameters):
        yield f"`{' '.join([name, *(each.usage for each in parameters if each.usage)])}`"
    doc = parse(callback.__doc__)
    yield f"{doc.summary}\n\n{doc.text}".strip()
    told = set() if told is None else told
    rows = [(each.names, each.default, each.help) for each in parameters if each not in told]
    told.update(parameters)
    if rows:
        yield listed(rows)


class _Parameter(NamedTuple):
    """One argument or option of a command, as it is shown."""

    names: str
    default: str
    help: str
    usage: str
    """Where it stands in the command line; "" for options."""


def _parameters(callback: Callable[..., Any]) -> Iterator[_Parameter]:
    hints = get_type_hints(callback, include_extras=True)
    for name, parameter in inspect.signature(callback).parameters.items():
        kind, info = _annotated(hints[name])
        if info.hidden:
            continue
        default, words = _shown_default(parameter.default, info), info.help or ""
        if isinstance(info, ArgumentInfo):
            shown = info.metavar or name.upper()
            usage = shown if parameter.default is inspect.Parameter.empty else f"[{shown}]"
            usage += "..." if get_origin(kind) is list else ""
            yield _Parameter(f"`{shown}`", default, words, usage)
        else:
            value = "" if kind is bool else f" {info.metavar or _value_name(kind)}"
            if default.startswith("`"):  # The value itself stands for its type.
                value, default = f" {default.strip('`')}", ""
            yield _Parameter(_option_names(name, info, kind, value), default, words, "")


def _option_names(name: str, info: OptionInfo, kind: Any, value: str) -> str:
    flag = name.strip("_").replace("_", "-")
    usual = f"--{flag}/--no-{flag}" if kind is bool else f"--{flag}"
    # In `Annotated`, typer takes the first name for the default.
    first = (info.default,) if isinstance(info.default, str) else ()
    declared = [*first, *(info.param_decls or ())] or [usual]
    *short, last = sorted(declared, key=len)
    return ", ".join(f"`{each}`" for each in (*short, f"{last}{value}"))


def _annotated(hint: Any) -> tuple[Any, ArgumentInfo | OptionInfo]:
    assert get_origin(hint) is Annotated, hint
    kind, info, *_ = get_args(hint)
    alternatives = [each for each in get_args(kind) if each is not type(None)]
    is_optional = type(None) in get_args(kind) and len(alternatives) == 1
    return (alternatives[0] if is_optional else kind), info


def _value_name(kind: Any) -> str:
    if get_origin(kind) is list:
        kind = get_args(kind)[0]
    return {int: "INTEGER", float: "NUMBER", str: "TEXT"}.get(kind, "PATH")


def _shown_default(default: object, info: ArgumentInfo | OptionInfo) -> str:
    if isinstance(info.show_default, str):
        return info.show_default
    if default is inspect.Parameter.empty:
        return "" if isinstance(info, ArgumentInfo) else "required"
    if default is None or default is False or default in ("", []):
        return ""
    return "on" if default is True else f"`{default}`"
