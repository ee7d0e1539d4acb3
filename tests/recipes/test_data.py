"""Text and its samples: deterministic and disjoint. The order of samples is the engine's loader's."""

from __future__ import annotations

import pytest
import torch

from torchloom.errors import DataError
from torchloom.recipes.train.corpus import heldout_batches, load_corpus, windows


def test_the_default_text_is_the_same_each_time_and_large_enough():
    one, two = load_corpus(None, seq_len=256), load_corpus(None, seq_len=256)
    assert one == two
    assert len(one.train) > 2_000_000
    assert len(one.heldout) > 50_000
    assert b"import " in one.heldout
    assert "Python standard library" in str(one)


def test_a_folder_is_split_by_file(tmp_path):
    for i in range(64):
        (tmp_path / f"{i:02}.txt").write_bytes(f"<{i}>".encode() * 100)
    (tmp_path / ".hidden").write_text("secret" * 1000)
    corpus = load_corpus(str(tmp_path), seq_len=16)
    assert corpus.num_files == 64
    assert b"secret" not in corpus.train + corpus.heldout
    for i in range(64):
        tag = f"<{i}>".encode()
        assert (tag in corpus.train) != (tag in corpus.heldout)


def test_one_file_is_split_by_block_and_nothing_is_lost(tmp_path):
    content = b"".join(i.to_bytes(4, "big") for i in range(50_000))
    (tmp_path / "a.bin").write_bytes(content)
    corpus = load_corpus(str(tmp_path / "a.bin"), seq_len=16)
    numbers = {
        part[i : i + 4] for part in (corpus.train, corpus.heldout) for i in range(0, len(part), 4)
    }
    assert len(corpus.train) + len(corpus.heldout) == len(content)
    assert 0 < len(corpus.heldout) < len(content) / 4
    assert len(numbers) >= 49_000


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda p: p / "missing", "neither a file nor a folder"),
        (lambda p: p, "that holds one"),
        (lambda p: (p / "empty.txt").touch() or p / "empty.txt", "is empty"),
        (lambda p: (p / "s.txt").write_text("hello") and p / "s.txt", "too few"),
    ],
)
def test_bad_data_is_refused_by_name(tmp_path, prepare, message):
    path = prepare(tmp_path)
    with pytest.raises(DataError, match=message) as caught:
        load_corpus(str(path), seq_len=16)
    assert str(path) in str(caught.value)


def test_heldout_batches_are_disjoint_and_equally_many_on_all_ranks():
    options = {"micro_batch": 2, "world_size": 3, "max_samples": 20}
    rows = windows(torch.arange(1001), 10)
    ranks = [heldout_batches(rows, rank=r, **options) for r in range(3)]
    assert [len(batches) for batches in ranks] == [3, 3, 3]
    starts = torch.cat([batch for batches in ranks for batch in batches])[:, 0].tolist()
    assert len(set(starts)) == 18
    assert max(starts) > 900
