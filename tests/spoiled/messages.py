"""Loopbacks that break C21 or C34: messages, and who sent them.

Every class is a plausible slip of a backend's author, beside the clause that must catch it.
"""

from __future__ import annotations

from tep.backends.base import Completions, Kind, Status
from tep.backends.loopback import Message
from tests.spoiled.base import ByRow, breaks


@breaks(21)
class CutsLongMessages(ByRow):
    """Delivers what fits of a message."""

    def _try_send(self, message: Message) -> Status | None:
        status = super()._try_send(message)
        while status is Status.LENGTH:
            message = message._replace(payload=message.payload[:-1])
            status = super()._try_send(message)
        return status


@breaks(21)
class SendsAMessageTwice(ByRow):
    """Sends again before it knows that the first try failed."""

    def _try_send(self, message: Message) -> Status | None:
        super()._try_send(message)
        return super()._try_send(message)


@breaks(34)
class NamesTheLastSenderForAll(ByRow):
    """Keeps one sender a NIC instead of one a message."""

    def recv_source(self, slot: int) -> bytes:
        del slot
        _, sender = next(reversed(self._pool._messages.values()))
        return sender


@breaks(34)
class NamesTheFirstNicOfAnEngine(ByRow):
    """Says which engine a message came from, and not which NIC."""

    def recv_source(self, slot: int) -> bytes:
        found = super().recv_source(slot)
        (wanted,) = {self.engine_of(found)}
        return next(at for at in self._hub._by_address if self.engine_of(at) == wanted)


@breaks(21)
class ReusesABufferInUse(ByRow):
    """Puts a buffer into its pool twice."""

    def post_recvs(self, nbytes: int, count: int) -> None:
        super().post_recvs(nbytes, count)
        self._pool._free.extend(range(count))


@breaks(21)
class ImmediatesEatMessageBuffers(ByRow):
    """Lets each immediate consume a receive of the messages' pool."""

    def poll(self, out: Completions) -> int:
        n = super().poll(out)
        for _ in range(int((out["kind"][:n] == Kind.IMM).sum())):
            self.take_message(b"", self)
        kept = [entry for entry in self.arrived if entry[0] != Kind.RECV]
        self.arrived.clear()
        self.arrived.extend(kept)
        return n
