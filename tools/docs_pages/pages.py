"""Which page holds which generated parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torchloom
from docs_pages import (
    commands,
    deepspeed_engine,
    deepspeed_keys,
    fsdp,
    metrics,
    passes,
    private_names,
    schema,
)
from docs_pages.lists import arguments
from docs_pages.marks import filled
from torchloom.pipeline.backend import weave

DOCS = Path(__file__).parents[2] / "docs"

PAGES: Mapping[str, Mapping[str, Callable[[], str]]] = {
    "config.md": {"the schema": schema.render_reference},
    "passes.md": {
        "the presets": passes.presets,
        "the passes": passes.sections,
        "PassContext": passes.context,
    },
    "backends.md": {
        "the backend torchloom": lambda: arguments(weave, skip=("gm", "example_inputs"))
    },
    "metrics.md": {"StepEnded": metrics.render_metrics},
    "training.md": {"engine.compile": lambda: arguments(torchloom.Engine.compile)},
    "serving.md": {
        "support_torch_compile": lambda: arguments(torchloom.support_torch_compile, skip=("cls",))
    },
    "cli.md": {"the commands": commands.commands},
    "migrating/deepspeed.md": {
        "the keys of DeepSpeed": deepspeed_keys.render_keys,
        "the names of DeepSpeedEngine": deepspeed_engine.render_engine,
    },
    "migrating/fsdp2.md": {"the calls of FSDP": fsdp.render_calls},
    "versions.md": {"torchloom._torch.table": private_names.render},
}


def stale(page: str) -> str | None:
    """Return the page as it should be, or None where it is so already.

    Args:
        page: a name in `PAGES`.

    Raises:
        ValueError: the page lacks marks, or a docstring lacks an argument.
    """
    text = (DOCS / page).read_text(encoding="utf-8")
    wanted = filled(text, PAGES[page])
    return None if wanted == text else wanted
