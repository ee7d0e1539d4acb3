"""A captured graph, and one of its nodes."""

from __future__ import annotations

import torch
from torch.fx.experimental.proxy_tensor import make_fx

gm = make_fx(lambda x: (x @ x).relu(), tracing_mode="fake")(torch.randn(8, 8))
node = next(each for each in gm.graph.nodes if each.op == "call_function")
