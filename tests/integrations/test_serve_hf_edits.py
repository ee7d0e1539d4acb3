"""Hugging Face models that are stored, changed in code, options and weights, and loaded: never a wrong result."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from support.transformers_sizes import DECODER, ENCODER, GPT2
from torchloom.errors import ArtifactError
from torchloom.serve import Contract, Dim, Program, build, load, tensor

transformers = pytest.importorskip("transformers")

CONFIGS = {
    "llama": ("LlamaConfig", DECODER),
    "mistral": ("MistralConfig", {**DECODER, "sliding_window": 8}),
    "qwen2": ("Qwen2Config", DECODER),
    "qwen3": ("Qwen3Config", {**DECODER, "head_dim": 8}),
    "gemma2": ("Gemma2Config", {**DECODER, "head_dim": 8, "sliding_window": 8}),
    "phi": ("PhiConfig", DECODER),
    "gpt2": ("GPT2Config", GPT2),
    "gpt_neox": ("GPTNeoXConfig", ENCODER),
    "olmo2": ("Olmo2Config", DECODER),
    "bert": ("BertConfig", ENCODER),
    "roberta": ("RobertaConfig", ENCODER),
}


def make(name: str) -> nn.Module:
    kind, sizes = CONFIGS[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**sizes)
    auto = (
        transformers.AutoModelForMaskedLM if "bert" in name else transformers.AutoModelForCausalLM
    )
    return auto.from_config(config).eval()


def find(model: nn.Module, wanted: Callable[[nn.Module], bool]) -> nn.Module:
    return next(each for each in model.modules() if wanted(each))


def norm_of(model):
    return find(model, lambda each: "Norm" in type(each).__name__)


def own(model) -> types.ModuleType:
    return sys.modules[type(model).__module__]


def new_weights(model, monkeypatch):
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.05)


def other_epsilon(model, monkeypatch):
    norm = norm_of(model)
    name = next(each for each in ("variance_epsilon", "eps") if hasattr(norm, each))
    setattr(norm, name, 0.5)


def other_activation(model, monkeypatch):
    block = find(model, lambda each: any(hasattr(each, name) for name in ACTIVATIONS))
    name = next(each for each in ACTIVATIONS if hasattr(block, each))
    setattr(block, name, nn.Tanh())


ACTIVATIONS = ("act_fn", "act", "activation_fn", "intermediate_act_fn")


def patched_class(model, monkeypatch):
    kind = type(norm_of(model))
    before = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, *args: before(self, *args) * 1.5)


def patched_instance(model, monkeypatch):
    norm = norm_of(model)
    before = norm.forward
    norm.forward = lambda *args: before(*args) * 1.5


def hooked(model, monkeypatch):
    norm_of(model).register_forward_hook(lambda module, args, found: found * 1.5)


def hooked_before(model, monkeypatch):
    norm_of(model).register_forward_pre_hook(lambda module, args: (args[0] * 1.5 + 1.0,))


def other_class(model, monkeypatch):
    norm = norm_of(model)

    class Louder(type(norm)):
        def forward(self, *args):
            return super().forward(*args) * 1.5

    norm.__class__ = Louder


def patched_function(model, monkeypatch):
    """Replace a function of the file that defines the model."""
    module = own(model)
    names = ("apply_rotary_pos_emb", "eager_attention_forward", "create_causal_mask", "rotate_half")
    name = next((each for each in names if hasattr(module, each)), None)
    if name == "apply_rotary_pos_emb":
        monkeypatch.setattr(module, name, lambda q, k, *args, **kwargs: (q * 1.5, k))
    else:
        before = nn.functional.gelu
        monkeypatch.setattr(nn.functional, "gelu", lambda x, **kwargs: before(x) * 1.5)


def other_attention(model, monkeypatch):
    block = find(
        model, lambda each: hasattr(each, "scaling") or hasattr(each, "scale_attn_weights")
    )
    if hasattr(block, "scaling"):
        block.scaling = block.scaling * 3
    else:
        block.scale_attn_weights = False


def eager_attention(model, monkeypatch):
    model.config._attn_implementation = "eager"


def fewer_layers(model, monkeypatch):
    layers = find(model, lambda each: isinstance(each, nn.ModuleList) and len(each) == 2)
    del layers[1]


def tied_anew(model, monkeypatch):
    """Put another object of the same looks in the place of a weight."""
    norm = norm_of(model)
    norm.weight = nn.Parameter(torch.full_like(norm.weight, 1.5))


def other_type(model, monkeypatch):
    model.to(torch.bfloat16)


EDITS = [
    *(new_weights, other_epsilon, other_activation, patched_class, patched_instance, hooked),
    *(hooked_before, other_class, patched_function, other_attention, eager_attention),
    *(fewer_layers, tied_anew, other_type),
]


def logits(run: nn.Module | Program, ids: Tensor) -> Tensor:
    if isinstance(run, Program):
        return run(input_ids=ids).logits
    more = (
        {}
        if "Bert" in type(run).__name__ or "Roberta" in type(run).__name__
        else {"use_cache": False}
    )
    return run(input_ids=ids, **more).logits


@pytest.mark.parametrize("name", CONFIGS)
def test_changes_of_any_kind(name, tmp_path):
    model = make(name)
    spec = tensor(Dim("batch", 2, 4), 9, dtype=torch.int64, below=64)
    fixed = {} if "bert" in name else {"use_cache": False}
    program = build(
        model, Contract({"input_ids": spec}, fixed=fixed), backend="eager", store=tmp_path
    )
    assert not program.variants[0].why_not_stored
    ids, hits = torch.randint(2, 64, (3, 9)), []
    with torch.no_grad():
        wanted = logits(model, ids)
        torch.testing.assert_close(logits(program, ids), wanted, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(
            logits(load(tmp_path, make(name)), ids), wanted, atol=1e-5, rtol=1e-5
        )
        for edit in EDITS:
            with pytest.MonkeyPatch.context() as monkeypatch:
                edited = make(name)
                edit(edited, monkeypatch)
                try:
                    loaded = load(tmp_path, edited)
                except ArtifactError:
                    continue
                hits.append(edit.__name__)
                found = logits(loaded, ids)
                torch.testing.assert_close(
                    found, logits(edited, ids), atol=1e-5, rtol=1e-5, msg=edit.__name__
                )
    assert {"new_weights", "tied_anew"} <= set(hits)
