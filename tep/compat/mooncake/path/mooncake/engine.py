"""Mooncake's module of its engine."""

from __future__ import annotations

from tep.compat.mooncake import TransferEngine, TransferNotify, TransferOpcode

__all__ = ["TransferEngine", "TransferNotify", "TransferOpcode"]
