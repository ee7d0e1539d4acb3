"""`torchloom.recipes.train.run` from a program of one's own, without the command line."""

from __future__ import annotations

import io
import json

from support.pool import run_ranks
from torchloom.recipes.train import TrainOptions, run


def test_two_ranks_train_without_the_command(tmp_path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(256)) * 20)
    out = tmp_path / "run"
    options = TrainOptions(
        data=str(text),
        out=str(out),
        steps=2,
        seq_len=32,
        micro_batch=1,
        eval_every=1,
        compile=False,
    )

    def fn(rank):
        output = io.StringIO()
        run(options, rank=rank, output=output)
        return output.getvalue()

    first, second = run_ranks(2, fn)
    assert "step 2/2" in first
    assert second == ""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["kind"] == "step"] == [1, 2]
    assert json.loads((out / "summary.json").read_text())["world_size"] == 2
