"""Charts: valid SVG, nothing left out, bad input refused by name."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from torchloom.report.charts import PALETTE, Bar, BarGroup, Series, bar_chart, line_chart

SVG = "{http://www.w3.org/2000/svg}"


def draw(*series, **options):
    labels = {"title": "Loss", "x_label": "step", "y_label": "nats"}
    return ElementTree.fromstring(line_chart(series, **labels, **options))


def texts(root):
    return [node.text for node in root.iter(f"{SVG}text")]


def test_line_chart_names_everything_once():
    root = draw(Series("a & <b>", [1, 2], [3, 4]), Series("c", [1], [2], True), note="two ranks")
    assert {"Loss", "step", "nats", "a & <b>", "c", "two ranks"} <= set(texts(root))
    assert root.find(f"{SVG}rect").get("fill") == "#FFFFFF"


@pytest.mark.parametrize(
    ("series", "options", "message"),
    [
        ([Series("a", [], [])], {}, "no finite point"),
        ([Series("a", [1], [0.0])], {"log_y": True}, "above 0"),
        ([], {}, "got 0"),
        ([Series("a", [1], [1])] * (len(PALETTE) + 1), {}, "draw several"),
    ],
)
def test_line_chart_refuses(series, options, message):
    with pytest.raises(ValueError, match=message):
        draw(*series, **options)


def test_bar_chart_shows_values_and_error_bars():
    groups = [BarGroup("ours", [Bar(1.234, 1.1, 1.4), None]), BarGroup("theirs", [Bar(2), Bar(3)])]
    root = ElementTree.fromstring(bar_chart(["x", "y"], groups, title="T", y_label="ms"))
    assert {"1.23", "2.00", "3.00", "ours", "theirs", "x", "y", "T", "ms"} <= set(texts(root))
    bars = [r for r in root.findall(f"{SVG}rect") if r.get("fill") in PALETTE]
    assert len(bars) == 3
    assert all(float(r.get("height")) > 0 for r in bars)


def test_bar_chart_refuses_groups_of_another_length_and_nothing():
    with pytest.raises(ValueError, match="needs 2 bars"):
        bar_chart(["x", "y"], [BarGroup("a", [Bar(1)])], title="T", y_label="ms")
    with pytest.raises(ValueError, match="no bar above zero"):
        bar_chart(["x"], [BarGroup("a", [None])], title="T", y_label="ms")


def test_a_legend_of_long_names_is_on_the_page() -> None:
    names = [f"{n} of the families that are compared" for n in range(5)]
    svg = line_chart(
        [Series(name, [1, 2], [1, 2]) for name in names], title="t", x_label="x", y_label="y"
    )
    width = int(re.search(r'width="(\d+)"', svg).group(1))
    last = float(re.search(rf'<text x="([\d.]+)"[^>]*>{names[-1]}<', svg).group(1))
    assert last + 6 * len(names[-1]) < width
