"""What the page tells of functions that run eagerly, of continuations and of where a compile began."""

from __future__ import annotations

import pytest

from report.test_page_records import small_session
from torchloom.records import Continuation, Entry, EventRow, Function, Session, Span

pytestmark = [
    # selenium leaves its connection to the driver to the garbage collector
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def limited_session() -> Session:
    """Return a record of a function that reached its limit, and of one that Dynamo skipped."""
    session = small_session()
    f = session.functions[0]
    f.recompile_limit, f.num_eager_calls = 2, 6
    f.skipped = "the recompile limit of 2 is reached: 6 calls that no entry fits ran eagerly"
    session.functions.append(
        Function(
            name="gen", file="/home/me/f.py", line=40, skipped="failed: Unsupported: try block"
        )
    )
    session.num_unknown_eager_calls = 3
    return session


def broken_session() -> Session:
    """Return a record with the continuations of a break, bytecode before and after, and a stack."""
    session = small_session()
    entry = session.functions[0].entries[0]
    entry.continuations = [
        Continuation(
            name="__resume_at_1", function="torch_dynamo_resume_in_f_at_3", line=3,
            source="def rest(y):\n    return y / 2\n", num_entries=2,
        ),
        Continuation(
            name="__resume_at_2", function="torch_dynamo_resume_in_f_at_5", line=5,
            source="def rest(y):\n    return y\n",
        ),
    ]  # fmt: skip
    entry.original_bytecode = "RESUME\nLOAD_FAST x\nRETURN_VALUE\n"
    entry.stack = ["/home/me/main.py:9 in main", "/home/me/f.py:3 in f"]
    return session


def test_a_function_at_its_limit_is_the_first_thing_to_fix(show):
    page = show(limited_session())
    first, second = page.texts(".fixes li")[:2]
    assert "reached the recompile limit of 2; 6 calls ran eagerly" in first
    assert "f" in first
    assert "3 calls" in second
    assert "9" in page.texts(".card.bad strong")
    assert "calls ran eagerly" in " ".join(page.texts(".card.bad"))
    page.open("fn/f")
    (banner,) = page.texts(".loud")
    assert "reached the recompile limit of 2; 6 calls ran eagerly" in banner


def test_functions_that_dynamo_skipped_are_listed_with_the_reason(show):
    page = show(limited_session())
    assert "Functions that run eagerly" in page.texts("h2")
    rows = page.texts(".skipped tbody tr")
    assert len(rows) == 1
    assert "gen" in rows[0]
    assert "failed: Unsupported: try block" in rows[0]


def test_continuations_stand_in_the_order_of_calls_taken_or_not(show):
    page = show(broken_session())
    page.open("entry/0-0/bytecode")
    heads = page.texts(".continuation h3")
    assert len(heads) == 2
    assert "f, from line 3 on" in heads[0]
    assert "taken: 2 compiled versions" in heads[0]
    assert "not compiled" in heads[1]
    texts = page.texts(".continuation .code")
    assert "return y / 2" in texts[0]
    assert page.texts("main h2")[-2:] == [
        "Bytecode that Python compiled",
        "Bytecode that Dynamo wrote",
    ]
    assert "LOAD_FAST x" in page.texts(".beside .code")[-2]


def test_the_calls_that_led_to_a_compile_are_told(show):
    page = show(broken_session())
    page.open("entry/0-0/guards")
    (stack,) = page.texts(".stack-of-calls ol")
    assert "main.py:9 in main" in stack
    assert stack.index("main.py:9") < stack.index("f.py:3")


def test_what_was_not_counted_and_what_was_left_out_are_no_numbers(show):
    session = small_session()
    f = session.functions[0]
    f.qualname, f.entries[1].is_counted = "main.<locals>.f", False
    session.overhead = {"tap_ms": 2.0, "events_dropped": 7}
    page = show(session)
    told = dict(
        zip(
            page.texts(".columns section:last-child dt"),
            page.texts("section:last-child dd"),
            strict=False,
        )
    )
    assert told["events left out"] == "7"
    page.open("fn/f")
    assert "main.<locals>.f" in page.texts("dd code")
    assert "not counted" in page.texts("table.stack tbody tr")[1]
    page.open("entry/0-1")
    assert "calls servednot counted" in page.texts("dl.facts")[0]


def test_a_record_without_these_facts_shows_none_of_them(show):
    page = show(small_session())
    assert page.texts(".loud") == []
    assert "Functions that run eagerly" not in page.texts("h2")
    page.open("entry/0-0/bytecode")
    assert page.texts(".continuation") == []
    assert page.texts(".stack-of-calls") == []


def test_a_served_program_is_named_and_its_compile_time_is_that_of_its_spans(show):
    spans = [Span(name="bytecode_tracing", start_us=1e15, duration_us=1.5e6)]
    graph = Function(name="captured graph", file="", line=0)
    graph.entries.append(Entry(compile_id="0/0", spans=spans))
    data = {
        "model": "served.Net", "origin": "built", "key": "", "contract": "c", "seconds": 2.0,
        "boxes": ["batch 1 to 64"], "num_calls": [1], "num_graphs": 1, "verdicts": [],
    }  # fmt: skip
    event = EventRow(kind="ProgramReady", at_s=1e9, data=data)
    page = show(Session(functions=[graph], events=[event]))
    assert page.texts("h1") == ["torchloom programs: served.Net"]
    assert "1.50 s" in page.texts(".card strong")
    assert ":0" not in page.texts("main")[0]
    page.open("fn/captured graph")
    assert "captured to be served" in page.texts("main")[0]
