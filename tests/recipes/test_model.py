"""The built-in decoder: sizes, causality, gradients, one graph."""

from __future__ import annotations

import pytest
import torch

from torchloom.recipes.train.model import Llama, LlamaConfig

SMALL = {"vocab_size": 32, "dim": 16, "num_layers": 2, "num_heads": 4, "hidden_dim": 24}


def small(**changes):
    torch.manual_seed(0)
    return Llama(LlamaConfig(**{**SMALL, "max_seq_len": 12, **changes}))


@pytest.mark.parametrize("changes", [{}, {"num_kv_heads": 2}, {"tie_embeddings": True}])
def test_a_later_token_changes_nothing_before_it(changes):
    model = small(**changes)
    tokens = torch.randint(32, (2, 12))
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 32
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    assert before.shape == (2, 12, 32)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_loss_is_that_of_the_logits_and_every_parameter_learns():
    model = small()
    tokens, labels = torch.randint(32, (2, 12)), torch.randint(32, (2, 12))
    labels[0, :3] = -100
    loss = model(tokens, labels=labels)
    expected = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_grouped_queries_equal_full_heads_with_repeated_keys():
    grouped, full = small(num_kv_heads=2, num_layers=1), small(num_layers=1)
    state = grouped.state_dict()
    for name in ("wk", "wv"):
        key = f"layers.0.attention.{name}.weight"
        heads = state[key].unflatten(0, (2, 4))
        state[key] = heads.repeat_interleave(2, dim=0).flatten(0, 1)
    full.load_state_dict(state)
    tokens = torch.randint(32, (2, 12))
    torch.testing.assert_close(grouped(tokens), full(tokens))


def test_it_traces_as_one_graph():
    model = small()
    tokens = torch.randint(32, (2, 12))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(tokens, labels=tokens), model(tokens, labels=tokens))
