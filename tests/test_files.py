"""Files that nobody else can have written."""

from __future__ import annotations

import os
import stat

import pytest

from torchloom import files
from torchloom.files import make_own, read_own, why_not_own, why_replaceable


@pytest.fixture
def path(tmp_path):
    made = tmp_path / "file"
    made.write_bytes(b"content")
    return made


def test_a_file_of_ones_own_is_read(path):
    assert read_own(path) == b"content"


@pytest.mark.parametrize("mode", [0o666, 0o646, 0o664, 0o662])
def test_a_file_that_others_can_write_to_is_not(path, mode):
    path.chmod(mode)
    with pytest.raises(PermissionError, match=f"can be written by others .mode {mode:o}"):
        read_own(path)
    assert why_not_own(path)


def test_a_file_that_others_can_read_is_not_where_that_matters(path):
    path.chmod(0o604)
    with pytest.raises(PermissionError, match="can be read by others"):
        read_own(path, 0o077)


def test_links_pipes_and_folders_are_no_files(path, tmp_path):
    (tmp_path / "link").symlink_to(path)
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe"):
        with pytest.raises(OSError, match=r"no file|symbolic"):
            read_own(tmp_path / name)
    with pytest.raises(OSError, match=r"no file"):
        read_own(tmp_path)


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


def test_folders_are_made_for_this_user_alone(tmp_path):
    before = os.umask(0)
    try:
        make_own(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    for folder in (tmp_path / "a", tmp_path / "a" / "b"):
        assert folder.stat().st_mode & 0o777 == 0o755
