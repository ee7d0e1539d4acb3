"""Parts of docs/passes.md: presets, passes, and the context that passes read."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any

from docs_pages.docstrings import fenced, parse
from docs_pages.lists import arguments, fields, listed
from torchloom.config.schema_sections import CompileSection
from torchloom.graph import GraphPass, PassContext
from torchloom.passes import PASSES
from torchloom.pipeline.registry import PRESETS

_EXACT = re.compile(r"\s*Changes\s+no\s+values\.")
"""The page says once that this holds for each pass whose section says nothing else."""


def presets() -> str:
    """Return the passes of each ZeRO stage."""
    return listed(
        (f"stage {stage}", "", ", ".join(f"`{name}`" for name in names))
        for stage, names in PRESETS.items()
    )


def context() -> str:
    """Return what a pass may know."""
    return fields(PassContext)


def sections() -> str:
    """Return a section for each pass; passes of one module share one."""
    by_module = groupby(PASSES.values(), key=lambda each: _function(each).__module__)
    modules: dict[str, list[GraphPass]] = {}
    for module, passes in by_module:
        modules.setdefault(module, []).extend(passes)
    return "\n\n".join("\n\n".join(_section(name, each)) for name, each in modules.items())


def _section(module: str, passes: list[GraphPass]) -> Iterator[str]:
    document = inspect.cleandoc(sys.modules[module].__doc__ or "")
    summary, _, text = _EXACT.sub("", document).rstrip().partition("\n\n")
    yield f"## {', '.join(each.name for each in passes)}"
    yield summary
    for each in passes:
        yield _facts(each, alone=len(passes) == 1)
    if text:
        yield fenced(text)
    for each in passes:
        options = arguments(_function(each), only_keywords=True)
        if options:
            yield options


def _facts(each: GraphPass, *, alone: bool) -> str:
    facts = [f"Stage: {each.stage}."]
    for label, names in (
        ("Provides", each.provides),
        ("Requires", each.requires),
        ("Excludes", each.conflicts_with),
    ):
        if names:
            facts.append(f"{label}: {', '.join(f'`{name}`' for name in sorted(names))}.")
    keys = CompileSection.keys.values()
    facts += [f"`compile.{key.name}` adds it." for key in keys if key.adds == each.name]
    text = " ".join(facts)
    if alone:
        return text
    return f"`{each.name}`: {parse(_function(each).__doc__).summary} {text}"


def _function(each: GraphPass) -> Callable[..., Any]:
    """Return the function of a pass, without options that are bound to it."""
    fn = each.fn
    while isinstance(fn, functools.partial):
        fn = fn.func
    return inspect.unwrap(fn)
