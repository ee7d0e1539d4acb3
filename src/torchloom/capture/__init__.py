"""Turn a module into graphs that passes can rewrite, and those into executable code.

`torch.compile` captures the graphs (Dynamo handles guards, recompiles and dynamic shapes). One of two
routes here compiles them: Inductor with our hooks, or AOTAutograd with our own partitioner and a boxed
runner for any other backend.
"""

from __future__ import annotations

from torchloom._torch.untraced import leave_frames_alone
from torchloom.capture import unread
from torchloom.capture.hooks import GraphHook, WeaveHooks
from torchloom.capture.partition import partition_by_tags
from torchloom.capture.routes import compile_with_aot, compile_with_inductor

__all__ = [
    "GraphHook",
    "WeaveHooks",
    "compile_with_aot",
    "compile_with_inductor",
    "partition_by_tags",
]

# Behind a graph break a frame of the model may read logits.
leave_frames_alone(unread)
