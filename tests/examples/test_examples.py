"""Examples and programs of the README run, on the ranks that they are meant for. `test_recipes` has the others."""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.ports import free_port
from torchloom.passes import PASSES
from torchloom.pipeline import PRESETS

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def run(folder: Path, *arguments: str | Path, ranks: int = 1) -> str:
    """Run a Python program in `folder` on some ranks; return what they printed."""
    port = free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            cwd=folder,
            env=_environment(rank, ranks, port),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        texts = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * ranks, "\n".join(texts)
    return "".join(texts)


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    launch = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks}
    launch |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    plain = {name: value for name, value in os.environ.items() if name not in launch}
    if ranks > 1:
        plain |= {name: str(value) for name, value in launch.items()}
    return {**plain, "OMP_NUM_THREADS": "1"}


def test_engine_example_trains_and_resumes_on_more_ranks(tmp_path):
    program = EXAMPLES / "train_engine.py"
    out = ["--out", tmp_path]
    text = run(tmp_path, program, "--steps", "10", *out)
    assert "step  10" in text
    text = run(tmp_path, program, "--steps", "20", "--resume", *out, ranks=2)
    assert "continues from" in text
    assert "step  10" not in text
    assert "step  20" in text
    assert "forward torchloom.gather_start" in text
    assert (tmp_path / "model.safetensors").is_file()


def test_native_example_keeps_half_of_a_model_that_was_never_whole(tmp_path):
    text = run(tmp_path, EXAMPLES / "train_native.py", "--steps", "10", "--meta", ranks=2)
    assert "step  10" in text
    kept, total = map(int, re.findall(r"kept (\d+) of (\d+)", text)[0])
    assert total / 2 <= kept < 0.6 * total


def test_adaptive_prefetch_merges_gathers_where_memory_allows(tmp_path):
    text = run(tmp_path, EXAMPLES / "adaptive_prefetch.py", ranks=2)
    assert "ample memory: gathers [3, 2] -> [1, 1], losses equal: True" in text
    assert "scarce memory: gathers [3, 2] -> [3, 2], losses equal: True" in text


def test_selective_gather_saves_gathers_within_its_budget(tmp_path):
    text = run(tmp_path, EXAMPLES / "selective_gather.py", ranks=2)
    found = re.findall(r"(\w+) memory: .* (\d+) -> (\d+), (\d+) bytes held, .*: (\w+)", text)
    fewer = {title: int(after) for title, _, after, _, _ in found}
    held = {title: int(size) for title, _, _, size, _ in found}
    assert {before for _, before, *_ in found} == {"44"}  # 4 x (5 gathers, 3 + 3 reductions)
    assert fewer["ample"] < fewer["scarce"] < fewer["none"] == 44
    assert held["ample"] == 3 * 64 * 64 * 4 >= held["scarce"] > held["none"] == 0
    assert {same for *_, same in found} == {"True"}


def test_fused_casts_halve_what_is_gathered(tmp_path):
    text = run(tmp_path, EXAMPLES / "fuse_cast.py", ranks=2)
    usual, fewer = map(int, re.findall(r"bytes (\d+) -> (\d+), losses equal: True", text)[0])
    assert usual - fewer == 4 * 5 * 64 * 64 * 2  # steps x gathers x elements x bytes saved


def test_the_walk_through_shows_entries_break_and_recompile(tmp_path):
    text = run(tmp_path, EXAMPLES / "inspect_function.py", "--backend", "aot_eager")
    assert "2 functions, 4 entries, 1 graph break, 2 recompiles" in text
    assert "return __resume_at_" in text
    assert "would use entry 0/1" in text
    assert "expected dtype Float, got Double" in text
    assert (tmp_path / "runs" / "inspect" / "record.json").is_file()


def test_a_branch_on_the_batch_is_refused_split_or_hidden(tmp_path):
    text = run(tmp_path, EXAMPLES / "serve_hidden_branch.py")
    assert "not true for batch 1 to 3" in text
    assert "split: programs for batch 1 to 3; batch 4 to 64" in text
    assert "hidden: programs for batch 1 to 64" in text
    assert "keeps what it promises" in text


def test_a_fake_is_fitted_and_checked(tmp_path):
    text = run(tmp_path, EXAMPLES / "fit_a_fake.py")
    assert "x.new_empty((x.shape[0], x.shape[1] - width + 1,), dtype=x.dtype)" in text
    assert "examples::window_sums: 0 findings" in text


def text_behind(word: str, output: str) -> str:
    """Return the line behind the one that begins with a word; loggers of torch may say something before."""
    return re.split(rf"^{word}.*\n", output, maxsplit=1, flags=re.MULTILINE)[1].splitlines()[0]


def test_text_is_generated_cold_and_warm_without_a_compile(tmp_path):
    arguments = (EXAMPLES / "serve_generate.py", "--bytes", "16", "--store", "programs")
    cold, warm = (run(tmp_path, *arguments) for _ in range(2))
    assert "nothing compiled meanwhile" in cold
    assert text_behind("ready", cold) == text_behind("ready", warm)
    assert re.search(r"\d+ tokens/s", warm)
    run(tmp_path, EXAMPLES / "cached_decoder.py")


