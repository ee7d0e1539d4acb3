"""The picture of a graph in a real browser: groups, frames, search in closed groups, keys."""

from __future__ import annotations

from report.sessions import big_session, small_session
from torchloom.records import Artifact, Entry, Function, Session

ENTER = "\ue007"


def test_a_graph_as_a_picture(show):
    page = show(small_session())
    page.open("entry/0-0/graphs")
    page.click("#way-picture")
    assert page.texts(".box .name") == ["L_x_", "neg", "y", "output"]
    assert len(page.texts(".edge")) == 3
    page.js("document.querySelectorAll('.box')[2].dispatchEvent(new MouseEvent('click'))")
    detail = page.texts(".node-detail")[0]
    assert "torch.exp" in detail and "f32[10]" in detail and "f.py:2" in detail
    page.type(".picture input", "exp")
    page.until(lambda: page.texts(".box.found .name") == ["y"])
    page.press("Show in the text")
    page.until(lambda: "torch.exp" in "".join(page.texts(".line.hit")))


def test_a_large_graph_begins_closed_and_opens_by_group(show):
    page = show(big_session(30))
    page.open("entry/0-0/graphs")
    page.click("#way-picture")
    closed = len(page.texts(".box"))
    assert 1 < closed <= 150
    page.js("document.querySelector('.box.k-group').dispatchEvent(new MouseEvent('dblclick'))")
    assert len(page.texts(".box")) > closed
    page.press("Expand")
    assert closed < len(page.texts(".box")) <= 400
    assert "stay closed" in page.texts(".picture .told")[0]
    page.press("Collapse")
    assert len(page.texts(".box")) <= closed


def test_a_graph_is_walked_by_keyboard(show):
    page = show(big_session(4))
    page.open("entry/0-0/graphs")
    page.click("#way-picture")
    closed = len(page.texts(".box"))
    page.browser.find_element("css selector", "svg.graph").send_keys("n")
    assert len(page.texts(".box.chosen")) == 1
    page.browser.find_element("css selector", "svg.graph").send_keys(ENTER)
    assert len(page.texts(".box")) != closed


CALLS = """class GraphModule(torch.nn.Module):
    def forward(self, primals_1: "f32[8]"):
        start: "f32[8]" = torch.ops.aten.neg.default(primals_1)
        region = torch.ops.torchloom.region.default('a1b2-77-01', 0, [start], [], True)
        getitem: "f32[8]" = region[0]
        between: "f32[8]" = torch.ops.aten.abs.default(getitem)
        region_1 = torch.ops.torchloom.region.default('a1b2-77-01', 1, [between], [], True)
        getitem_1: "f32[8]" = region_1[0]
        last: "f32[8]" = torch.ops.aten.exp.default(getitem_1)
        return (last,)
"""
BODY = """class GraphModule(torch.nn.Module):
    def forward(self, operand: "f32[8]"):
        inside: "f32[8]" = torch.ops.aten.sin.default(operand)
        return [inside]
"""


def test_equal_layers_are_one_box_that_opens(show):
    artifacts = [
        Artifact(kind="forward", title="forward", text=CALLS),
        Artifact(kind="body", title="a1b2-77 backward: layer x 2 (b.1 ... b.0)", text=CALLS),
        Artifact(kind="body", title="a1b2-77 forward: layer x 2 (b.0 ... b.1)", text=BODY),
    ]
    entry = Entry(compile_id="0/0", artifacts=artifacts)
    function = Function(name="Model", file="/home/me/model.py", line=1, entries=[entry])
    page = show(Session(torchloom="0.1", functions=[function]))
    page.open("entry/0-0/graphs")
    page.click("#way-picture")
    assert page.texts(".box .name")[1:3] == ["start", "layer x 2"]
    assert "region" not in page.texts(".box .name")
    page.js("document.querySelector('.box.k-group').dispatchEvent(new MouseEvent('dblclick'))")
    page.until(lambda: {"region", "between", "region_1"} <= set(page.texts(".box .name")))
    page.js("document.querySelector('.box.k-layer').dispatchEvent(new MouseEvent('click'))")
    page.press("Open the layer")
    page.until(lambda: "inside" in page.texts(".box .name"))
    shown = page.js(
        "return [...document.querySelectorAll('.bar select')].map(s => s.selectedOptions[0].text)"
    )[-1]
    assert shown == "a1b2-77 forward: layer x 2 (b.0 ... b.1)"


def picture(show, num_layers: int):
    page = show(big_session(num_layers))
    page.open("entry/0-0/graphs")
    page.click("#way-picture")
    return page


def test_open_groups_are_frames_around_what_they_hold(show):
    page = picture(show, 3)
    page.press("Expand")
    inside = page.js(
        """
        const box = (e) => e.querySelector("rect").getBoundingClientRect();
        const frames = [...document.querySelectorAll(".frame")].map((e) => [e.dataset.id, box(e)]);
        const boxes = [...document.querySelectorAll(".box")].map((e) => [e.dataset.id, box(e)]);
        let held = 0, wrong = [];
        for (const [id, b] of [...boxes, ...frames]) for (const [frame, f] of frames) {
          if (id === frame) continue;
          const isIn = b.left >= f.left - 1 && b.right <= f.right + 1 &&
            b.top >= f.top - 1 && b.bottom <= f.bottom + 1;
          const isApart = b.right <= f.left + 1 || b.left >= f.right - 1 ||
            b.bottom <= f.top + 1 || b.top >= f.bottom - 1;
          if (id.startsWith(frame + "/")) { held++; if (!isIn) wrong.push([id, frame]); }
          else if (!frame.startsWith(id + "/") && !isApart) wrong.push([id, frame]);
        }
        return [held, wrong];
        """
    )
    assert inside[0] > 20
    assert inside[1] == []
    titles = page.texts(".frame-title .name")
    assert any(title.startswith("layers.2  (") for title in titles)
