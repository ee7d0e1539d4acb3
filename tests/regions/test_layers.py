"""Which module a part of a graph is named after."""

from __future__ import annotations

import pytest

from torchloom.regions.outline import module_of_most


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        ([], ""),
        (["embed"], "embed"),
        (["h.3.attn.q", "h.3.attn.k", "h.3.mlp.up", "h.3.mlp.down", "h.3.norm"], "h.3"),
        (["h.3.q", "h.3.k", "h.3.mlp.up", "h.3.mlp.down", "h.4.norm"], "h.3"),
        (["h.3.attn.q", "h.3.attn.k", "h.3.attn.v", "h.3.attn.o", "h.3.up", "h.3.down"], "h.3"),
        (["h.3.up", "h.3.down", "h.4.norm", "h.4.q"], "h"),
        (["h.3.a", "h.4.a"], "h"),
        (["encoder.1", "decoder.1"], ""),
        (["h.1", "h.1", "h.1"], "h.1"),
        (["h.1", "h.1.attn", "h.1.attn"], "h.1"),
    ],
)
def test_a_part_is_named_after_what_most_of_its_weights_are_of(
    paths: list[str], expected: str
) -> None:
    assert module_of_most(paths) == expected
