"""Names that are looked up in the source are those that newer Pythons keep."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, SimpleNamespace

import pytest

import torchloom
from torchloom.qualnames import qualname_of

FILES = sorted(Path(torchloom.__file__).parent.rglob("*.py"))[::4]
PYTHONS_OWN = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>", "<module>")


def functions_in(code: CodeType) -> Iterator[CodeType]:
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield each
            yield from functions_in(each)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="keeps no qualified names to compare with")
def test_names_are_those_of_python() -> None:
    num_seen = 0
    for file in FILES:
        for code in functions_in(compile(file.read_text(), str(file), "exec", dont_inherit=True)):
            is_class = not code.co_flags & 0x2  # CO_NEWLOCALS
            if is_class or any(part in code.co_qualname for part in PYTHONS_OWN):
                continue
            old = SimpleNamespace(
                co_filename=code.co_filename,
                co_firstlineno=code.co_firstlineno,
                co_name=code.co_name,
            )
            found = qualname_of(old)  # type: ignore[arg-type]
            assert found in (code.co_qualname, "<lambda>")  # two of one line have no more
            num_seen += found == code.co_qualname
    assert num_seen > 250


def test_code_without_a_file_has_its_plain_name() -> None:
    (code,) = functions_in(compile("def fn(): pass", "<nowhere>", "exec"))
    assert qualname_of(code) == "fn"
