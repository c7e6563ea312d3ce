"""What all NICs say in the same words: what a status usually means, and that they are closed."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from tep.backends.base import Status
from tep.base.errors import ClosedError

__all__ = ["closed", "meaning", "says"]

_USUAL: Final[Mapping[int, str]] = MappingProxyType(
    {
        Status.FLUSHED: "the domain was closed before this was carried out",
        Status.LOCAL_KEY: "the source was deregistered, or the row reaches beyond it",
        Status.REMOTE_KEY: "the peer has no such key: the region was deregistered, or peers may "
        "not write (read) there, or the row carries the key of another NIC",
        Status.REMOTE_RANGE: "the row reaches beyond the peer's region",
        Status.LENGTH: "longer than caps allow, or than the peer's receive buffers",
        Status.RNR: "too many messages wait for the peer's receive buffers",
        Status.UNREACHABLE: "the peer does not answer, or has closed",
        Status.STALE_PEER: "the peer was opened again; exchange addresses and descriptors anew",
        Status.NIC_DOWN: "the NIC is lost; whether the row landed is unknown",
        Status.PROVIDER: "the connection broke; whether the row landed is unknown",
        Status.GIVEN_UP: "the read was given up, and may still write here",
    }
)


def meaning(**own: str) -> Mapping[int, str]:
    """What each status usually means; `own` texts, by a status' name, take the place of some."""
    return MappingProxyType({**_USUAL, **{Status[name]: text for name, text in own.items()}})


def says(*parts: str) -> str:
    """Join what is known; parts may be empty."""
    return "; ".join(part for part in parts if part)


def closed(nic: str) -> ClosedError:
    """The error of a call to a NIC that takes none any more."""
    return ClosedError(
        f"{nic}: this domain is closed, or belongs to the process that forked this one; open the "
        "engine anew"
    )
