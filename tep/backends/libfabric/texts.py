"""What a status usually means on libfabric, in words. A cause that is known the domain adds."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from tep.backends.base import Status

__all__ = ["STATUS_TEXT"]

STATUS_TEXT: Final[Mapping[int, str]] = MappingProxyType(
    {
        Status.FLUSHED: "the domain was closed before this was carried out",
        Status.LOCAL_KEY: "the source was deregistered, or the row reaches beyond it",
        Status.REMOTE_KEY: "the target has no such key: the region was deregistered, or is a "
        "source only, or the row carries the key of another NIC",
        Status.REMOTE_RANGE: "the row reaches beyond the target's region",
        Status.LENGTH: "longer than caps allow, or than the peer's receive buffers",
        Status.RNR: "too many messages wait for the peer's receive buffers",
        Status.UNREACHABLE: "the peer does not answer, or has closed",
        Status.STALE_PEER: "another engine has the peer's address now; exchange descriptors anew",
        Status.NIC_DOWN: "libfabric has lost the NIC; whether the row landed is unknown",
        Status.PROVIDER: "the connection broke; whether the row landed is unknown",
    }
)
