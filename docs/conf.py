"""Sphinx: the pages of this folder, and the reference from docstrings."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sphinx.ext.napoleon import Config, GoogleDocstring

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

import torchloom
from docs_pages.rest import to_rest

project = "torchloom"
author = "The torchloom developers"
copyright = author
version = release = torchloom.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton", "sphinx_design"]
exclude_patterns = ["_build"]
nitpicky = False
highlight_language = "text"  # of blocks that name no language
python_maximum_signature_line_length = 80

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "deflist"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True}
autodoc_mock_imports = [
    name for name in ("accelerate", "lightning", "transformers") if find_spec(name) is None
]

smartquotes = False  # errors and keys are quoted as they are

html_theme = "furo"
html_title = "torchloom"
html_static_path = ["_static"]
html_css_files = ["torchloom.css"]
html_show_sphinx = False
html_copy_source = False
html_theme_options = {"navigation_with_keys": True}


NAPOLEON = Config(napoleon_numpy_docstring=False, napoleon_use_rtype=False)


def _docstring(
    app: Any, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    text = to_rest("\n".join(lines))
    if text.startswith("Alias for field number"):
        lines[:] = []  # of a NamedTuple's field that has no text of its own
    elif what in ("attribute", "data", "property"):
        lines[:] = text.splitlines()  # napoleon would take words before a colon for a type
    else:
        lines[:] = GoogleDocstring(text, NAPOLEON, app, what, name, obj, options).lines()


def setup(app: Any) -> None:
    """Read docstrings as they are written in the source.

    Args:
        app: of Sphinx.
    """
    app.connect("autodoc-process-docstring", _docstring)