def test_a_server_batches_requests_of_many_clients_and_never_compiles(tmp_path):
    port = free_port()
    command = [sys.executable, str(EXAMPLES / "serve_http.py"), "--port", str(port)]
    server = subprocess.Popen(
        command, cwd=tmp_path, env=_environment(0, 1, 0), stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        assert "ready" in server.stdout.readline()
        deadline = time.monotonic() + 60
        while not _answers(port) and time.monotonic() < deadline:
            time.sleep(0.1)
        with ThreadPoolExecutor(12) as clients:
            prompts = [f"prompt {n} " + "x" * (n % 20) for n in range(36)]
            found = list(clients.map(lambda prompt: _ask(port, prompt, 24), prompts))
            again = list(clients.map(lambda prompt: _ask(port, prompt, 24), prompts))
        stats = json.loads(_get(port, "/stats"))
        assert _ask(port, "", 24) is None
    finally:
        server.terminate()
        server.wait(timeout=30)
        server.stdout.close()
    texts, seconds = zip(*found, strict=True)
    assert all(len(text) == 24 for text in texts)
    # What others a sequence is decoded with does not change its text.
    assert texts == tuple(text for text, _ in again)
    assert stats["compiles while serving"] == 0
    assert max(map(int, stats["steps"])) > 1
    ordered = sorted(seconds)
    print(f"p50 {ordered[len(ordered) // 2]:.2f} s, p99 {ordered[-1]:.2f} s")


def _ask(port: int, prompt: str, num: int) -> tuple[bytes, float] | None:
    """Ask for text; return it and the seconds that it took, None if the request was refused."""
    started = time.perf_counter()
    body = json.dumps({"prompt": prompt, "max_bytes": num})
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    try:
        connection.request("POST", "/generate", body)
        answer = connection.getresponse()
        text = answer.read()
    finally:
        connection.close()
    return (text, time.perf_counter() - started) if answer.status == 200 else None


def _get(port: int, path: str) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    try:
        connection.request("GET", path)
        return connection.getresponse().read()
    finally:
        connection.close()


def _answers(port: int) -> bool:
    try:
        _get(port, "/stats")
    except OSError:
        return False
    return True


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_short_and_has_a_main(path):
    text = path.read_text()
    assert len(text.splitlines()) < 150
    assert "def main() -> None:" in text


README_PROGRAMS = re.findall(
    r"```python\n# (\w+\.py)\n(.*?)```\n\n```console\n\$ (.*?)\n(.*?)```",
    (ROOT / "README.md").read_text(),
    re.DOTALL,
)


@pytest.mark.parametrize(
    ("name", "program", "command", "printed"),
    README_PROGRAMS,
    ids=[name for name, *_ in README_PROGRAMS],
)
def test_a_program_of_the_readme_prints_what_the_readme_says(
    tmp_path, name: str, program: str, command: str, printed: str
) -> None:
    text = program.replace("engine.compile()", 'engine.compile(backend="aot_eager")')
    (tmp_path / name).write_text(
        text.replace("compile(model)", 'compile(model, backend="aot_eager")')
    )
    assert command in (f"python {name}", f"torchrun --nproc-per-node 2 {name}")
    said = run(tmp_path, tmp_path / name, ranks=2 if command.startswith("torchrun") else 1)
    assert re.sub(r"\d+", "0", said) == re.sub(r"\d+", "0", printed)
    number = re.compile(r"\b\d+\.\d+")
    found = [float(each) for each in number.findall(said)]
    assert found == pytest.approx([float(each) for each in number.findall(printed)], rel=0.03)


def test_each_program_of_the_readme_has_its_command_and_output() -> None:
    assert len(README_PROGRAMS) == (ROOT / "README.md").read_text().count("```python")


def test_the_programs_of_the_page_of_ragged_batches_run(tmp_path):
    page = (ROOT / "docs" / "ragged.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 5
    program = "\n".join(blocks).replace("engine.compile(", 'engine.compile("aot_eager", ')
    path = tmp_path / "programs.py"
    path.write_text(program)
    text = run(tmp_path, path, ranks=2)
    lengths = re.findall(r"padded to the longest: 2 graphs of length (\d+)", text)
    assert len(lengths) == 2
    assert len(set(lengths)) == 1
    assert re.findall(r"few lengths: (\d) graphs", text) == ["2", "2"]
    assert text.count("dynamic: 1 graph\n") == 2
    assert text.count("mean over all tokens: True") == 2


def test_the_programs_of_the_page_of_metrics_run(tmp_path):
    pytest.importorskip("tensorboard")
    page = (ROOT / "docs" / "metrics.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 5
    for tracker, signature in {
        "wandb": "log(data, step=None, commit=None)",
        "mlflow": "log_metrics(metrics, step=None, synchronous=None)",
    }.items():
        name = signature.partition("(")[2].partition(",")[0]
        text = f"def {signature}:\n    print('{tracker}', step, *sorted({name}))\n"
        (tmp_path / f"{tracker}.py").write_text(text)
    path = tmp_path / "programs.py"
    path.write_text("\n".join(blocks))
    text = run(tmp_path, path, ranks=2)
    assert len(re.findall(r"^(?:5|10) \d\.\d+$", text, re.MULTILINE)) == 2
    assert len(re.findall(r"^mlflow \d+ train/collective_bytes", text, re.MULTILINE)) == 12
    # The engine's ten steps and two later ones, and three of the loop, all on rank 0.
    assert len(re.findall(r"^wandb \d+ collective_bytes", text, re.MULTILINE)) == 15
    assert {path.name for path in tmp_path.glob("trace-*.json")} == {"trace-0.json", "trace-1.json"}
    assert list((tmp_path / "runs" / "board").iterdir())


def test_the_page_of_passes_has_a_section_for_each_pass_and_the_presets():
    page = (ROOT / "docs" / "passes.md").read_text()
    headings = re.findall(r"^## ([\w, ]+)$", page, re.MULTILINE)
    described = [name for heading in headings for name in heading.split(", ") if name in PASSES]
    assert sorted(described) == sorted(PASSES)
    for stage, names in PRESETS.items():
        listed = ", ".join(f"`{name}`" for name in names)
        assert f"- stage {stage}: {listed}\n" in page
