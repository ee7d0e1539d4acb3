"""Operators of one's own, and a check that they keep what they promise to compilers."""

from __future__ import annotations

from torchloom.custom_ops.check import Finding, OpReport, check_op
from torchloom.custom_ops.define import CustomOp, custom_op
from torchloom.custom_ops.fit import Proposal, propose_fake

__all__ = ["CustomOp", "Finding", "OpReport", "Proposal", "check_op", "custom_op", "propose_fake"]
