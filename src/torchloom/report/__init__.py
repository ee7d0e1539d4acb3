"""Charts as SVG, and records of torch.compile as pages; opens without torch.

`write_page` and `write_trace` take a record, such as `torchloom.watch()` gives. `line_chart` and
`bar_chart` return a chart as text.
"""

from __future__ import annotations

from torchloom.report.charts import Bar, BarGroup, Series, bar_chart, line_chart
from torchloom.report.page import render_page, to_trace, write_page, write_trace

__all__ = [
    "Bar",
    "BarGroup",
    "Series",
    "bar_chart",
    "line_chart",
    "render_page",
    "to_trace",
    "write_page",
    "write_trace",
]
