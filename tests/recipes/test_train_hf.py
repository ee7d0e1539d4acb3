"""A Hugging Face folder as a model: fresh, loaded, with a tokenizer, and folders that do not fit."""

from __future__ import annotations

import pytest
import torch

from torchloom.errors import ConfigError
from torchloom.recipes.train.options import TrainOptions
from torchloom.recipes.train.task import build_task

transformers = pytest.importorskip("transformers")


@pytest.fixture
def folder(tmp_path):
    transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    ).save_pretrained(tmp_path)
    return tmp_path


def build(folder, **options):
    return build_task(TrainOptions(model=str(folder), **{"seq_len": 32, **options}))


def add_tokenizer(folder, words):
    tokenizers = pytest.importorskip("tokenizers")
    vocab = {"?": 0, **{word: i + 1 for i, word in enumerate(words)}}
    model = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="?", vocab=vocab, merges=[]))
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=model, unk_token="?")
    fast.save_pretrained(folder)


def test_a_config_alone_gives_fresh_weights_over_bytes(folder):
    one, two, other = build(folder), build(folder), build(folder, seed=1)
    batch = torch.randint(256, (2, 33))
    loss = one.loss(one.module, batch)
    assert loss.item() == pytest.approx(5.7, abs=0.2)
    assert torch.equal(loss, two.loss(two.module, batch))
    assert not torch.equal(loss, other.loss(other.module, batch))
    assert one.unit == "byte"
    assert one.encode(b"a\xff").tolist() == [97, 255]


def test_weights_are_loaded_where_there_are_some(folder):
    saved = build(folder)
    saved.module.save_pretrained(folder)
    loaded = build(folder, seed=9)
    for mine, theirs in zip(loaded.module.parameters(), saved.module.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_the_folders_tokenizer_is_used(folder):
    add_tokenizer(folder, ["a", "b", "\n"])
    task = build(folder)
    assert task.unit == "token"
    assert task.encode(b"ab\nz\nb").tolist() == [1, 2, 3, 0, 3, 2]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ('{"model_type": "nonesuch"}', "config.json cannot be used: .*nonesuch"),
        ('{"model_t', "config.json cannot be used"),
        ('{"model_type": "llama", "vocab_size": 255}', "too small for the 256 ids of bytes"),
        ('{"model_type": "vit"}', "config.json cannot be used: .*vocab_size"),
        ('{"model_type": "llama", "max_position_embeddings": 16}', "at most 16 tokens"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused_in_one_line(folder, config, message):
    (folder / "config.json").write_text(config)
    with pytest.raises(ConfigError, match=message) as caught:
        build(folder)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(folder):
    add_tokenizer(folder, [chr(97 + i) * 2 for i in range(26)] * 1 + [str(i) for i in range(400)])
    with pytest.raises(ConfigError, match="too small for the 427 ids of its tokenizer"):
        build(folder)
