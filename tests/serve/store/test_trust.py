"""Nothing of a store runs before its owner, mode, signature and digests hold."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pickle
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from serve.models import Plain, made, rows
from torchloom.cli import make_app
from torchloom.errors import ArtifactError, ServeError
from torchloom.serve import Store, build, counter, load
from torchloom.serve.store.signing_key import SigningKey


class Boom:
    """Unpickled, it leaves a marker."""

    def __init__(self, marker: Path) -> None:
        self.marker = str(marker)

    def __reduce__(self):
        return (Path.touch, (Path(self.marker),))


def hostile_object(marker: Path, folder: Path) -> bytes:
    """Return a shared object that leaves a marker as soon as it is loaded."""
    source, made_of = folder / "hostile.c", folder / "hostile.so"
    source.write_text(
        f'#include <stdio.h>\n__attribute__((constructor)) void f(void){{fclose(fopen("{marker}","w"));}}'
    )
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", made_of, source], check=True)
    return made_of.read_bytes()


class Case:
    """A store with a program, and what a hostile user does to it."""

    def __init__(self, folder: Path, backend: str) -> None:
        self.folder, self.root = folder, folder / "store"
        self.marker = folder / "marker"
        self.backend = backend
        build(made(Plain), rows(), backend=backend, store=self.root)
        (self.entry,) = (self.root / "entries").glob("*.json")

    def load(self):
        return load(Store(self.root), made(Plain), rows())

    def build(self):
        return build(made(Plain), rows(), backend=self.backend, store=self.root)

    def read(self) -> dict:
        return json.loads(self.entry.read_text())

    def write(self, content: dict) -> None:
        self.entry.write_text(json.dumps(content))

    def put(self, content: bytes) -> str:
        """Add an object under the name that is right for it, as anybody can."""
        name = hashlib.sha256(content).hexdigest()
        path = self.root / "objects" / name[:2] / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        return name

    def forge(self, kind: str) -> None:
        """Make the entry refer to code that leaves a marker; all plain digests are right."""
        content = self.read()
        (variant,) = content["variants"]
        piece = variant["pieces"][0]
        pickled = pickle.dumps(Boom(self.marker))
        text = f"torch.save([], {str(self.marker)!r})\ndef call(args): return args\n"
        if kind == "shell":
            variant["code"] = self.put(pickle.dumps((pickled, None, ())))
        elif kind == "code":
            variant["code"] = self.put(pickled)
        elif kind == "graph":
            piece["graph"] = self.put(pickled)
        elif kind == "artifact":
            variant["pieces"] = [{"compiled": self.put(pickled)}]
        elif kind == "plain":
            piece["plain"] = self.put(pickled)
        elif kind in ("source", "shared object"):
            plain = pickle.loads(Store(self.root).get(piece["plain"]))
            kernel = hostile_object(self.marker, self.folder)
            edit = {
                "source": {"source": text},
                "shared object": {"kernels": dict.fromkeys(plain.kernels, kernel)},
            }
            piece["plain"] = self.put(pickle.dumps(dataclasses.replace(plain, **edit[kind])))
        elif kind == "facts":
            call = f"module('pathlib').Path({str(self.marker)!r}).touch()"
            print_ = {"facts": {call: ""}}
            variant["fingerprint"] = self.put(json.dumps(print_).encode())
        elif kind == "files":
            print_ = {"facts": {}, "files": {"hostile.part": ""}}
            variant["fingerprint"] = self.put(json.dumps(print_).encode())
        elif kind == "contract":
            content["contract"] = pickled.hex()
        elif kind == "checks":
            variant["checks"] = [f"__import__('pathlib').Path({str(self.marker)!r}).touch() or 1"]
        elif kind == "asked":
            call = f"__import__('pathlib').Path({str(self.marker)!r}).touch()"
            variant["asked"] = [["value", call, None]]
        self.write(content)


KINDS = {
    "eager": [*("shell", "graph", "facts", "files", "contract"), *("checks", "asked", "code")],
    "inductor": ["artifact", "source", "shared object", "plain"],
}
CASES = [(backend, kind) for backend, kinds in KINDS.items() for kind in kinds]
RUNS_ONCE_TRUSTED = {
    *("shell", "graph", "artifact", "source", "shared object", "files"),
    *("checks", "facts", "asked", "code", "plain"),
}


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> dict[str, Path]:
    folders = {backend: tmp_path_factory.mktemp(backend) for backend in KINDS}
    for backend, folder in folders.items():
        Case(folder, backend)
    return folders


@pytest.fixture
def case(built, tmp_path, request, monkeypatch) -> Case:
    """Return a copy of a built store, beside a module that leaves a marker when it is imported."""
    backend = getattr(request, "param", "eager")
    shutil.copytree(built[backend], tmp_path, dirs_exist_ok=True)
    found = Case.__new__(Case)
    found.folder, found.root, found.backend = tmp_path, tmp_path / "store", backend
    found.marker = tmp_path / "marker"
    (found.entry,) = (found.root / "entries").glob("*.json")
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "hostile.py").write_text(
        f"from pathlib import Path\nPath({str(found.marker)!r}).touch()\nKind = dict\n"
    )
    monkeypatch.syspath_prepend(str(modules))
    return found


def refused(case: Case, text: str) -> None:
    """Check that neither way to load runs anything, and that the reason is one line that says what to do."""
    with pytest.raises(ArtifactError, match=text) as error:
        case.load()
    assert "\n" not in str(error.value)
    assert "build again" in str(error.value).lower() or "chmod" in str(error.value)
    with pytest.raises(ArtifactError):  # the stored contract is not followed either
        load(case.root, made(Plain))
    assert not case.marker.exists()


@pytest.mark.parametrize(("case", "kind"), CASES, indirect=["case"])
def test_a_consistent_forgery_without_a_signature_runs_nothing(case, kind):
    case.forge(kind)
    refused(case, "changed since it was signed")
    with counter.expect(num_loads=0, num_saves=1):
        assert case.build().origin == "built"  # which puts it right
    assert not case.marker.exists()
    assert case.load().origin == "loaded"


@pytest.mark.parametrize(("case", "kind"), CASES, indirect=["case"])
def test_the_payloads_do_run_where_the_user_signs_them(case, kind):
    case.forge(kind)
    store = Store(case.root)
    for name, entry in store.unverified()[0].items():
        store.sign(name, entry)
    with suppress(Exception), torch.no_grad():  # hostile objects are no programs
        case.load()(torch.zeros(3, 16))
    assert case.marker.exists() == (kind in RUNS_ONCE_TRUSTED)


@pytest.mark.parametrize("signature", [None, "0" * 64, ["x"]])
def test_no_signature_or_another_kind_of_one_is_none(case, signature):
    case.forge("shell")
    case.write(case.read() | {"signature": signature})
    refused(case, "no signature|not signed with your key")


def test_a_signature_belongs_to_one_entry(case):
    build(made(Plain, eps=1e-6), rows(), backend="eager", store=case.root)
    entries = sorted((case.root / "entries").glob("*.json"))
    entries[0].write_bytes(entries[1].read_bytes())
    broken, found = Store(case.root).look()
    assert list(found) == [entries[1].stem]
    assert "changed since it was signed" in broken[0]


@pytest.mark.parametrize("case", KINDS, indirect=True)
def test_a_flipped_bit_in_any_file_is_a_miss_with_a_reason_and_the_next_build_mends_it(case):
    torch.manual_seed(0)
    x = torch.randn(3, 16)
    with torch.no_grad():
        wanted = case.load()(x)
    num_objects = len(objects_of(case))
    for number in range(num_objects + 1):
        path = [*objects_of(case), case.entry][number]
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        refused(case, "damaged|changed since it was signed|cannot be read")
        with counter.expect(num_loads=0, num_saves=1):
            case.build()
        with torch.no_grad():
            torch.testing.assert_close(case.load()(x), wanted, rtol=0, atol=0)


def objects_of(case: Case) -> list[Path]:
    """Return the files of what the program is made of."""
    names = {
        name
        for variant in case.read()["variants"]
        for name in (
            variant["code"],
            *(name for piece in variant["pieces"] for name in piece.values()),
        )
    }
    return [case.root / "objects" / name[:2] / name for name in sorted(names)]


def at(case: Case, place: str) -> Path:
    return next(case.root.glob(place)) if "*" in place else case.root / place


OPEN = {
    "the store": ".",
    "entries": "entries",
    "objects": "objects",
    "an entry": "entries/*.json",
    "the folder above": "..",
}


@pytest.mark.parametrize("place", OPEN)
@pytest.mark.parametrize("mode", [0o002, 0o020])
def test_what_others_can_write_to_is_not_used(case, place, mode):
    case.forge("shell")
    store = Store(case.root)
    for name, entry in store.unverified()[0].items():
        store.sign(name, entry)  # even so
    path = at(case, OPEN[place])
    path.chmod(path.stat().st_mode | mode)
    try:
        refused(case, "can be written by others")
        if place != "an entry":
            with pytest.raises(ArtifactError, match="can be written by others"):
                case.build()
    finally:
        path.chmod(path.stat().st_mode & ~0o022)


def test_an_object_that_others_can_write_to_is_not_used(case):
    for path in (case.root / "objects").rglob("*"):
        if path.is_file():
            path.chmod(0o666)
    refused(case, "can be written by others")
    case.build()
    case.load()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("place", [".", "entries/*.json"])
def test_what_belongs_to_another_user_is_not_used(case, place):
    path = at(case, place)
    os.chown(path, 12345, -1)
    try:
        refused(case, "belongs to another user")
    finally:
        os.chown(path, 0, -1)


def test_stores_are_private_whatever_the_umask_says(tmp_path):
    before = os.umask(0)
    try:
        build(made(Plain), rows(), backend="eager", store=tmp_path / "a" / "store")
    finally:
        os.umask(before)
    load(tmp_path / "a" / "store", made(Plain))


def test_a_link_or_a_pipe_in_place_of_an_entry_is_refused_at_once(case):
    kept = case.entry.with_suffix(".kept")
    case.entry.rename(kept)
    case.entry.symlink_to(kept)
    refused(case, "cannot be read")
    case.entry.unlink()
    os.mkfifo(case.entry)
    refused(case, "is no file")


def test_another_key_is_another_user_until_the_store_is_trusted(case, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHLOOM_KEY_FILE", str(tmp_path / "keys" / "mine"))
    refused(case, "no key at")
    assert not (tmp_path / "keys").exists()  # looking makes none
    run = CliRunner()
    asked = run.invoke(make_app("serve"), ["serve", "trust", str(case.root)], input="n\n")
    assert asked.exit_code == 1
    assert "models.Plain" in asked.output
    refused(case, "no key at")
    build(made(Plain, eps=1e-6), rows(), backend="eager", store=case.root)  # makes one
    refused(case, "not signed with your key")
    done = run.invoke(make_app("serve"), ["serve", "trust", "--yes", str(case.root)])
    assert done.exit_code == 0, done.output
    assert "signed 1" in done.output
    assert case.load().origin == "loaded"
    assert (
        "nothing to sign"
        in run.invoke(make_app("serve"), ["serve", "trust", str(case.root)]).output
    )


def test_what_is_damaged_is_not_signed_and_what_is_shown_steers_no_terminal(case, monkeypatch):
    content = case.read()
    content["factors"]["model"] = "\x1b[2Jmodel"
    content["variants"][0]["code"] = "../../../etc/passwd"
    case.write(content)
    done = CliRunner().invoke(make_app("serve"), ["serve", "trust", "--yes", str(case.root)])
    assert done.exit_code != 0
    assert "no name of an object" in done.output
    assert "\x1b" not in done.output
    shown = CliRunner().invoke(make_app("serve"), ["serve", "inspect", str(case.root)])
    assert "\x1b" not in shown.output


@pytest.mark.parametrize("mode", [0o640, 0o602])
def test_a_key_that_others_can_read_or_write_is_none(case, own_key, mode):
    own_key.chmod(mode)
    try:
        refused(case, "the key that stored programs are signed with cannot be used")
    finally:
        own_key.chmod(0o600)


@pytest.mark.parametrize("case", ["inductor"], indirect=True)
def test_a_compilers_cache_that_others_can_write_to_runs_nothing(case, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(0o777)
    monkeypatch.setattr("torchloom._torch.inductor.inductor_cache_dir", lambda: str(cache))
    assert case.load().origin == "loaded"  # which needs no cache
    with pytest.raises(ServeError, match="set TORCHINDUCTOR_CACHE_DIR"):
        build(made(Plain, eps=1e-6), rows(), store=case.root)
    case.forge("artifact")
    store = Store(case.root)
    for name, entry in store.unverified()[0].items():
        store.sign(name, entry)
    with pytest.raises(ArtifactError, match="set TORCHINDUCTOR_CACHE_DIR"):
        case.load()
    assert not case.marker.exists()


def test_processes_that_need_a_key_at_once_make_one(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHLOOM_KEY_FILE", str(tmp_path / "key" / "store.key"))
    with ThreadPoolExecutor(16) as pool:
        names = {key.name for key in pool.map(lambda _: SigningKey(make=True), range(64))}
    assert len(names) == 1
    assert [each.name for each in (tmp_path / "key").iterdir()] == ["store.key"]


@pytest.mark.parametrize("kind", ["below a file", "too long", "nul", "loop"])
def test_a_store_that_is_no_folder_is_refused_in_one_sentence(kind, tmp_path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    root = (
        tmp_path
        / {"below a file": "file/a/b", "too long": "a" * 300, "nul": "a\0b", "loop": "loop"}[kind]
    )
    with pytest.raises(ArtifactError, match="cannot be used"):
        Store(root).check()
