"""The timeline in a real browser: where it opens, how it is moved, what its tables count."""

from __future__ import annotations

from report.sessions import run_session
from torchloom.records import EventRow, Session

LEFT, RIGHT = "\ue012", "\ue014"


def timeline(show, session: Session):
    page = show(session)
    page.open("timeline")
    page.until(lambda: page.texts(".lanes .lane"))
    return page


def names(page) -> list[str]:
    """Return the titles of the bars that are drawn."""
    return page.texts(".lanes .b title")


def pressed(page) -> list[str]:
    return page.texts(".pick [aria-pressed=true]")


def test_lanes_of_phases_compiles_and_collectives(show):
    page = timeline(show, run_session())
    assert page.texts(".lanes .lane") == ["phases", "compile", "gather", "reduce"]
    page.press("Whole run")
    page.until(lambda: len(names(page)) > 20)
    before = names(page)
    page.click("[aria-label='Zoom in']")
    page.click("[aria-label='Zoom in']")
    assert 0 < len(names(page)) < len(before)


def test_it_opens_on_the_first_step_after_the_last_compile(show):
    page = timeline(show, run_session())
    page.until(lambda: pressed(page) == ["Steps"])
    assert "step 2 of 1 to 2, the first after the last compile" in page.texts(".told")[0]
    page.until(lambda: names(page) and not any("step 1" in name for name in names(page)))
    assert sum("step 2" in name for name in names(page)) == 3
    page.click("[aria-label='Previous step']")
    page.until(lambda: any("step 1" in name for name in names(page)))
    assert not any("step 2" in name for name in names(page))
    page.press("Whole run")
    page.until(lambda: {"step 1", "step 2"} <= {name.split(",")[0] for name in names(page)})
    assert pressed(page) == ["Whole run"]
    page.press("Steps")
    page.until(lambda: not any("step 2" in name for name in names(page)))


def test_it_is_moved_by_keys(show):
    page = timeline(show, run_session())
    chart = page.browser.find_element("css selector", "svg.lanes")
    page.until(lambda: pressed(page) == ["Steps"])
    axis = ".lanes .axis"
    seen = [page.texts(axis)]
    for key in ("+", RIGHT, LEFT, "-", "0"):
        chart.send_keys(key)
        seen.append(page.texts(axis))
    assert seen[0] != seen[1] != seen[2] != seen[3]
    assert any("step 1" in name for name in names(page))
    chart.send_keys("n")
    first = page.texts(".chart .detail")[0]
    chart.send_keys("n")
    assert page.texts(".chart .detail")[0] != first
    chart.send_keys("p")
    assert page.texts(".chart .detail")[0] == first
    assert len(page.texts(".lanes .chosen")) == 1


def test_what_torchloom_does_between_steps_has_a_lane(show):
    session = run_session()
    passed = {"name": "bucket", "graph": "graph0.forward", "num_edits": 3, "duration_s": 0.1}
    reviewed = {"step": 1, "duration_s": 0.2, "changes": True}
    session.events += [
        EventRow(kind="PassRan", at_s=1e9 + 0.2, data=passed),
        EventRow(kind="PlanReviewed", at_s=1e9 + 0.99, data=reviewed),
    ]
    page = timeline(show, session)
    assert page.texts(".lanes .lane")[:3] == ["phases", "compile", "torchloom"]
    page.press("Whole run")
    page.until(lambda: any("pass: bucket on graph0.forward" in name for name in names(page)))
    assert any("operators measured in 200 ms; the plan changes" in name for name in names(page))
