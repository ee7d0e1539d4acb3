"""A record of torch.compile as one HTML page that opens offline, and as a Perfetto trace."""

from __future__ import annotations

from torchloom.report.page.comparison import ComparedRun
from torchloom.report.page.render import render_comparison, render_page, write_page
from torchloom.report.page.timeline import to_trace, write_trace

__all__ = [
    "ComparedRun",
    "render_comparison",
    "render_page",
    "to_trace",
    "write_page",
    "write_trace",
]
