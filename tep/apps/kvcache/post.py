"""The post office of one instance: messages out and in, on the first rank's engine.

Sending never blocks and never raises; who needs an answer asks again. Everything that comes in is
handed over on the event loop's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tep import BadDescriptor, NetAddr, TepError, TransferEngine
from tep import Message as Sent
from tep.apps.kvcache.messages import Message, decode, encode

__all__ = ["Post"]


class Post:
    """Messages of one engine.

    Args:
        engine: of the first rank.
        on_message: called on the loop's thread with each message that is one.
        buffers: receive buffers.
        message_bytes: length of each; what is longer fails at its sender.

    Attributes:
        sent, received, lost, garbled: how many; lost are those whose sender was told of an error.
        loop: on which everything is handed over.
        last_loss: what the latest of them was told.
    """

    def __init__(
        self,
        engine: TransferEngine,
        on_message: Callable[[Message], object],
        *,
        buffers: int,
        message_bytes: int,
    ) -> None:
        self._engine = engine
        self._on_message = on_message
        self.loop = asyncio.get_running_loop()
        self.sent = self.received = self.lost = self.garbled = 0
        self.last_loss = ""
        self._under_way = 0
        self._quiet = asyncio.Event()
        engine.submit_recvs(message_bytes, buffers, self._take)

    def send(
        self, peer: NetAddr, message: Message, on_lost: Callable[[str], object] | None = None
    ) -> None:
        """Send; what cannot be sent, or may not have been delivered, is counted as lost.

        Args:
            peer: to whom.
            message: what.
            on_lost: called on the loop's thread, with the reason, if it is lost.
        """
        self.sent += 1

        self._under_way += 1

        def note(sent: Sent) -> None:
            if not self.loop.is_closed():
                self.loop.call_soon_threadsafe(self._end, sent.error, on_lost)

        try:
            self._engine.submit_send(peer, encode(message), on_done=note)
        except TepError as error:
            self.loop.call_soon(self._end, error, on_lost)

    async def drained(self) -> None:
        """Return when every message has been delivered or lost."""
        while self._under_way:
            self._quiet.clear()
            await self._quiet.wait()

    def _end(self, error: TepError | None, on_lost: Callable[[str], object] | None) -> None:
        self._under_way -= 1
        self._quiet.set()
        if error is not None:
            self.lost += 1
            self.last_loss = str(error)
            if on_lost is not None:
                on_lost(self.last_loss)

    def _take(self, payload: memoryview) -> None:
        """On the engine's thread; the buffer goes back when this returns."""
        try:
            message = decode(payload)
        except BadDescriptor:
            self.garbled += 1
            return
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._hand_over, message)

    def _hand_over(self, message: Message) -> None:
        self.received += 1
        self._on_message(message)
