"""All that the page says of a record in words, beside the record itself: plain data for the page's script."""

from __future__ import annotations

from typing import Any

from torchloom.records import Session
from torchloom.report.page.entries import entry_views
from torchloom.report.page.events import event_rows
from torchloom.report.page.figures import RunFigures
from torchloom.report.page.functions import function_view
from torchloom.report.page.index import Index
from torchloom.report.page.overview import overview
from torchloom.report.page.steps import MeasuredSteps
from torchloom.report.page.timeline import timeline


def views(session: Session, run: RunFigures | None) -> dict[str, Any]:
    """Return the views of a record; functions and entries in the order in which the record has them."""
    index = Index(session)
    steps = MeasuredSteps(index)
    number = {id(item): i for i, item in enumerate(index.functions)}
    return {
        "overview": overview(index, run, steps),
        "timeline": timeline(index, steps),
        "events": event_rows(session.events, steps),
        "functions": [
            {"id": item.id, "name": item.name, "depth": item.depth, "place": index.place(item.fn),
             "view": function_view(index, item)}
            for item in index.functions
        ],
        "entries": [
            {"id": item.id, "name": item.name, "owner": number[id(item.owner)],
             "views": entry_views(index, item)}
            for item in index.entries
        ],
        "breaks": [
            {"owner": number[id(each.owner)], "reason": each.each.reason, "place": index.short(each.each.place),
             "explanation": each.each.explanation}
            for each in index.breaks
        ],
    }  # fmt: skip
