"""Ranks that cannot meet, or that meet and do not agree."""

from __future__ import annotations

from dataclasses import replace

from faults.matrix.case import TAKEN, Case, Setup, told
from faults.matrix.cases.making import GLOO

_LIMIT = {"timeouts": {"agree_s": 3.0, "process_group_s": 5.0, "rendezvous_s": 6.0}}
_SHORT = Setup(config=_LIMIT)


def _start(what: str, *words: str, **rest) -> Case:
    ends = rest.pop("ends", None) or (told(*words),) * rest.pop("ranks", 2)
    return Case(name=f"start.{what}", program=rest.pop("program", "meets"), ends=ends,
                setup=rest.pop("setup", _SHORT), **rest)  # fmt: skip


def _both(**variables: str | None) -> dict[int, dict[str, str | None]]:
    return {0: dict(variables), 1: dict(variables)}


def _differs(what: str, word: str, **config) -> Case:
    return _start(f"{what} differs", "the ranks do not agree", word,
                  setup=replace(GLOO, config_of_rank_1=config))  # fmt: skip


def _adam(**rest) -> dict:
    return {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, **rest}}}


CASES = [
    _start("rank 1 of 2 is missing", "rank", "1", absent=(1,), limit_s=20),
    _start("rank 1 of 3 is missing", "1", ranks=3, absent=(1,), limit_s=20),
    _start("rank 0 is missing", "rank 0", absent=(0,), limit_s=20),
    _start("RANK out of range", ends=(told("rank"), told("RANK=7")), limit_s=20,
           environment={1: {"RANK": "7"}}),
    _start("RANK is not a number", ends=(told("rank"), told("RANK='one'", "not a number")), limit_s=20,
           environment={1: {"RANK": "one"}}),
    _start("WORLD_SIZE is not a number", "WORLD_SIZE='two'", environment=_both(WORLD_SIZE="two")),
    _start("two processes of one rank", ends=(told("two processes are rank 1"),) * 3, limit_s=20,
           environment={2: {"RANK": "1"}}),
    _start("WORLD_SIZE differs", ends=(told("rank 1 was told that there are 3", "WORLD_SIZE"),) * 2, limit_s=20,
           environment={1: {"WORLD_SIZE": "3"}}),
    _start("MASTER_ADDR is no host", "MASTER_ADDR", limit_s=20,
           environment=_both(MASTER_ADDR="no.such.host.invalid")),
    _start("MASTER_ADDR is missing", "MASTER_ADDR", environment=_both(MASTER_ADDR=None)),
    _start("MASTER_ADDR of another host", "MASTER_ADDR", limit_s=20,
           environment=_both(MASTER_ADDR="192.0.2.1")),
    _start("MASTER_PORT is not a number", "MASTER_PORT", environment=_both(MASTER_PORT="http")),
    _start("MASTER_PORT is taken", "port", limit_s=20, environment=_both(MASTER_PORT=TAKEN)),
    _start("shard_size does not divide", "shard_size: 3 ranks",
           setup=Setup(config={"zero_optimization": {"shard_size": 3}})),
    _start("mesh of three axes", "3 axes", program="brings_a_mesh", arguments={"shape": [1, 1, 2]}),
    _start("mesh of one rank alone", "mesh", program="brings_a_mesh", arguments={"shape": [1]}),
    _differs("stage", "stage", zero_optimization={"stage": 2}),
    _differs("clipping", "gradient_clipping", gradient_clipping=0.5),
    _differs("optimizer", "optimizer", optimizer={"type": "SGD", "params": {"lr": 1e-2}}),
    _differs("rate", "lr", **_adam(lr=2e-2)),
    _differs("decay", "weight_decay", **_adam(weight_decay=0.3)),
    _differs("schedule", "schedule",
             scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 5}}),
    _differs("precision", "bf16", bf16={"enabled": True}),
    _differs("accumulation", "batch.", gradient_accumulation_steps=2),
    _start("model differs", "the ranks do not agree", "parameters", program="has_another_model",
           setup=GLOO),
    *(
        _start(f"optimizer of the caller differs in {what}", "the ranks do not agree",
               program="brings_another_optimizer", arguments={"what": what}, setup=GLOO)
        for what in ("rate", "kind", "groups")
    ),
]  # fmt: skip
