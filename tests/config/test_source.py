"""Reading: paths, dicts, base64, and JSON as people write it."""

from __future__ import annotations

import base64
import copy
import json
import math
import os
import sys

import pytest

from torchloom.config import check_config, load_config
from torchloom.config.source import JsonSyntaxError, parse
from torchloom.errors import ConfigError

DOCUMENT = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 3}}


class Other(os.PathLike):
    """A path of another library's, as pytest's `tmpdir` gives."""

    def __init__(self, path) -> None:
        self._path = path

    def __fspath__(self) -> str:
        return str(self._path)


def test_a_dict_a_file_and_base64_mean_the_same(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(DOCUMENT))
    encoded = base64.urlsafe_b64encode(json.dumps(DOCUMENT).encode()).decode()

    configs = [
        load_config(source)
        for source in (DOCUMENT, path, str(path), Other(path), encoded, encoded.rstrip("="))
    ]

    assert all(config == configs[0] for config in configs)
    assert configs[0].zero.stage == 3


def test_no_source_is_the_defaults():
    assert load_config(None).to_dict() == load_config({}).to_dict()


def test_the_callers_dict_is_never_changed():
    document = {
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "unknown": None},
        "optimizer": {"type": "Adam", "params": {"lr": "auto", "torch_adam": True}},
        "bfloat16": {"enabled": True},
        "a.b": [1],
    }
    auto = {"optimizer.params.lr": 1.0}
    before, auto_before = copy.deepcopy(document), dict(auto)

    config = load_config(document, auto=auto)

    assert (document, auto) == (before, auto_before)
    document["zero_optimization"]["stage"] = 1
    assert config.source["zero_optimization"]["stage"] == 3


def test_comments_trailing_commas_and_infinity(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(
        '\ufeff{ // one\n "steps_per_print": Infinity, # two\n /* 3\n */ "bf16": {"enabled": true,},\n}'
    )

    config = load_config(path)

    assert config.steps_per_print == math.inf
    assert config.precision.dtype == "bf16"


def test_marks_inside_strings_are_text():
    text = '{"a": "// no # comment /* here */ ,}", "b": "\\"#", }'

    assert parse(text) == {"a": "// no # comment /* here */ ,}", "b": '"#'}


def test_a_syntax_error_has_the_line_and_column_of_the_file(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{ // a comment, and\n  /* another\n  */ "a": 1\n  ]: 2\n}')

    with pytest.raises(ConfigError, match=r"ds\.json:4:3: not valid JSON.*line 4 column 3"):
        load_config(path)


@pytest.mark.parametrize("text", ["", "{", "{]", "[" * 100_000, '{"a": ' + "9" * 5000 + "}"])
def test_other_broken_texts_are_syntax_errors(text):
    with pytest.raises(JsonSyntaxError):
        parse(text)


def test_duplicate_keys_are_errors_with_their_paths(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"bf16": {"enabled": true, "enabled": false}, "seed": 1, "seed": 2}')

    checked = check_config(path)

    assert [error.path for error in checked.errors] == ["seed", "bf16.enabled"]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("missing.json", "no such file"),
        ("ds_config", "no such file"),
        ("x" * 5000, "no such file"),
        ("a\0b", "no such file"),
        ('{"seed": 1}', "json.loads"),
        (7, "a dict, a path or a base64 string"),
        (base64.b64encode(b"{nope}").decode(), "not valid JSON"),
    ],
)
def test_sources_that_are_nothing(source, words):
    with pytest.raises(ConfigError, match=words):
        load_config(source)


def test_files_that_cannot_be_read(tmp_path):
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\xff\xfe\x00")
    listed = tmp_path / "list.json"
    listed.write_text("[1]")

    for path, words in ((tmp_path, "cannot be read"), (binary, "UTF-8"), (listed, "object")):
        with pytest.raises(ConfigError, match=words):
            load_config(path)
    with pytest.raises(ConfigError, match="no such file"):
        load_config(tmp_path / "none.json")


HJSON = """
{ # a comment
  train_micro_batch_size_per_gpu: 4
  zero_optimization: {
    stage: 3 // another
    offload_param: { device: "cpu" }
  }
  steps_per_print: 1e3
  zero_optimization: { stage: 2 }
}
"""


def test_hjson_is_read_as_deepspeed_reads_it(tmp_path):
    pytest.importorskip("hjson")
    path = tmp_path / "ds.hjson"
    path.write_text(HJSON.replace("  zero_optimization: { stage: 2 }\n", ""))
    plain = {"device": "cpu"}
    zero = {"stage": 3, "offload_param": plain}
    document = {**DOCUMENT, "zero_optimization": zero, "steps_per_print": 1000}

    assert load_config(path, world_size=2) == load_config(document, world_size=2)
    path.write_text(HJSON)
    (error,) = check_config(path).errors
    assert (error.path, error.what) == ("zero_optimization", "this key is given more than once")
    path.write_text("{ zero_optimization: { stage: 3 ]")
    with pytest.raises(ConfigError, match=r"not valid JSON: .*correct the file there"):
        load_config(path)


def test_without_the_package_hjson_is_an_error_that_names_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "hjson", None)
    path = tmp_path / "ds.hjson"
    path.write_text(HJSON)

    with pytest.raises(ConfigError, match=r"hjson:3:3: .*`pip install hjson` if it is Hjson"):
        load_config(path)
