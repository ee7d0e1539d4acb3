"""Bad input to `report`, `diff`, `check-record` and `explain`: one clear message, no traceback."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from torchloom.cli import main
from torchloom.records import Entry, Function, Session, load_record, save_record, to_json


@pytest.fixture
def run(capfd, monkeypatch):
    """Run the command line as a shell would; return its exit code, output and errors."""

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["torchloom", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        assert "Traceback" not in out + err
        return int(ended.value.code or 0), out, err

    return call


def one_message(err: str, *words: str) -> None:
    """Hold that the errors are one message with these words, on less than a screen."""
    lines = err.strip().splitlines()
    assert "Error: " in lines[0], err
    assert sum("Error: " in line and not line.startswith(" ") for line in lines) == 1, err
    assert len(lines) < 24
    for word in words:
        assert word in err, err


def record(tmp_path: Path) -> Path:
    entry = Entry(compile_id="0/0", metrics={"compile_s": 0.25})
    function = Function(name="f", file="f.py", line=3, entries=[entry])
    return save_record(Session(functions=[function]), tmp_path / "good.json")


def bad_records(tmp_path: Path) -> dict[str, tuple[Path, str]]:
    """Return files that are no records, with a word that their message must hold."""
    newer = {**to_json(Session()), "version": 99}
    texts = {
        "empty": ("", "is not JSON"),
        "cut": (json.dumps(to_json(Session()))[:-9], "is not JSON"),
        "other": ('{"schema": "another.tool", "version": 1}', "is not a torchloom record"),
        "list": ("[]", "is not a torchloom record"),
        "version": (json.dumps({**newer, "version": None}), "version None"),
        "number": (json.dumps({**newer, "version": 1, "functions": [4]}), "is damaged"),
        "newer": (json.dumps(newer), "version 99"),
        "damaged": (json.dumps({**newer, "version": 1, "functions": 7}), "is damaged"),
        "half": (json.dumps({**newer, "version": 1, "functions": [{"name": "f"}]}), "is damaged"),
    }
    found = {"missing": (tmp_path / "missing.json", "No such file")}
    for name, (text, word) in texts.items():
        path = tmp_path / f"{name}.json"
        path.write_text(text, encoding="utf-8")
        found[name] = (path, word)
    binary = tmp_path / "binary.json"
    binary.write_bytes(bytes(range(256)))
    (tmp_path / "folder").mkdir()
    return {
        **found,
        "binary": (binary, "is not JSON"),
        "folder": (tmp_path / "folder", "holds no record"),
    }


@pytest.mark.parametrize("command", ["report", "check-record", "diff-after"])
def test_a_bad_record_is_one_message(run, tmp_path, command: str) -> None:
    good = record(tmp_path)
    for name, (path, word) in bad_records(tmp_path).items():
        arguments = [good, path] if command == "diff-after" else [path]
        code, out, err = run(command.removesuffix("-after"), *arguments)
        assert code == 1, name
        one_message(err, word, path.name)
        assert out == "", name
    assert not (tmp_path / "report.html").exists()


def test_a_page_that_cannot_be_written(run, tmp_path) -> None:
    good = record(tmp_path)
    (tmp_path / "taken").mkdir()
    (tmp_path / "file").write_text("")
    for target in (tmp_path / "taken", tmp_path / "file" / "report.html"):
        code, _, err = run("report", good, "-o", target)
        assert code == 1
        one_message(err, "cannot write", str(target))
    code, _, err = run("report", good, "--trace", tmp_path / "taken")
    assert code == 1
    one_message(err, "cannot write")


SCRIPT = """
import sys
import torch

@torch.compile(backend="eager")
def step(x):
    return x * 2

def plain():
    return inner(torch.ones(3))

def inner(x):
    raise ValueError("first line\\n" + "\\n".join(f"line {i}" for i in range(200)))

def needs(x, y):
    return x + y

if __name__ == "__main__":
    step(torch.ones(2))
    if "code" in sys.argv:
        sys.exit(7)
    if "words" in sys.argv:
        sys.exit("out of coffee")
    plain()
"""


@pytest.fixture
def script(tmp_path) -> Path:
    torch._dynamo.reset()
    path = tmp_path / "demo.py"
    path.write_text(SCRIPT)
    return path


def test_a_script_that_raises(run, script, tmp_path) -> None:
    kept = tmp_path / "kept.json"
    code, out, err = run("explain", script, "--record", kept)
    assert code == 1
    one_message(err, "demo.py raised ValueError: first line", "demo.py:13 in inner", "more lines")
    assert "runpy" not in err
    assert "step" in out, "what was compiled before it raised is shown"
    session = load_record(kept)
    assert session["step"].entries
    assert "line 199" in session.orphans[-1]
    assert str(kept) in err


def test_a_function_that_raises_or_takes_arguments(run, script) -> None:
    code, _, err = run("explain", f"{script}:plain")
    assert code == 1
    one_message(err, "demo.py:plain raised ValueError", "demo.py:13 in inner")
    code, _, err = run("explain", f"{script}:needs")
    assert code == 1
    one_message(err, "cannot be called without arguments", "'x'")


def test_an_exit_code_is_passed_on(run, script) -> None:
    code, out, err = run("explain", script, "--", "code")
    assert (code, "exit code 7" in err) == (7, True)
    assert "step" in out
    code, _, err = run("explain", script, "--", "words")
    assert (code, "out of coffee" in err) == (1, True)


def test_files_that_cannot_run(run, tmp_path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("def f(:\n    pass\n")
    for target in (broken, f"{broken}:f"):
        code, _, err = run("explain", target)
        assert code == 1
        one_message(err, "SyntaxError", "broken.py:1")
    code, _, err = run("explain", tmp_path / "none.py")
    assert code == 1
    one_message(err, "there is no file", "none.py")
    code, _, err = run("explain", tmp_path)
    assert code == 1
    one_message(err, "there is no file")


@pytest.mark.parametrize("name", ["", ":work"])
def test_an_interrupted_program_still_prints_what_was_compiled(run, tmp_path, name) -> None:
    file, kept = tmp_path / "stopped.py", tmp_path / "record.json"
    file.write_text(
        "import torch\n"
        "def work():\n"
        "    torch.compile(lambda x: x + 1, backend='eager')(torch.ones(2))\n"
        "    raise KeyboardInterrupt\n"
        "if __name__ == '__main__':\n"
        "    work()\n"
    )
    code, out, err = run("explain", f"{file}{name}", "--record", kept)
    assert "1 function, 1 entry" in out
    assert "interrupted" in err
    assert code == 130
    assert len(list(load_record(kept).entries())) == 1
