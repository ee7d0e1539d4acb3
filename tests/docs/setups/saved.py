"""A folder with a pretrained model."""

from __future__ import annotations

import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

small = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
if dist.get_rank() == 0:
    LlamaForCausalLM(LlamaConfig(**small, num_attention_heads=4)).save_pretrained("weights")
dist.barrier()
