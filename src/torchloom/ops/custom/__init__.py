"""Operators of one's own, and a check that they keep what they promise to compilers."""

from __future__ import annotations

from torchloom.ops.custom.check import Finding, OpReport, check_op
from torchloom.ops.custom.define import CustomOp, custom_op
from torchloom.ops.custom.fit import Proposal, propose_fake

__all__ = ["CustomOp", "Finding", "OpReport", "Proposal", "check_op", "custom_op", "propose_fake"]
