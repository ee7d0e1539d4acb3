"""The fault matrix: its judge can fail, its traces are found, and some of its cases run end to end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from dataclasses import replace

import pytest

from faults.matrix import __main__ as matrix
from faults.matrix import table, traces
from faults.matrix.case import FINE, Case, exits, killed, told
from faults.matrix.cases import CASES, chosen
from faults.matrix.forkserver import ForkServer
from faults.matrix.judge import Observation, Seen, judge
from faults.matrix.programs import PROGRAMS
from faults.matrix.ranks import LIBRARIES, run_case

CASE = Case(name="a case", program="ends", ends=(told("rank 1", "in step"), killed(9)))
SAID = "[rank 0] PeerLostError: rank 1 has ended; rank 0 waits for it, in step 3"


def observed(
    *pairs: tuple[int | None, str], case: Case = CASE, seconds: float | None = 2.0, **rest
) -> Observation:
    """Return what was seen of a case, from codes and outputs by rank."""
    processes = [
        Seen(name=f"rank {rank}", code=code, text=text, ends=case.ends[rank])
        for rank, (code, text) in enumerate(pairs)
    ]
    return Observation(case=case, processes=processes, seconds=seconds, libraries=LIBRARIES, **rest)


def test_a_case_that_ends_as_it_must() -> None:
    found = judge(observed((1, SAID), (-9, "")))
    assert (found.word, found.sentence, found.codes) == ("told", SAID, "1 -9")
    assert found.is_good


@pytest.mark.parametrize(
    ("first", "word", "why"),
    [
        ((0, ""), "SILENT", "ended with 0"),
        ((1, ""), "SILENT", "says nothing"),
        ((1, "[rank 0] ValueError: rank 0 in step 1"), "SILENT", "'rank 1'"),
        ((1, f'  File "{LIBRARIES[0]}a.py", line 3, in f\n{SAID}'), "NOISE", "library"),
        ((1, f"Traceback (most recent call last):\n{SAID}"), "NOISE", "traceback"),
    ],
)
def test_what_must_not_be_seen(first, word: str, why: str) -> None:
    found = judge(observed(first, (-9, "")))
    assert found.word == word
    assert why in found.why
    assert not found.is_good


def test_limits() -> None:
    assert judge(observed((1, SAID), (-9, ""), seconds=10.5)).word == "HUNG"
    assert judge(observed((1, SAID), (-9, ""), seconds=None)).word == "HUNG"
    late = observed((-9, ""), (-9, ""))
    late = replace(late, processes=[replace(late.processes[0], in_time=False), late.processes[1]])
    assert "rank 0 did not end" in judge(late).why


RIGHT = replace(CASE, name="right.a", ends=(FINE, FINE))


@pytest.mark.parametrize(
    ("outputs", "word"),
    [
        (((0, "weights a"), (0, "weights a")), "went on"),
        (((0, "weights a"), (0, "weights b")), "SILENT"),
        (((0, "weights nan"), (0, "weights nan")), "SILENT"),
        (((0, "weights a"), (1, "[rank 1] AgreementError: no")), "SILENT"),
    ],
)
def test_right_programs(outputs, word: str) -> None:
    assert judge(observed(*outputs, case=RIGHT)).word == word


def test_processes_that_stay_are_found_whoever_their_parent_is() -> None:
    token = uuid.uuid4().hex
    script = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
    subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, traces.TOKEN: token}, check=True
    )
    deadline = time.monotonic() + 120
    while not (left := traces.processes_of(token)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(left) == 1
    traces.kill(left)
    while traces.processes_of(token) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not traces.processes_of(token)


def test_names_are_unique_and_programs_exist() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    assert {case.trains_like for case in CASES} <= {"", *names}
    wanted = {case.program for case in CASES} | {case.first for case in CASES} - {""}
    assert wanted - {"train"} <= PROGRAMS.keys()
    assert PROGRAMS.keys() == wanted - {"train"}


def test_a_choice_brings_what_it_is_compared_with() -> None:
    (first, second) = chosen(["one rank sleeps 5 s [gloo"])
    assert (first.name, second.trains_like) == ("right.undisturbed [gloo eager stage3]", first.name)


PATIENT_S = 40.0
"""These tests share their cores with others: what takes long is for `make faults` to find."""
QUICK = (
    "differ.another layer by data [gloo eager stage3]",
    "fault.killed inside a collective [shm eager stage3]",
    "right.undisturbed [gloo eager stage3]",
)


@pytest.mark.parametrize("forked", [True, False])
def test_cases_end_to_end(forked, tmp_path, capsys) -> None:
    cases = [replace(case, limit_s=PATIENT_S) for case in CASES if case.name in QUICK]
    assert len(cases) == len(QUICK)
    forks = ForkServer() if forked else None
    try:
        rows = matrix.run_all(cases, tmp_path, 1, forks)
    finally:
        if forks is not None:
            forks.close()
    assert table.exit_code(rows) == 0, [(row.outcome, row.outputs) for row in rows]
    printed = capsys.readouterr().out
    assert all(row.name in printed for row in rows)
    table.write(tmp_path / "table.json", rows, 1.0)
    assert len(json.loads((tmp_path / "table.json").read_text())["rows"]) == len(QUICK)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"ends": (told("rank 1"), exits(4))}, "SILENT"),
        ({"program": "trains_on", "arguments": {}, "action": "", "limit_s": 1.0}, "HUNG"),
    ],
)
def test_a_case_that_does_not_end_as_it_must(change, word: str, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("faults.matrix.ranks._START_S", 20.0)
    (case,) = [case for case in CASES if case.name == "fault.os._exit(3) [gloo eager stage3]"]
    row = run_case(replace(case, **change), tmp_path / "case", {})
    assert row.outcome.word == word, row
    assert row.outcome.codes


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name",
    [
        "fault.stopped [gloo eager stage3]",  # the rank that stays stopped is no left-over
        "fault.rank 0 stopped [gloo eager stage3]",
        "fault.rank 0 killed while others compile [shm eager stage3]",
    ],
)
def test_ranks_that_do_not_answer(name: str, tmp_path) -> None:
    (case,) = [case for case in CASES if case.name == name]
    row = run_case(replace(case, limit_s=PATIENT_S), tmp_path / "case", {})
    assert row.outcome.word == "told", row
