"""Files that nobody else can have written."""

from __future__ import annotations

import os
import stat

import pytest

from torchloom import files
from torchloom.files import read_own, why_not_own, why_replaceable


@pytest.fixture
def path(tmp_path):
    made = tmp_path / "file"
    made.write_bytes(b"content")
    return made


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o757])
def test_a_folder_above_that_others_can_write_to(tmp_path, mode):
    folder = tmp_path / "a"
    (folder / "b").mkdir(parents=True)
    assert why_replaceable(folder / "b" / "c") == ""
    folder.chmod(mode)
    assert why_replaceable(folder / "b" / "c").startswith(f"{folder} can be written")
    folder.chmod(mode | stat.S_ISVTX)
    assert why_replaceable(folder / "b" / "c") == ""


def test_ones_own_group_is_no_other_above(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_is_private_group", lambda gid: True)
    tmp_path.chmod(0o770)
    assert why_replaceable(tmp_path / "x") == ""
    tmp_path.chmod(0o777)
    assert "written by others" in why_replaceable(tmp_path / "x")
    assert "written by others" in why_not_own(tmp_path)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_owners(path, tmp_path):
    os.chown(path, 12345, -1)
    with pytest.raises(PermissionError, match=r"belongs to another user \(id 12345\)"):
        read_own(path)
    os.chown(tmp_path, 65534, -1)  # shown where an owner is not mapped; here all are
    assert "belongs to another user" in why_replaceable(path)
