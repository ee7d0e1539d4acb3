"""Whatever stands at whatever key, a check finds errors or returns a config; it never breaks."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from torchloom.config import check_config
from torchloom.config.keys import known_paths

PATHS = (
    *known_paths(),
    "optimizer.params.lr",
    "optimizer.params.betas",
    "scheduler.params.warmup_num_steps",
    "scheduler.params.warmup_max_lr",
    "compile.kwargs.options",
)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-3, 10**18)
    | st.floats()
    | st.sampled_from(["auto", "cpu", "none", "AdamW", "SGD", "WarmupLR", "z3", "fp16", ""])
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["enabled", "type", "lr", "stage"]), inner, max_size=3)
    ),
    max_leaves=6,
)


def assemble(entries: dict[str, object]) -> dict:
    document: dict = {
        "optimizer": {"type": "AdamW", "params": {}},
        "scheduler": {"type": "WarmupLR", "params": {}},
    }
    for path, value in sorted(entries.items()):
        *parents, last = path.split(".")
        place = document
        for part in parents:
            inner = place.get(part)
            place[part] = inner if isinstance(inner, dict) else {}
            place = place[part]
        place[last] = value
    return document


@settings(deadline=None)
@given(
    entries=st.dictionaries(st.sampled_from(PATHS), VALUES, max_size=6),
    ranks=st.none() | st.integers(1, 9),
)
def test_any_value_at_any_key(entries, ranks):
    document = assemble(entries)

    checked = check_config(document, world_size=ranks)

    assert (checked.config is None) == bool(checked.errors)
    for finding in (*checked.errors, *checked.notes, *checked.hints):
        assert finding.path
        assert str(finding)
    if checked.config is not None:
        assert json.dumps(checked.config.to_dict())
        assert len(checked.config.digest()) == 16
