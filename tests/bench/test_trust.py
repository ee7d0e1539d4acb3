"""The arithmetic and the damage of bench/trust.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))

import trust
from _trust_damage import DAMAGE

sys.path.remove(str(BENCH))


def test_promises_are_judged() -> None:
    right = {"steps": {"batch 1": {"share_of_fastest": 0.001}}, "soak": {"wrong": []}}
    assert trust._judge(right) == []
    assert len(trust._judge({"steps": {"batch 1": {"share_of_fastest": 0.006}}})) == 1
    assert len(trust._judge({"saves": {"failed": "see the log"}})) == 1
    assert len(trust._judge({"soak": {"wrong": ["kills: differs"]}})) == 1
    silent = {"a cut file": {"torchloom": "loads wrong data silently", "fsdp2-dcp": "raises"}}
    assert len(trust._judge({"damage": silent})) == 1
    theirs = {"a cut file": {"torchloom": "raises", "fsdp2-dcp": "loads wrong data silently"}}
    assert trust._judge({"damage": theirs}) == []


def test_messages_are_measured() -> None:
    assert 0.1 < trust._digest_us(200) < 10_000
    assert 0.1 < trust._store_us(200) < 100_000


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", ["torchloom", "dcp"])
def test_every_damage_changes_the_checkpoint(tmp_path, kind) -> None:
    """Else a case that loads right data would prove nothing."""
    import torch.distributed.checkpoint as dcp

    from support.checkpoints import save_steps

    if kind == "torchloom":
        save_steps(tmp_path, 1, 2)
        older, newer = tmp_path / "global_step1", tmp_path / "global_step2"
    else:
        older, newer = tmp_path / "older", tmp_path / "newer"
        for fill, path in enumerate((older, newer)):
            state = {
                "model.blocks.0.w": torch.full((300,), float(fill)),
                "optim.exp_avg_sq": torch.full((300,), float(fill)),
            }
            dcp.save(state, checkpoint_id=path, no_dist=True)
            (path / "__1_0.distcp").write_bytes(bytes([fill]) * 100)
    content = {each.name: each.read_bytes() for each in newer.iterdir()}
    for name, change in DAMAGE.items():
        if kind == "torchloom" and "weight" in name:
            continue  # the small model of the tests has no blocks
        for each in newer.iterdir():
            each.unlink()
        for file, data in content.items():
            (newer / file).write_bytes(data)
        change(newer, older)
        changed = {each.name: each.read_bytes() for each in newer.iterdir()}
        assert (changed == content) == (name == "untouched"), name
