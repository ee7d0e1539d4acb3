"""Serve: one compile for every size that a contract allows, proven, and warm from a store.

from torchloom.serve import Contract, Dim, build

batch, length = Dim("batch", 1, 64), Dim("length", 1, 512)
contract = Contract({"ids": tensor(batch, length, dtype=torch.int64, below=vocabulary)})
program = build(model.eval(), contract, store="programs")
with torch.inference_mode():
    logits = program(ids)

Importing this imports no compiler: a process that finds its programs in a store never does.
"""

from __future__ import annotations

from torchloom.serve.builder.build import build as build
from torchloom.serve.builder.load import load as load
from torchloom.serve.call.eager import eager as eager
from torchloom.serve.call.program import Program as Program
from torchloom.serve.call.variant import Variant as Variant
from torchloom.serve.contract.box import Box as Box
from torchloom.serve.contract.contract import Contract as Contract
from torchloom.serve.contract.dims import Dim as Dim
from torchloom.serve.contract.specs import maybe as maybe
from torchloom.serve.contract.specs import number as number
from torchloom.serve.contract.specs import record as record
from torchloom.serve.contract.specs import tensor as tensor
from torchloom.serve.counter import counter as counter
from torchloom.serve.decorate import Served as Served
from torchloom.serve.decorate import WarmUp as WarmUp
from torchloom.serve.decorate import freeze as freeze
from torchloom.serve.decorate import ignore_torch_compile as ignore_torch_compile
from torchloom.serve.decorate import served as served
from torchloom.serve.decorate import support_torch_compile as support_torch_compile
from torchloom.serve.decorate import warm_up as warm_up
from torchloom.serve.store.folder import Store as Store
