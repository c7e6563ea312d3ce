"""Spoiled loopbacks, third part: notes, sources and fences (C24 to C26)."""

from __future__ import annotations

from tep.backends.base import Completions, Kind
from tep.testing.spoiled_base import ByRow, breaks

__all__ = ["ForgetsWhoWrote", "NotesCutShort", "OpenFence"]


@breaks(24)
class NotesCutShort(ByRow):
    """Has frames of 256 bytes, and no more than one for a note."""

    def post_note(self, peer: int, payload: bytes, ctx: int) -> bool:
        return super().post_note(peer, payload[:256], ctx)


@breaks(24)
class NotesInTheUsersPool(ByRow):
    """Sends notes as messages, which wait for a buffer of the user's."""

    def post_note(self, peer: int, payload: bytes, ctx: int) -> bool:
        return super().post_send(peer, payload, ctx)


@breaks(24)
class NotesFromNowhere(ByRow):
    """Loses the sender's address."""

    def take_note(self, slot: int) -> tuple[bytes, bytes]:
        return super().take_note(slot)[0], b"?"


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


@breaks(26, seed=3)
class HastyFence(ByRow):
    """Says that it is fenced before it has handed out what landed."""

    def fence(self, source: bytes, ctx: int) -> None:
        disorder, self._disorder = self._disorder, None
        super().fence(source, ctx)
        self._disorder = disorder
