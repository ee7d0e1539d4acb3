"""Files that another user could have written hold data: none of them runs anything, and all end in a sentence."""

from __future__ import annotations

import io
import json
import pickle
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from torchloom.cli import make_app
from torchloom.costs import store
from torchloom.errors import TorchloomError
from torchloom.pipeline import sidecar
from torchloom.plan import Plan
from torchloom.recipes.train.options import TrainOptions
from torchloom.recipes.train.task import build_task
from torchloom.records import load_record

DEEP = "[" * 200_000


class Boom:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return (Path.touch, (self.marker,))


def payloads(marker: Path) -> dict[str, bytes]:
    call = f"__import__('pathlib').Path({str(marker)!r}).touch()"
    saved = io.BytesIO()
    torch.save({"version": Boom(marker)}, saved)
    reduced = {"py/reduce": [{"py/function": "pathlib.Path.touch"}, {"py/tuple": [str(marker)]}]}
    return {
        "pickle": pickle.dumps(Boom(marker)),
        "torch.save": saved.getvalue(),
        "python": call.encode(),
        "yaml": f"!!python/object/apply:pathlib.Path.touch [{marker}]".encode(),
        "json of an object": json.dumps(reduced).encode(),
        "json with code": json.dumps({"version": call, "graphs": [call], "plan": call}).encode(),
        "json with code as keys": json.dumps({call: call, "schema": "torchloom.record"}).encode(),
        "deep": DEEP.encode(),
        "deep object": b'{"a":' * 100_000,
        "not utf-8": b"\xff\xfe\x80",
        "nothing": b"",
    }


PAYLOADS = sorted(payloads(Path("x")))


@pytest.fixture(params=PAYLOADS)
def hostile(request, tmp_path) -> Path:
    """Return a file with a payload; nobody may have left its marker in the end."""
    path, marker = tmp_path / "hostile.json", tmp_path / "marker"
    path.write_bytes(payloads(marker)[request.param])
    yield path
    assert not marker.exists()


def test_the_payloads_leave_a_marker_where_they_run(tmp_path):
    marker = tmp_path / "marker"
    made = payloads(marker)
    for run in (
        lambda: pickle.loads(made["pickle"]),
        lambda: torch.load(io.BytesIO(made["torch.save"]), weights_only=False),
        lambda: eval(made["python"]),
    ):
        run()
        assert marker.exists()
        marker.unlink()


@pytest.mark.parametrize("read", [load_record, Plan.load, lambda path: store.load_table(path=path)])
def test_records_plans_and_cost_tables(hostile, read):
    with pytest.raises(TorchloomError, match=hostile.name) as error:
        read(hostile)
    assert len(str(error.value)) < 500


def test_what_lies_beside_the_compilers_cache_is_left_aside(hostile, monkeypatch):
    cache = hostile.parent / "cache"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
    monkeypatch.delenv("TORCHLOOM_CACHE_DIR", raising=False)
    for path in (
        cache / "torchloom" / "key.json",
        cache / "torchloom" / "key-forward.json",
        store.table_path("cpu"),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(hostile.read_bytes())
    assert sidecar.load("key") is None
    sidecar.load_collectives("key", "forward")  # any counts are a report's alone
    assert store.load_table().ops == {}


@pytest.mark.parametrize(
    "command",
    [
        ["report", "{}"],
        ["diff", "{}", "{}"],
        ["check-record", "{}"],
        ["plan", "show", "{}"],
        ["check", "{}"],
        ["train", "--config", "{}", "--nproc", "1"],
        ["train", "--model", "{}", "--nproc", "1"],
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_commands(hostile, command, monkeypatch):
    monkeypatch.chdir(hostile.parent)
    asked = [part.format(hostile) for part in command]
    done = CliRunner().invoke(make_app(asked[0]), asked)
    if asked[0] == "check":  # unknown keys are notes there
        assert "Traceback" not in done.output
        return
    assert done.exit_code != 0
    assert isinstance(done.exception, (TorchloomError, SystemExit)), done.exception


def test_a_plan_steers_no_terminal(tmp_path):
    path = tmp_path / "plan.json"
    text = Plan(world_size=2, budget_bytes=None, base_bytes=0).to_json()
    path.write_text(text.replace('"world_size": 2', '"world_size": "\\u001b[2J"'))
    done = CliRunner().invoke(make_app("plan"), ["plan", "show", str(path)])
    assert "\x1b" not in done.output


transformers = pytest.importorskip("transformers")


@pytest.fixture
def folder(tmp_path) -> Path:
    transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    ).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def train(folder: Path) -> None:
    build_task(TrainOptions(model=str(folder), seq_len=32))


def test_python_files_in_a_models_folder_are_not_run(folder, tmp_path):
    marker = tmp_path / "marker"
    code = f"from pathlib import Path\nPath({str(marker)!r}).touch()\n"
    config = json.loads((folder / "config.json").read_text())
    for name in ("configuration", "modeling", "tokenization"):
        (folder / f"{name}_own.py").write_text(code)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["tokenization_own.Own", None]}})
    )
    config |= {
        "model_type": "own",
        "auto_map": {
            "AutoConfig": "configuration_own.Own",
            "AutoModelForCausalLM": "modeling_own.Own",
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(TorchloomError, match=r"config\.json cannot be used"):
        train(folder)
    config["model_type"] = "llama"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(TorchloomError):
        train(folder)
    assert not marker.exists()


def test_weights_that_are_a_pickle_of_something_else_are_refused(folder, tmp_path):
    marker = tmp_path / "marker"
    torch.save({"lm_head.weight": Boom(marker)}, folder / "pytorch_model.bin")
    with pytest.raises(Exception, match=r"[Ww]eights.only|pytorch_model"):
        train(folder)
    assert not marker.exists()
