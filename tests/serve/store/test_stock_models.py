"""Stock models of transformers, with caches and masks, are loaded by a new process; edits of them are misses."""

from __future__ import annotations

import pytest

from serve.processes import run

pytest.importorskip("transformers")

PROGRAM = """
import sys
import torch
import transformers as hf
from transformers.models.bert import modeling_bert
from transformers.models.gemma3 import modeling_gemma3
from torchloom.errors import ArtifactError
from torchloom.serve import Contract, Dim, build, load, tensor

SIZES = dict(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
HEADS = dict(num_key_value_heads=1, head_dim=8)
GEMMA = dict(**HEADS, sliding_window=4, layer_types=["sliding_attention", "full_attention"])
KINDS = {
    "llama": (hf.LlamaConfig, hf.LlamaForCausalLM, dict(num_hidden_layers=1), {"rms_norm_eps": 0.1}),
    "qwen3": (hf.Qwen3Config, hf.Qwen3ForCausalLM, dict(num_hidden_layers=1, **HEADS), {"num_key_value_heads": 2}),
    "gemma3": (hf.Gemma3TextConfig, hf.Gemma3ForCausalLM, GEMMA, {"rms_norm_eps": 0.1}),
    "bert": (hf.BertConfig, hf.BertModel, dict(num_hidden_layers=1), {"hidden_act": "relu"}),
}
folder, asked = sys.argv[1:]
batch, ids = Dim("batch", 1, 4), torch.arange(16).reshape(2, 8)
spec = tensor(batch, 8, dtype=torch.int64, below=32)
mask = (ids > 2).long()

def made(kind, **edits):
    config, model, more, _ = KINDS[kind]
    torch.manual_seed(0)
    return model(config(**SIZES | more | edits)).eval()

def is_missed(kind, model):
    try:
        load(folder, model)
    except ArtifactError as error:
        return True
    print("hit", kind)

# A process has other models than the one that built: transformers keeps registries of them.
for kind in KINDS if asked == "build" else [*KINDS][:0:-1]:
    model, edits = made(kind), KINDS[kind][-1]
    if asked == "build":
        mask_spec = tensor(batch, 8, dtype=torch.int64, below=2)
        contract = Contract({"input_ids": spec, "attention_mask": mask_spec})
        program = build(model, contract, store=folder, backend="eager", check="off")
    else:
        program = load(folder, model)
        is_missed(kind, made(kind, **edits))
        is_missed(kind, made(kind).bfloat16())
    with torch.no_grad():
        torch.testing.assert_close(program(ids, mask)[0], model(ids, mask)[0])
    print(kind, program.origin)
if asked == "load":
    modeling_gemma3.rotate_half = lambda x: x
    modeling_bert.BertSelfOutput.forward = lambda self, x, y: y
    [is_missed(kind, made(kind)) for kind in ("gemma3", "bert")]
"""


def test_stock_models_are_loaded_by_a_new_process(tmp_path):
    for seed, asked, origin in (("1", "build", "built"), ("2", "load", "loaded")):
        done = run(PROGRAM, tmp_path / "store", asked, cwd=tmp_path, PYTHONHASHSEED=seed)
        kinds = ["llama", "qwen3", "gemma3", "bert"]
        kinds = kinds if asked == "build" else kinds[:0:-1]
        assert done.stdout.split("\n")[:-1] == [f"{kind} {origin}" for kind in kinds]
