"""What a completion's status means: libibverbs' words in the seam's, and in a user's."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from tep.backends.base import Status
from tep.backends.ffi.ibverbs_structs import ENUMS
from tep.backends.texts import meaning

__all__ = ["STATUS_TEXT", "send_status", "write_status"]

_WRITE: Final[Mapping[int, Status]] = MappingProxyType(
    {
        ENUMS["IBV_WC_SUCCESS"]: Status.OK,
        ENUMS["IBV_WC_LOC_LEN_ERR"]: Status.LENGTH,
        ENUMS["IBV_WC_LOC_QP_OP_ERR"]: Status.LOCAL_KEY,
        ENUMS["IBV_WC_LOC_PROT_ERR"]: Status.LOCAL_KEY,
        ENUMS["IBV_WC_LOC_ACCESS_ERR"]: Status.LOCAL_KEY,
        ENUMS["IBV_WC_WR_FLUSH_ERR"]: Status.FLUSHED,
        ENUMS["IBV_WC_REM_INV_REQ_ERR"]: Status.REMOTE_RANGE,
        ENUMS["IBV_WC_REM_ACCESS_ERR"]: Status.REMOTE_KEY,
        ENUMS["IBV_WC_RETRY_EXC_ERR"]: Status.UNREACHABLE,
        ENUMS["IBV_WC_RESP_TIMEOUT_ERR"]: Status.UNREACHABLE,
        ENUMS["IBV_WC_RNR_RETRY_EXC_ERR"]: Status.RNR,
    }
)


def write_status(status: int) -> Status:
    """Translate the status of a write's completion."""
    return _WRITE.get(status, Status.PROVIDER)


def send_status(status: int) -> Status:
    """Translate the status of a message's completion: there, a refusal means too long."""
    return Status.LENGTH if status in _TOO_LONG else write_status(status)


_TOO_LONG: Final = frozenset(
    {
        ENUMS["IBV_WC_LOC_LEN_ERR"],
        ENUMS["IBV_WC_REM_INV_REQ_ERR"],  # what the specification asks for
        ENUMS["IBV_WC_REM_OP_ERR"],  # what Soft-RoCE says (measured)
    }
)


STATUS_TEXT: Final = meaning(
    FLUSHED="another row to this peer failed first and took the connection with it, or "
    "the engine was closed; the backend connects anew by itself",
    LOCAL_KEY="the memory here is not registered, or not for reads into it, or the row "
    "reaches beyond it",
    REMOTE_KEY="the peer refuses key or range: the region was deregistered, or peers "
    "may not write (read) there, or the row reaches beyond it, or the key is another NIC's",
    REMOTE_RANGE="the target's NIC calls the request invalid: too long for it?",
    LENGTH="longer than this NIC's rows may be, or than the peer's buffer",
    RNR="the peer had no receive posted for too long: its engine is not being turned",
    UNREACHABLE="no answer within timeout and retries: the peer or its process is "
    "gone, or packets get lost: compare MTU, GID and PFC settings of both ends; or a failover "
    "has fenced rows between these two NICs off",
    NIC_DOWN="the device reported a fatal error, or its port stayed down while another "
    "NIC's was up; whether the row landed is unknown",
    PROVIDER="",
)
"""What each status usually means."""
