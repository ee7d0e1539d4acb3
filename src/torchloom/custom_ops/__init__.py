"""Custom operators, and a check that they keep what they promise to compilers."""

from __future__ import annotations

from torchloom.custom_ops.check import Finding, OpReport, check_op
from torchloom.custom_ops.define import CustomOp, custom_op

__all__ = ["CustomOp", "Finding", "OpReport", "check_op", "custom_op"]
