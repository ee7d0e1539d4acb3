"""Events: heard by every open recorder, from any thread, up to a limit."""

from __future__ import annotations

import json
import threading

from torchloom import events
from torchloom.events import PassesSkipped, Recorder


def test_open_recorders_hear_and_closed_ones_do_not() -> None:
    assert not events.is_heard()
    with Recorder() as outer:
        events.emit(PassesSkipped(reason="one"))
        with Recorder() as inner:
            assert events.is_heard()
            events.emit(PassesSkipped(reason="two"))
        events.emit(PassesSkipped(reason="three"))
    events.emit(PassesSkipped(reason="four"))
    assert [e.reason for e in outer.events] == ["one", "two", "three"]
    assert [e.reason for e in inner.events] == ["two"]
    assert not events.is_heard()


def test_other_threads_are_heard() -> None:
    with Recorder() as recorder:
        thread = threading.Thread(target=events.emit, args=(PassesSkipped(reason="there"),))
        thread.start()
        thread.join()
    assert [e.reason for e in recorder.events] == ["there"]


def test_a_limit_counts_what_it_drops() -> None:
    with Recorder(limit=2) as recorder:
        for number in range(5):
            events.emit(PassesSkipped(reason=str(number)))
    assert [e.reason for e in recorder.events] == ["0", "1"]
    assert recorder.num_dropped == 3


def test_an_event_is_plain_data() -> None:
    data = PassesSkipped(reason="why").to_dict()
    assert data["kind"] == "PassesSkipped"
    assert json.loads(json.dumps(data)) == data
