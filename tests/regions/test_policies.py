"""Text of what checkpoints keep."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from torchloom.errors import RegionError
from torchloom.regions.labels import choice_text

aten = torch.ops.aten


def keeping(ops: Any, *, every: object = 1) -> Callable[[], Any]:
    def policy(ctx, op, *args, **kwargs):
        return op in ops and every

    return functools.partial(create_selective_checkpoint_contexts, policy)


def test_text_is_equal_for_equal_choices_alone() -> None:
    one = {aten.mm.default, aten.addmm.default}
    other = {aten.addmm.default, aten.mm.default}
    assert choice_text(keeping(one)) == choice_text(keeping(other))
    different = [
        keeping(one),
        keeping({aten.mm.default}),
        keeping(one, every=2),
        keeping(one, every=CheckpointPolicy.MUST_SAVE),
        keeping(one, every=CheckpointPolicy.PREFER_SAVE),
        keeping([aten.mm.default]),
        functools.partial(create_selective_checkpoint_contexts, [aten.mm.default]),
        functools.partial(create_selective_checkpoint_contexts, [aten.bmm.default]),
        lambda: create_selective_checkpoint_contexts([aten.bmm.default]),
        lambda: create_selective_checkpoint_contexts([aten.mm.default]),
        create_selective_checkpoint_contexts,
    ]
    assert len({choice_text(each) for each in different}) == len(different)
    assert " at 0x" not in "".join(map(choice_text, different))


def test_objects_that_are_not_compared_are_refused() -> None:
    class Kept:
        pass

    with pytest.raises(RegionError, match="depends on an object of Kept"):
        choice_text(keeping(Kept()))

    def endless() -> Any:
        return endless

    with pytest.raises(RegionError, match="holds itself"):
        choice_text(endless)
