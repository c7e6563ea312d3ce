"""The names of NIXL's own bindings module: memory types, errors, descriptor lists.

Values and their checks; nothing here transfers. The names and numbers are NIXL 1.5's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

import numpy as np
import numpy.typing as npt

__all__ = [
    "DEFAULT_COMM_PORT", "HAVE_UCX_GPU_DEVICE_API", "NIXL_INIT_AGENT", "NIXL_THREAD_SYNC_DEFAULT",
    "Error", "Rows", "nixlAgent", "nixlAgentConfig", "nixlBackendError", "nixlCancelledError",
    "nixlInvalidParamError", "nixlMismatchError", "nixlNoTelemetryError", "nixlNotAllowedError",
    "nixlNotFoundError", "nixlNotPostedError", "nixlNotSupportedError", "nixlRegDList",
    "nixlRemoteDList", "nixlRemoteDisconnectError", "nixlRepostActiveError", "nixlUnknownError",
    "nixlXferDList", "nixlXferTelemetry", "nixl_cost_t", "nixl_mem_t", "nixl_status_t",
    "nixl_thread_sync_t", "nixl_xfer_op_t",
]  # fmt: skip

Rows = npt.NDArray[np.int64]
"""int64[n, 3]: address, length, device."""

DEFAULT_COMM_PORT: Final = 8888
HAVE_UCX_GPU_DEVICE_API: Final = False
NIXL_INIT_AGENT: Final = ""


class nixl_xfer_op_t(IntEnum):
    """The direction of a transfer."""

    NIXL_READ = 0
    NIXL_WRITE = 1


NIXL_READ, NIXL_WRITE = nixl_xfer_op_t


class nixl_thread_sync_t(IntEnum):
    """Accepted and without effect: any thread may call any method."""

    NIXL_THREAD_SYNC_NONE = 0
    NIXL_THREAD_SYNC_STRICT = 1
    NIXL_THREAD_SYNC_RW = 2
    NIXL_THREAD_SYNC_DEFAULT = 0


NIXL_THREAD_SYNC_NONE, NIXL_THREAD_SYNC_STRICT, NIXL_THREAD_SYNC_RW = nixl_thread_sync_t
NIXL_THREAD_SYNC_DEFAULT = NIXL_THREAD_SYNC_NONE


class nixl_cost_t(IntEnum):
    """The way in which a cost was estimated."""

    NIXL_COST_ANALYTICAL_BACKEND = 0


(NIXL_COST_ANALYTICAL_BACKEND,) = nixl_cost_t


class nixl_status_t(IntEnum):
    """The answer of a call of nixlAgent; errors are raised."""

    NIXL_IN_PROG = 1
    NIXL_SUCCESS = 0
    NIXL_ERR_NOT_POSTED = -1
    NIXL_ERR_INVALID_PARAM = -2
    NIXL_ERR_BACKEND = -3
    NIXL_ERR_NOT_FOUND = -4
    NIXL_ERR_MISMATCH = -5
    NIXL_ERR_NOT_ALLOWED = -6
    NIXL_ERR_REPOST_ACTIVE = -7
    NIXL_ERR_UNKNOWN = -8
    NIXL_ERR_NOT_SUPPORTED = -9


NIXL_IN_PROG, NIXL_SUCCESS, *_ = nixl_status_t
globals().update(nixl_status_t.__members__)


class nixl_mem_t(IntEnum):
    """A kind of memory."""

    DRAM_SEG = 0
    VRAM_SEG = 1
    BLK_SEG = 2
    OBJ_SEG = 3
    FILE_SEG = 4


DRAM_SEG, VRAM_SEG, BLK_SEG, OBJ_SEG, FILE_SEG = nixl_mem_t


class Error(Exception):
    """An error of NIXL's: its status, followed by tep's message."""

    status = "NIXL_ERR_UNKNOWN"

    def __init__(self, why: str = "") -> None:
        super().__init__(f"{self.status}: {why}" if why else self.status)


def _error(name: str, status: str) -> type[Error]:
    return type(name, (Error,), {"status": status, "__doc__": f"{status}.", "__module__": __name__})


nixlBackendError = _error("nixlBackendError", "NIXL_ERR_BACKEND")
nixlCancelledError = _error("nixlCancelledError", "NIXL_ERR_CANCELED")
nixlInvalidParamError = _error("nixlInvalidParamError", "NIXL_ERR_INVALID_PARAM")
nixlMismatchError = _error("nixlMismatchError", "NIXL_ERR_MISMATCH")
nixlNoTelemetryError = _error("nixlNoTelemetryError", "NIXL_ERR_NO_TELEMETRY")
nixlNotAllowedError = _error("nixlNotAllowedError", "NIXL_ERR_NOT_ALLOWED")
nixlNotFoundError = _error("nixlNotFoundError", "NIXL_ERR_NOT_FOUND")
nixlNotPostedError = _error("nixlNotPostedError", "NIXL_ERR_NOT_POSTED")
nixlNotSupportedError = _error("nixlNotSupportedError", "NIXL_ERR_NOT_SUPPORTED")
nixlRemoteDisconnectError = _error("nixlRemoteDisconnectError", "NIXL_ERR_REMOTE_DISCONNECT")
nixlRepostActiveError = _error("nixlRepostActiveError", "NIXL_ERR_REPOST_ACTIVE")
nixlUnknownError = _error("nixlUnknownError", "NIXL_ERR_UNKNOWN")


@dataclass(frozen=True)
class nixlXferTelemetry:
    """Times of one transfer, in us, and its size."""

    startTime: int = 0
    postDuration: int = 0
    xferDuration: int = 0
    totalBytes: int = 0
    descCount: int = 0


def _as_array(descs: Any) -> Any:
    """Convert a list of whole numbers to an array; return anything else unchanged."""
    try:
        found = np.array(descs)
    except (ValueError, OverflowError):  # not all of one length: the check of each names it
        return descs
    return found if found.ndim == 2 and found.dtype.kind in "iu" else descs


def _checked_array(descs: np.ndarray) -> Rows:
    """Return rows of address, length and device, each checked like one descriptor."""
    if descs.ndim != 2 or descs.shape[1] != 3 or descs.dtype.kind not in "iu":
        raise TypeError(
            f"descriptors as an array of {descs.dtype}, shape {descs.shape}: give whole numbers in "
            "3 columns, address, length and device"
        )
    limit = np.uint64(1 << 63)
    bad = (descs < 0).any(1) | (descs.astype(np.uint64) >= limit).any(1)
    bad |= descs[:, 0].astype(np.uint64) + descs[:, 1].astype(np.uint64) >= limit
    if bad.any():
        at = int(np.argmax(bad))
        raise TypeError(f"descriptor {at}, {descs[at].tolist()}, is no address, length and device")
    return descs.astype(np.int64)


@dataclass
class nixlAgentConfig:
    """The configuration of a nixlAgent, with NIXL's names; see nixl_agent_config."""

    useProgThread: bool = False
    useListenThread: bool = False
    listenPort: int = DEFAULT_COMM_PORT
    syncMode: nixl_thread_sync_t = NIXL_THREAD_SYNC_NONE
    captureTelemetry: bool = False
    pthrDelay: int = 0
    lthrDelay: int = 100_000


