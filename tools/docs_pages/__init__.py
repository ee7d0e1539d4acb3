"""Rewrites the generated parts of the pages in docs/.

A page keeps its own text; between two marks, which name the source, stands what this package makes
of it. `make docs-pages` rewrites all pages, and tests/docs fails while one is stale.

marks       finds the marks of a page and fills what is between them
pages       which page holds which generated parts
docstrings  docstrings in Google's form as summary, text and arguments
lists       Markdown lists of arguments and fields
passes      docs/passes.md: presets, passes, what a pass may know
schema      docs/config.md: keys, optimizers, schedules
commands    docs/cli.md: commands and options
"""
