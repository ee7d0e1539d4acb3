"""Levels, options, and passes of one's own."""

from __future__ import annotations

import pytest
import torch

from serve.models import SEEN, Plain, look, made, rows
from torchloom.errors import ServeError
from torchloom.serve import build, counter


def test_level_0_compiles_nothing_and_level_1_no_sizes():
    with counter.expect(num_pieces=0, num_compiles=2):
        build(made(Plain), rows(), sizes=[8], level=0, shapes="split", ranges=[(1, 8), (9, 64)])
    with counter.expect(num_compiles=1):
        assert len(build(made(Plain), rows(), sizes=[8], level=1).variants) == 1
    with pytest.raises(ServeError, match="0, 1, 2 or 3"):
        build(made(Plain), rows(), level=4)


def test_level_3_tunes_exact_sizes():
    model = made(Plain)
    program = build(model, rows(), sizes=[8], level=3)
    x = torch.randn(8, 16)
    with torch.no_grad():
        torch.testing.assert_close(program(x), model(x))


@pytest.mark.parametrize("given", [look, "serve.models:look"])
def test_passes_of_ones_own_run_by_function_or_name(given, tmp_path):
    SEEN.clear()
    options = {"post_grad_custom_post_pass": given}
    build(made(Plain), rows(), options={**options, "force_disable_caches": True})
    assert SEEN
    build(made(Plain), rows(), options=options, store=tmp_path)
    with counter.expect(num_loads=1, num_traces=0):
        build(made(Plain), rows(), options=options, store=tmp_path)
