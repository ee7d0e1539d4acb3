"""Methods that the integrations override have the signatures that they were written for.

An upgrade of a framework that changes one fails here first, with the name of the method.
"""

from __future__ import annotations

import inspect
from importlib.util import find_spec
from typing import Any

import pytest

from support.ranks import run_ranks


def signature(owner: type, name: str) -> str:
    """Return the parameters of a method by name and kind, without types; whether it is a property."""
    found = inspect.getattr_static(owner, name)
    if isinstance(found, property):
        return "property"
    shown = {
        inspect.Parameter.VAR_POSITIONAL: "*{}",
        inspect.Parameter.VAR_KEYWORD: "**{}",
    }
    params = inspect.signature(getattr(owner, name)).parameters.values()
    return ", ".join(
        shown.get(each.kind, "{}").format(each.name)
        + ("" if each.default is each.empty else f"={each.default!r}")
        for each in params
    )


def overridden(ours: type, theirs: type) -> list[str]:
    """Return the methods and properties that bases of a class which are not the framework's define over it."""
    own = [base for base in ours.__mro__ if not issubclass(theirs, base)]
    return sorted(
        name
        for base in own
        for name, value in vars(base).items()
        if hasattr(theirs, name)
        and name not in ("__init__", "__annotate_func__")
        and (callable(value) or isinstance(value, (property, classmethod)))
    )


def accelerators() -> tuple[type, type]:
    from accelerate import Accelerator

    from torchloom.integrations.accelerate import TorchloomAccelerator

    return TorchloomAccelerator, Accelerator


def trainers() -> tuple[type, type]:
    from transformers import Trainer

    from torchloom.integrations.transformers import TorchloomTrainer

    return TorchloomTrainer, Trainer


def seq2seq_trainers() -> tuple[type, type]:
    from transformers import Seq2SeqTrainer

    from torchloom.integrations.transformers import TorchloomSeq2SeqTrainer

    return TorchloomSeq2SeqTrainer, Seq2SeqTrainer


def strategies() -> tuple[type, type]:
    from lightning.pytorch.strategies import DDPStrategy

    from torchloom.integrations.lightning import TorchloomStrategy

    return TorchloomStrategy, DDPStrategy


def fabric_strategies() -> tuple[type, type]:
    from lightning.fabric.strategies import DDPStrategy

    from torchloom.integrations.lightning import TorchloomFabricStrategy

    return TorchloomFabricStrategy, DDPStrategy


OF_TRAINERS = {
    "_move_model_to_device": "self, model, device",
    "_save_optimizer_and_scheduler": "self, output_dir",
    "create_accelerator_and_postprocess": "self",
    "create_optimizer": "self, model=None",
    "create_scheduler": "self, num_training_steps, optimizer=None",
    "floating_point_ops": "self, inputs",
    "log": "self, logs, start_time=None",
    "save_model": "self, output_dir=None, _internal_call=False",
}
WRITTEN_FOR: dict[Any, tuple[str, dict[str, str]]] = {
    accelerators: (
        "accelerate",
        {
            "get_state_dict": "self, model, unwrap=True",
            "log": "*args, **kwargs",  # as its decorator shows it
            "prepare": "self, *args, device_placement=None",
            "prepare_model": "self, model, device_placement=None, evaluation_mode=False",
            "prepare_optimizer": "self, optimizer, device_placement=None",
        },
    ),
    trainers: ("transformers", OF_TRAINERS),
    seq2seq_trainers: ("transformers", OF_TRAINERS),
    strategies: (
        "lightning",
        {
            "configure_ddp": "self",
            "lightning_module_state_dict": "self",
            "optimizer_state": "self, optimizer",
            "optimizer_step": "self, optimizer, closure, model=None, **kwargs",
            "register_strategies": "strategy_registry",
            "setup": "self, trainer",
            "setup_optimizers": "self, trainer",
        },
    ),
    fabric_strategies: (
        "lightning",
        {
            "get_module_state_dict": "self, module",
            "get_optimizer_state": "self, optimizer",
            "register_strategies": "strategy_registry",
            "setup_module": "self, module",
            "setup_module_and_optimizers": "self, module, optimizers, scheduler=None",
            "setup_optimizer": "self, optimizer",
        },
    ),
}


@pytest.mark.parametrize("classes", WRITTEN_FOR, ids=lambda each: each.__name__)
def test_overridden_methods_are_those_that_were_written_for(classes) -> None:
    framework, expected = WRITTEN_FOR[classes]
    if find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")

    def run(rank: int) -> tuple[dict[str, str], dict[str, str]]:
        ours, theirs = classes()
        names = overridden(ours, theirs)
        of_both = ({name: signature(owner, name) for name in names} for owner in (theirs, ours))
        return tuple(of_both)

    # in a process of its own: a framework that is imported stays, and changes torch (Lightning does)
    theirs, ours = run_ranks(1, run)[0]
    assert theirs == expected
    for name, params in expected.items():
        is_hidden = params.startswith("*args")
        assert is_hidden or ours[name].startswith(params), name  # ours may have more, at the end
