"""Spoiled loopbacks, third part: control messages, sources and fences (C24 to C27)."""

from __future__ import annotations

from tep.backends.base import Access, Completions, DomainKey, Kind, Row, Status
from tep.memory.source import Memory
from tests.spoiled.base import ByRow, breaks


@breaks(24)
class ControlCutShort(ByRow):
    """Has frames of 256 bytes, and no more than one for a control message."""

    def post_control(self, peer: int, payload: bytes, ctx: int) -> bool:
        return super().post_control(peer, payload[:256], ctx)


@breaks(24)
class ControlInTheUsersPool(ByRow):
    """Sends control messages as messages, which wait for a buffer of the user's."""

    def post_control(self, peer: int, payload: bytes, ctx: int) -> bool:
        return super().post_send(peer, payload, ctx)


@breaks(24)
class ControlFromNowhere(ByRow):
    """Loses the sender's address."""

    def take_control(self, slot: int) -> tuple[bytes, bytes]:
        return super().take_control(slot)[0], b"?"


@breaks(24)
class TakesEachNicForAnEngine(ByRow):
    """Reads the NIC's number as part of its engine's name."""

    @staticmethod
    def engine_of(address: bytes) -> bytes:
        return address


@breaks(25)
class ForgetsWhoWrote(ByRow):
    """Gives all immediates the same source."""

    def poll(self, out: Completions) -> int:
        n = super().poll(out)
        out["ctx"][:n][out["kind"][:n] == Kind.IMM] = 0
        return n


@breaks(26)
class OpenFence(ByRow):
    """Says that it is fenced, and lets everything through."""

    def fence(self, source: bytes, ctx: int) -> None:
        super().fence(b"somebody else", ctx)


@breaks(26)
class ConfirmsAFenceOnce(ByRow):
    """Has nothing to do for a fence that is there already, and says nothing."""

    def fence(self, source: bytes, ctx: int) -> None:
        if source not in self._fenced:
            super().fence(source, ctx)


@breaks(26)
class HastyFence(ByRow):
    """Says that it is fenced before it has handed out what landed."""

    def fence(self, source: bytes, ctx: int) -> None:
        super().fence(source, ctx)
        self.arrived.appendleft(self.arrived.pop())


@breaks(27)
class FenceForGood(ByRow):
    """Does not open again."""

    def unfence(self, source: bytes) -> None:
        pass


@breaks(27)
class LateAfterAll(ByRow):
    """Goes on trying rows that it has said were refused, and they land once the fence is gone."""

    def write_row(self, row: Row) -> Status:
        status = super().write_row(row)
        if status is Status.UNREACHABLE:
            self.carry_later(row)
        return status

    def unfence(self, source: bytes) -> None:
        super().unfence(source)
        self._later = [(self.turns, row) for _, row in self._later]


@breaks(27)
class OpensForAll(ByRow):
    """Lifts the fences against everybody."""

    def unfence(self, source: bytes) -> None:
        self._fenced.clear()


@breaks(27)
class FencesOnce(ByRow):
    """Takes a sender that was let in again for one that is never fenced."""

    _lifted: frozenset[bytes] = frozenset()

    def unfence(self, source: bytes) -> None:
        self._lifted |= {source}
        super().unfence(source)

    def fence(self, source: bytes, ctx: int) -> None:
        super().fence(b"somebody else" if source in self._lifted else source, ctx)


@breaks(27)
class UnfencingRevives(ByRow):
    """Sets up the receiving side anew when a fence is lifted, on a dead device as well."""

    def register(self, memory: Memory, access: Access) -> DomainKey:
        key = super().register(memory, access)
        self._known = {**getattr(self, "_known", {}), **self.targets}
        return key

    def unfence(self, source: bytes) -> None:
        super().unfence(source)
        if not self.alive:
            self.alive = True
            self.targets.update(self._known)
            self._hub.attach(self)
