"""Records: JSON and back, versions, damage, what they answer."""

from __future__ import annotations

import dataclasses
import json

import pytest

from torchloom.records import (
    Alive,
    Artifact,
    Break,
    Entry,
    Function,
    Guard,
    Peak,
    Session,
    Standing,
    from_json,
    load_record,
    save_record,
    to_json,
)


def session() -> Session:
    brk = Break(
        reason="data-dependent branch",
        explanation="e",
        hints=["h"],
        user_stack=["a.py:3 in f"],
        gb_type="GB0170",
    )
    entries = [
        Entry(
            compile_id="0/0",
            guards=[Guard(source="L['x']", kind="TENSOR_MATCH", text="t", english="e")],
            artifacts=[
                Artifact(kind="forward", title="old", text="1"),
                Artifact(kind="forward", title="new", text="2"),
            ],
            breaks=[brk],
            metrics={"compile_s": 1.5},
        ),
        Entry(compile_id="0/1", breaks=[dataclasses.replace(brk)]),
    ]
    child = Function(name="f.resume", file="a.py", line=3, entries=[Entry(compile_id="1/0")])
    return Session(
        functions=[Function(name="f", file="a.py", line=1, entries=entries, children=[child])]
    )


def test_round_trip(tmp_path) -> None:
    path = save_record(session(), tmp_path / "deep" / "record.json")
    assert load_record(path) == session()
    assert [p.name for p in path.parent.iterdir()] == ["record.json"]
    data = json.loads(path.read_text())
    assert (data["schema"], data["version"]) == ("torchloom.record", 1)


def test_what_a_session_answers() -> None:
    found = session()
    assert [entry.compile_id for entry in found.entries()] == ["0/0", "0/1", "1/0"]
    assert len(found.breaks()) == 1
    assert found.num_recompiles == 1
    assert found["f"].entries[0].artifact("forward") == "2"
    assert found["f"].entries[0].artifact("joint") is None
    assert found["f"].entries[0].compile_s == 1.5
    assert found["resume"].name == "f.resume"
    with pytest.raises(KeyError, match=r"compiled: f, f\.resume"):
        _ = found["g"]


def test_plans_peaks_and_what_stands_come_back_and_may_be_missing() -> None:
    found = session()
    alive = [Alive(kind="activations", layer="layers.0", num_bytes=7, num_values=2)]
    found.peaks.append(
        Peak(graph="graph0", phase="backward", node="mm", layer="", peak_bytes=7, alive=alive)
    )
    found.standing.append(
        Standing(budget_bytes=None, base_bytes=9, step_bytes=0, parts=list(alive))
    )
    data = json.loads(json.dumps(to_json(found)))
    assert from_json(data) == found
    for name in ("plans", "peaks", "standing"):  # records from before these were kept
        del data[name]
    assert from_json(data) == session()


def test_fields_of_a_newer_minor_are_left_out() -> None:
    data = to_json(session())
    data["added_later"] = 1
    data["functions"][0]["entries"][0]["added_later"] = {}
    assert from_json(data) == session()