nixlAgent: Any
"""The agent of C++; tep.compat.nixl.lowlevel sets it."""


class _DList:
    """Memory of one kind, as tuples."""

    _WIDTH = 3

    def __init__(self, mem: nixl_mem_t, descs: Any = ()) -> None:
        self._mem = nixl_mem_t(mem)
        self._array: Rows | None = None
        self._tuples: list[tuple[Any, ...]] = []
        if isinstance(descs, int):  # so many empty ones
            descs = [(0, 0, 0, "")[: self._WIDTH]] * descs
        if not isinstance(descs, np.ndarray) and self._WIDTH == 3:
            descs = _as_array(descs)
        if isinstance(descs, np.ndarray):
            self._array = _checked_array(descs)
        else:
            for desc in descs:
                self.append(desc)

    @property
    def _rows(self) -> list[tuple[Any, ...]]:
        """Return the descriptors as tuples, for a caller that reads or changes one.

        An inference engine gives all blocks of a cache at once, hundreds of thousands: as an array
        they take milliseconds, as tuples seconds, and many more beside a spinning thread.
        """
        if self._array is not None:
            rest = self._rest()
            self._tuples = [(*row, *rest) for row in self._array.tolist()]
            self._array = None
        return self._tuples

    @classmethod
    def _rest(cls) -> tuple[Any, ...]:
        """The fields of a descriptor beyond its three numbers."""
        return ()

    def append(self, desc: Sequence[Any]) -> None:
        if len(desc) != self._WIDTH:
            raise TypeError(f"{type(self).__name__}: {desc!r} has not {self._WIDTH} elements")
        self._rows.append(self._checked(tuple(desc)))

    addDesc = append

    @staticmethod
    def _checked(desc: tuple[Any, ...]) -> tuple[Any, ...]:
        numbers = tuple(int(one) for one in desc[:3])
        if min(numbers) < 0 or numbers[0] + numbers[1] >= 1 << 63:
            raise TypeError(f"descriptor {numbers} is no address, length and device")
        return (*numbers, *desc[3:])

    def clear(self) -> None:
        self._tuples, self._array = [], None

    def descCount(self) -> int:
        return len(self)

    def getType(self) -> nixl_mem_t:
        return self._mem

    def index(self, desc: Sequence[Any]) -> int:
        """Return the position of a descriptor.

        Raises:
            nixlNotFoundError: it is not in the list.
        """
        found = self._checked(tuple(desc))
        if found not in self._rows:
            raise nixlNotFoundError(f"{desc!r}")
        return self._rows.index(found)

    def isEmpty(self) -> bool:
        return not len(self)

    def print(self) -> None:
        print(self)  # noqa: T201  # what the method is for

    def remDesc(self, index: int) -> None:
        del self._rows[index]

    def rows(self) -> Rows:
        """Return addresses, lengths and devices."""
        if self._array is not None:
            return self._array.copy()
        return np.array([row[:3] for row in self._tuples], np.int64).reshape(-1, 3)

    def __len__(self) -> int:
        return len(self._tuples if self._array is None else self._array)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return self._rows[index]

    def __setitem__(self, index: int, desc: Sequence[Any]) -> None:
        self._rows[index] = self._checked(tuple(desc))

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return iter(self._rows)

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self._mem == other._mem and self._rows == other._rows

    __hash__ = None  # type: ignore[assignment]  # it changes

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._mem.name}, {len(self)} descriptors)"


class nixlXferDList(_DList):
    """Memory to transfer: tuples of address, length and device."""


class nixlRegDList(_DList):
    """Memory to register: address, length, device and a word about it."""

    _WIDTH = 4

    @classmethod
    def _rest(cls) -> tuple[Any, ...]:
        return (b"",)

    @staticmethod
    def _checked(desc: tuple[Any, ...]) -> tuple[Any, ...]:
        found = _DList._checked(desc)
        return (*found[:3], found[3].encode() if isinstance(found[3], str) else bytes(found[3]))

    def trim(self) -> nixlXferDList:
        return nixlXferDList(self._mem, [row[:3] for row in self._rows])


class nixlRemoteDList(_DList):
    """Memory of several agents: address, length, device and the agent's name."""

    _WIDTH = 4
