"""The post office of one instance: messages out and in, on the first rank's engine.

Sending never blocks and never raises. What its sender is told to be lost can be sent again, a few
times: it may have arrived all the same, so that receivers must bear repeats. Everything that comes
in is handed over on the event loop's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable

from tep import BadDescriptor, NetAddr, TepError, TransferEngine, UsageError
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
        pause_s: before a lost message is sent again.

    Attributes:
        sent, received, lost, garbled: how many; lost are those whose sender was told of an error,
            each time.
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
        pause_s: float,
    ) -> None:
        self._engine = engine
        self._pause_s = pause_s
        self._on_message = on_message
        self.loop = asyncio.get_running_loop()
        self.sent = self.received = self.lost = self.garbled = 0
        self.last_loss = ""
        self._under_way = 0
        self._topics: set[Hashable] = set()
        self._quiet = asyncio.Event()
        engine.submit_recvs(message_bytes, buffers, self._take)

    def send(
        self,
        peer: NetAddr,
        message: Message,
        *,
        on_lost: Callable[[str], object] | None = None,
        tries: int = 1,
        topic: Hashable = None,
    ) -> None:
        """Send; what cannot be sent, or may not have been delivered, is counted as lost.

        Args:
            peer: to whom.
            message: what.
            on_lost: called on the loop's thread, with the last reason, if it is lost each time.
            tries: how often it is sent at the most.
            topic: what says the same each time; it is not sent while an earlier message of the
                topic is under way. Errors can take long, and messages must not pile up.
        """
        if topic in self._topics:
            return
        if topic is not None:
            self._topics.add(topic)
        self._under_way += 1

        def end(reason: str) -> None:
            self._under_way -= 1
            self._topics.discard(topic)
            self._quiet.set()
            if reason and on_lost is not None:
                on_lost(reason)

        self._try(peer, encode(message), tries, end)

    def _try(self, peer: NetAddr, payload: bytes, tries: int, end: Callable[[str], object]) -> None:
        self.sent += 1

        def told(error: TepError | None) -> None:
            if error is None:
                end("")
                return
            self.lost += 1
            self.last_loss = str(error)
            if tries > 1 and not isinstance(error, UsageError):
                self.loop.call_later(self._pause_s, self._try, peer, payload, tries - 1, end)
            else:
                end(self.last_loss)

        def note(sent: Sent) -> None:
            if not self.loop.is_closed():
                self.loop.call_soon_threadsafe(told, sent.error)

        try:
            self._engine.submit_send(peer, payload, on_done=note)
        except TepError as error:
            self.loop.call_soon(told, error)

    async def drained(self) -> None:
        """Return when every message has been delivered or lost."""
        while self._under_way:
            self._quiet.clear()
            await self._quiet.wait()

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
