"""A decoder's dealings with prefillers: handshakes, beats, silence. No request is known here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from tep import FabricError
from tep.apps.kvcache.heartbeat import Patience, Pulse
from tep.apps.kvcache.memory import KvMemory
from tep.apps.kvcache.messages import Beat, Hello, Refuse, Welcome
from tep.apps.kvcache.post import Post
from tep.apps.kvcache.routing import PrefillerCard

__all__ = ["Session", "Sessions", "make_hello"]


@dataclass(slots=True, eq=False)
class Session:
    """Dealings with one incarnation of one prefiller.

    Attributes:
        card: who it is.
        welcome: its number of ranks, once it has agreed.
    """

    card: PrefillerCard
    welcome: asyncio.Future[int]


class Sessions:
    """All sessions of one decoder.

    Args:
        hello: what to say first.
        post: carries messages.
        patience: times.
        oldest: called with a prefiller's name: attempts before this serial are over there.
        on_silent: called with a session whose prefiller is silent; it is dropped already.
        on_replaced: called with the card of an incarnation that a later one has replaced.
    """

    def __init__(
        self,
        hello: Hello,
        post: Post,
        patience: Patience,
        *,
        oldest: Callable[[str], int],
        on_silent: Callable[[Session], object],
        on_replaced: Callable[[PrefillerCard], object],
    ) -> None:
        self._hello = hello
        self._post = post
        self._patience = patience
        self._oldest = oldest
        self._on_silent = on_silent
        self._on_replaced = on_replaced
        self._known: dict[str, Session] = {}
        self._closed = False
        self._greetings: set[asyncio.Task[None]] = set()
        self._pulse = Pulse(patience, self._beat, self._silent)

    async def get(self, card: PrefillerCard) -> Session:
        """The session with a prefiller, after its welcome.

        Raises:
            FabricError: it refused, or did not answer.
        """
        while not self._closed:
            session = self._open(card)
            try:
                await asyncio.shield(session.welcome)
            except asyncio.CancelledError:
                if session.welcome.cancelled():
                    continue  # it was dropped meanwhile, e.g. for new keys: say hello again
                raise
            return session
        raise FabricError("the decoder was closed")

    def _open(self, card: PrefillerCard) -> Session:
        known = self._known.get(card.name)
        if known is not None and known.card.epoch < card.epoch:
            self.drop(known)
            self._on_replaced(known.card)
            known = None
        if known is None:
            loop = asyncio.get_running_loop()
            known = self._known[card.name] = Session(card, loop.create_future())
            greeting = loop.create_task(self._greet(known), name=f"hello to {card.name}")
            self._greetings.add(greeting)
            greeting.add_done_callback(self._greetings.discard)
        return known

    def is_current(self, session: Session) -> bool:
        """Whether there are dealings still."""
        return self._known.get(session.card.name) is session

    def find(self, name: str, epoch: int) -> Session | None:
        """The session with this incarnation, if there is one."""
        found = self._known.get(name)
        return found if found is not None and found.card.epoch == epoch else None

    def drop(self, session: Session) -> None:
        """Have no dealings any more; the next attempt there begins with a hello. Idempotent."""
        if self.is_current(session):
            del self._known[session.card.name]
            self._pulse.leave(session.card.name)
        if not session.welcome.done():
            session.welcome.cancel()
        elif not session.welcome.cancelled():
            session.welcome.exception()  # it was looked at: asyncio must not complain

    def end(self, name: str, epoch: int) -> None:
        """Drop the session with an incarnation, or one before it, if there is any."""
        known = self._known.get(name)
        if known is not None and known.card.epoch <= epoch:
            self.drop(known)

    def renew(self, hello: Hello) -> None:
        """Introduce ourselves anew to everybody, before the next attempt there."""
        self._hello = hello
        for session in tuple(self._known.values()):
            self.drop(session)

    def watch(self, session: Session) -> None:
        """Beat to its prefiller and listen for its beats, from now on."""
        if self.is_current(session):
            self._pulse.watch(session.card.name)

    def rest(self, session: Session) -> None:
        """Nothing is wanted of it at present."""
        if self.is_current(session):
            self._pulse.leave(session.card.name)

    def close(self) -> None:
        """End all. Idempotent."""
        self._closed = True
        self._pulse.close()
        for greeting in self._greetings:
            greeting.cancel()
        for session in tuple(self._known.values()):
            self.drop(session)

    def take(self, message: Welcome | Refuse | Beat) -> None:
        """A prefiller says something about itself."""
        session = self.find(message.sender, message.epoch)
        if session is None:
            return
        self._pulse.heard(message.sender)
        if session.welcome.done():
            return
        if isinstance(message, Welcome):
            session.welcome.set_result(message.tp)
        elif isinstance(message, Refuse):
            session.welcome.set_exception(FabricError(message.reason))
            self.drop(session)

    async def _greet(self, session: Session) -> None:
        patience = self._patience
        for _ in range(patience.hello_tries):
            self._post.send(session.card.addr, self._hello)
            await asyncio.wait((session.welcome,), timeout=patience.hello_s)
            if session.welcome.done():
                return
        session.welcome.set_exception(
            FabricError(f"no answer to {patience.hello_tries} hellos in {patience.hello_s} s each")
        )
        self.drop(session)

    def _beat(self, name: str) -> None:
        session = self._known[name]
        hello = self._hello
        beat = Beat(hello.sender, hello.epoch, self._oldest(name))
        self._post.send(session.card.addr, beat, topic=name)

    def _silent(self, name: str) -> None:
        session = self._known[name]
        self.drop(session)
        self._on_silent(session)


def make_hello(name: str, memory: KvMemory) -> Hello:
    """What a decoder says first: where its cache is, under its present keys."""
    addr = memory.engines[0].main_address
    return Hello(
        name,
        addr.epoch,
        addr.to_bytes(),
        memory.layout.fingerprint,
        memory.layout,
        tuple(tuple(held.desc.to_bytes() for held in row) for row in memory.kv),
        memory.tails.desc.to_bytes(),
        memory.npages,
        memory.tail_bytes,
    )
