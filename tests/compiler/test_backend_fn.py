"""What a config may name as backend."""

from __future__ import annotations

import sys

import pytest

from torchloom.compiler import get_backend_fn
from torchloom.errors import ConfigError


@pytest.mark.parametrize("name", ["inductor", "eager", "aot_eager", "torchloom"])
def test_a_known_name_stays_a_name(name: str) -> None:  # D3, debug names too
    assert get_backend_fn(name) == name


@pytest.fixture
def package(tmp_path, monkeypatch):
    folder = tmp_path / "loom_user_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "module.py").write_text(
        "NUMBER = 3\ndef compile_it(gm, example_inputs):\n    return gm.forward\n"
        "class Holder:\n    @staticmethod\n    def method(gm, example_inputs):\n"
        "        return gm.forward\n"
    )
    (folder / "needs_more.py").write_text("import a_module_that_is_missing\n")
    (folder / "raises.py").write_text("raise RuntimeError('at import')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "loom_user_package"
    for name in [name for name in sys.modules if name.startswith("loom_user_package")]:
        del sys.modules[name]


def test_a_path_is_imported(package) -> None:  # D4, D6
    assert get_backend_fn(f"{package}.module.compile_it").__name__ == "compile_it"
    assert get_backend_fn(f"{package}.module.Holder.method").__name__ == "method"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("no_package_of_this_name.fn", "there is no module 'no_package_of_this_name'"),
        ("loom_user_package.no_module.fn", "has no 'no_module'"),
        ("loom_user_package.module.compile_them", "did you mean 'compile_it'"),
        ("loom_user_package.module.NUMBER", "is a int, not a function"),
        ("inducter", "did you mean 'inductor'"),
        ("", "is not a path"),
        (".", "is not a path"),
        ("a..b", "is not a path"),
        ("os", "is not a path"),
    ],
)
def test_what_cannot_be_found(package, path: str, words: str) -> None:  # D5, D6
    with pytest.raises(ConfigError, match=words) as caught:
        get_backend_fn(path)
    assert isinstance(caught.value, ValueError)


def test_an_error_inside_a_found_module_is_shown_as_itself(package) -> None:  # D5, D6
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_missing"):
        get_backend_fn(f"{package}.needs_more.fn")
    with pytest.raises(RuntimeError, match="at import"):
        get_backend_fn(f"{package}.raises.fn")


@pytest.mark.parametrize("value", [None, 3, ["inductor"]])
def test_neither_string_nor_callable(value) -> None:  # D7
    with pytest.raises(ConfigError, match="must be a string or Callable"):
        get_backend_fn(value)
