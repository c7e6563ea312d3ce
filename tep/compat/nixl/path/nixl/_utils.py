"""Memory by its address, for NIXL's own tests and examples."""

from __future__ import annotations

import ctypes
from typing import Any, Final

import numpy as np

__all__ = ["ba_buf", "free_passthru", "malloc_passthru", "verify_transfer"]

_PAGE: Final = 4096
_held: dict[int, Any] = {}


def malloc_passthru(size: int) -> int:
    """Allocate memory; return its address, a multiple of 4 KiB."""
    raw = np.empty(size + _PAGE, np.uint8)
    address = -(-raw.ctypes.data // _PAGE) * _PAGE
    _held[address] = raw
    return address


def free_passthru(buf: int) -> None:
    """Free what malloc_passthru() returned."""
    del _held[buf]


def ba_buf(addr: int, size: int) -> None:
    """Fill memory with 0xBA."""
    ctypes.memset(addr, 0xBA, size)


def verify_transfer(addr1: int, addr2: int, size: int) -> None:
    """Assert that two pieces of memory are equal."""
    assert ctypes.string_at(addr1, size) == ctypes.string_at(addr2, size)
