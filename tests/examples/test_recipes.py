"""The recipes: each example on the tiny Llama, on two ranks of the pool, and what it prints."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from support import ranks
from support.frameworks import accelerate_alone, skip_without
from support.pool import run_ranks
from torchloom import envs

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"

skip_without("transformers", "accelerate")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a folder in which commands of docstrings run: it has `runs/tiny`."""
    path = tmp_path_factory.mktemp("recipes")
    ranks.run_ranks(1, main, path, "tiny_llama.py", "runs/tiny")
    return path


def main(rank: int, folder: Path, *command: str) -> str:
    """Run an example in this process; return what it printed."""
    os.environ["HF_HOME"] = str(folder / "hf")
    before = Path.cwd(), sys.argv, signal.getsignal(signal.SIGTERM)
    text = io.StringIO()
    os.chdir(folder)
    sys.argv = [str(EXAMPLES / command[0]), *command[1:]]
    try:
        with accelerate_alone(), contextlib.redirect_stdout(text), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT and TRL ask transformers by older names
            runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        os.chdir(before[0])
        sys.argv = before[1]
        signal.signal(signal.SIGTERM, before[2])
    return text.getvalue()


def small_command(name: str, number: int = 0) -> list[str]:
    """Return the command for two ranks that an example's docstring gives, without the launcher."""
    text = (EXAMPLES / name).read_text().replace("\\\n", " ")
    found = re.findall(
        rf"^    .*--nproc-per-node 2 (?:.* )?examples/({name}.*)$", text, re.MULTILINE
    )
    return shlex.split(found[number].partition("#")[0])


def printed(folder: Path, name: str, *more: str, number: int = 0) -> str:
    """Run the command for two ranks; return what rank 0 printed."""
    return run_ranks(2, main, folder, *small_command(name, number), *more)[0]


def first_and_last(text: str) -> tuple[float, float]:
    first, last = re.findall(r"loss (\S+) -> ([\d.]+)", text)[0]
    return float(first), float(last)


def test_an_operator_keeps_its_promises_and_changes_no_loss(folder) -> None:
    text = printed(folder, "custom_operator.py")
    assert "examples::swiglu: 0 findings on" in text
    first, last = first_and_last(text)
    assert last < first


def test_a_pass_saves_a_gather_and_changes_no_loss(folder) -> None:
    text = printed(folder, "custom_pass.py")
    without, kept = map(
        int, re.findall(r"backward torchloom\.gather_start: (\d+) -> (\d+)", text)[0]
    )
    assert kept == without - 1
    assert "losses are equal: True" in text


def test_a_decoder_is_pretrained_and_goes_on_where_it_was_stopped(folder) -> None:
    def losses(*more: str) -> dict[str, float]:
        text = printed(folder, "pretrain.py", *more)
        return {step: float(loss) for step, loss in re.findall(r"step (\d+) loss (\S+)", text)}

    whole = losses("--save-every", "20", "--out", "whole")
    assert whole["40"] < whole["10"] / 1.5
    shutil.rmtree(folder / "whole/global_step40")  # as a run that was stopped before
    (folder / "whole/latest").write_text("global_step20")
    assert losses("--out", "whole") == {step: whole[step] for step in ("30", "40")}
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained(folder / "whole/model").config.hidden_size == 64


def test_a_budget_is_kept(folder) -> None:
    skip_without("datasets")
    text = printed(folder, "finetune_budget.py")
    losses = [float(each) for each in re.findall(r"step \d+ loss (\S+)", text)]
    assert losses[-1] < losses[0]
    sizes = re.findall(r"budget (\S+) MB, planned (\S+) MB, measured (\S+) MB", text)[0]
    budget, planned, measured = map(float, sizes)
    assert 0 < measured <= planned <= budget
    assert int(re.findall(r"computes (\d+) values again", text)[0]) > 16  # weights of stage 3 alone
    assert (folder / "runs/finetuned/model.safetensors").is_file()


def test_adapters_are_trained_and_saved_alone(folder) -> None:
    skip_without("datasets", "peft")
    first, last = first_and_last(printed(folder, "finetune_lora.py"))
    assert last < first
    assert 0 < (folder / "runs/lora/adapter_model.safetensors").stat().st_size < 50_000
    assert not (folder / "runs/lora/model.safetensors").exists()


@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_trl_fine_tunes(folder, method) -> None:
    skip_without("trl")
    number = ["sft", "dpo"].index(method)
    text = printed(folder, "train_trl.py", "--out", method, number=number)
    first, last = first_and_last(text)
    assert last < first
    assert "joint torchloom.gather" in text
    assert (folder / method / "model.safetensors").is_file()


def test_programs_of_a_decoder_generate_what_generate_does(folder) -> None:
    options = ["--model", "runs/tiny", "--length", "32", "--tokens", "12", "--backend", "eager"]
    command = ["serve_transformers.py", *options, "--prompt", "two plus three is"]
    (text,) = ranks.run_ranks(1, main, folder, *command)
    assert text.startswith("two plus three is")
    assert "equal: True" in text


def test_the_job_of_slurm_is_that_of_the_page_and_starts_its_tasks(folder, tmp_path) -> None:
    script = EXAMPLES / "slurm/pretrain.sbatch"
    assert script.read_text() in (ROOT / "docs/howto/slurm.md").read_text()
    tasks = 'for n in 0 1; do SLURM_PROCID=$n SLURM_LOCALID=$n SLURM_NTASKS=2 "$@" & done; wait'
    for name, text in {
        "scontrol": "echo 127.0.0.1",
        "srun": f'shift; set -- {sys.executable} "$@"; {tasks}',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    words = ["--length", "12", "--steps", "10", "--backend", "aot_eager", "--out", str(tmp_path)]
    data = ["--config", str(folder / "runs/tiny"), "--data", str(folder / "runs/tiny/tokens.npy")]
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "node1"}
    done = subprocess.run(
        ["bash", str(script), *data, *words],
        cwd=ROOT,
        env=envs.child_environment({"PATH": f"{tmp_path}:{os.environ['PATH']}", **job}),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert re.search(r"^step 10 of 10", done.stdout, re.MULTILINE), done.stdout + done.stderr


def test_the_notebook_runs(tmp_path) -> None:
    cells = json.loads((EXAMPLES / "first_steps.ipynb").read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert not any(cell.get("outputs") for cell in cells)

    def run(rank: int) -> str:
        os.chdir(tmp_path)
        names: dict[str, Any] = {}
        with contextlib.redirect_stdout(io.StringIO()) as text:
            for source in sources:
                exec(source, names)
        return text.getvalue()

    (text,) = ranks.run_ranks(1, run)
    assert "1 graph break" in text
    assert "programs: ['batch 1 to 64']" in text
    peaks = [float(each) for each in re.findall(r"peak (\S+) MB", text)]
    assert peaks[1] < peaks[0]
    assert "64 ranks:" in text


def test_the_table_names_every_example() -> None:
    table = (EXAMPLES / "README.md").read_text()
    files = {
        str(path.relative_to(EXAMPLES))
        for path in EXAMPLES.rglob("*")
        if path.suffix in (".py", ".sbatch", ".ipynb")
    }
    assert files == set(re.findall(r"^\| .*?\[`([^`]+)`\]", table, re.MULTILINE))
