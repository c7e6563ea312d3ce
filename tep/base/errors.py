"""Every exception tep raises, sorted by whose fault it is; no other module defines one.

A UsageError is yours, raised before anything is posted: the call has to change. A FabricError is
the fault of wire, NIC or peer. A BusyError may pass. A bug in tep is an `assert`.
"""

from __future__ import annotations

__all__ = [
    "BackendUnavailable", "BadDescriptor", "BadRequest", "BurntImm", "BusyError", "CallbackError",
    "Cancelled", "ClosedError", "FabricError", "RendezvousError", "StaleEpoch", "StallError",
    "TepError", "UsageError", "WaitTimeout",
]  # fmt: skip


class TepError(Exception):
    """The base class of all exceptions of tep."""


class UsageError(TepError, ValueError):
    """The caller asked for something impossible; nothing was posted."""


class BadRequest(UsageError):
    """A transfer request contradicts itself, its regions or its routing."""


class BadDescriptor(UsageError):
    """The bytes are no address, descriptor or control message that this version reads."""


class StaleEpoch(BadDescriptor):
    """The descriptor or address belongs to an incarnation of the peer that has been replaced."""


class ClosedError(UsageError):
    """The engine, region or handle was closed or freed before this call."""


class BurntImm(UsageError):
    """The immediate of a request is burnt: an earlier one with it to the same peer has failed.

    Its receiver no longer counts it; see docs/concepts/failures.md.
    """


class BusyError(TepError):
    """Not now: memory is in use, or queues are full. The same call may succeed later."""


class FabricError(TepError):
    """A posted row failed, as reported by the wire, the peer or the NIC.

    Attributes:
        code: name of the backend interface's status, e.g. "REMOTE_KEY".
        domain: index of the local NIC, or None where no NIC is to blame.
        peer: printable address of the target, or "".
        row: index of the failed row within its transfer's batch on that NIC, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str = "",
        domain: int | None = None,
        peer: str = "",
        row: int | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.domain = domain
        self.peer = peer
        self.row = row

    def saying(self, more: str) -> FabricError:
        """Return the same failure with more text."""
        return FabricError(
            f"{self}{more}", code=self.code, domain=self.domain, peer=self.peer, row=self.row
        )


class RendezvousError(TepError):
    """The rendezvous failed: a process has left, does something else, or is no rank."""


class BackendUnavailable(TepError):
    """A backend cannot run here.

    Attributes:
        tried: (what was tried, why it failed) pairs, in order.
    """

    def __init__(self, message: str, tried: tuple[tuple[str, str], ...] = ()) -> None:
        lines = "".join(f"\n  tried {what}: {why}" for what, why in tried)
        super().__init__(message + lines)
        self.tried = tried


class Cancelled(TepError):
    """The transfer or expectation was cancelled, and every posted row has come back."""


class WaitTimeout(TepError, TimeoutError):
    """A wait ran out of time; the handle is still valid. The message is a stall report."""


class StallError(TepError):
    """A wait that nothing can end: the simulation has no event left.

    The message is a stall report.
    """


class CallbackError(TepError):
    """A user's callback raised; the transfer it belonged to is not affected.

    The cause is attached.
    """
