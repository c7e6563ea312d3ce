"""Two processes prove to each other that they know one token, which is never sent.

Whoever listens asks with a number that is used once. The caller answers with a proof over that
number and over what it says of itself, and asks with a number of its own; the listener proves the
same. So a proof is good for one connection, one caller and one direction. What follows is not
encrypted: whoever can change packets on the way can go on in a caller's place.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import os
from typing import Final, NoReturn

import msgspec

from tep.base.errors import RendezvousError, UsageError
from tep.rendezvous.wire import TROUBLE, Challenge, Join, Joined, Peer, Refused, Who

__all__ = ["challenge", "enter", "join_proof", "prove", "refuse", "welcome"]

_VERSION: Final = 2
_RETRY_S: Final = 0.05


def prove(token: str, what: str, *words: int | bytes | Who) -> bytes:
    """Prove that one knows the token, for one question and one answer."""
    key = hashlib.sha256(token.encode()).digest()
    return hmac.digest(key, msgspec.msgpack.encode((what, *words)), "sha256")


def join_proof(token: str, nonce: bytes, asked: Join) -> bytes:
    """The caller's proof: over the listener's number, and all that the caller says."""
    return prove(token, "join", nonce, asked.version, asked.who, asked.nonce)


# ---------------------------------------------------------------------- whoever listens


async def challenge(peer: Peer, token: str) -> Join:
    """Ask a stranger for its proof; return what it says of itself once it has proved it.

    Raises one of TROUBLE: it has not, and is told so.
    """
    nonce = os.urandom(16)
    await peer.say(Challenge(nonce))
    asked = await peer.hear(0)
    if not isinstance(asked, Join):
        raise RendezvousError("it did not introduce itself")
    if not hmac.compare_digest(asked.proof, join_proof(token, nonce, asked)):
        await refuse(peer, "wrong token; set the same TEP_TOKEN in all ranks")
    peer.proven = True
    if asked.version != _VERSION:
        await refuse(peer, f"rendezvous version {asked.version}, the listener has {_VERSION}")
    return asked


async def refuse(peer: Peer, why: str) -> NoReturn:
    """Tell a caller that it is not let in, and why.

    Raises:
        RendezvousError: always, with the same words.
    """
    await peer.say(Refused(why))
    raise RendezvousError(why)


async def welcome(peer: Peer, token: str, asked: Join) -> None:
    """Let a caller in, and prove to it that it has come to the right place."""
    await peer.say(Joined(prove(token, "joined", asked.nonce)))


# ---------------------------------------------------------------------- whoever calls


async def enter(host: str, port: int, token: str, who: Who, timeout_s: float) -> Peer:
    """Call until somebody who knows the token lets us in.

    Nobody may listen there yet, and whoever does hangs up on the oldest of many callers.

    Args:
        host: where somebody listens, or will soon.
        port: there.
        token: the secret that both know.
        who: what the listener is told of this process.
        timeout_s: how long to try, seconds.

    Raises:
        TimeoutError: nobody did in time; says what came of the last try.
        RendezvousError: what listens there does not know the token, or speaks another language.
        UsageError: it refused; says why.
    """
    what = "nobody listens there"
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    peer = Peer(*await asyncio.open_connection(host, port))
                except OSError as error:  # not up yet
                    what = str(error)
                    await asyncio.sleep(_RETRY_S)
                    continue
                what = "it does not answer"
                async with contextlib.AsyncExitStack() as undo:
                    undo.push_async_callback(peer.close)
                    if await _introduce(peer, token, who):
                        undo.pop_all()
                        return peer
                what = "it hangs up without an answer"
                await asyncio.sleep(_RETRY_S)
    except TimeoutError:
        raise TimeoutError(what) from None


async def _introduce(peer: Peer, token: str, who: Who) -> bool:
    """Whether the listener let us in; False: it hung up."""
    nonce = os.urandom(16)
    try:
        asks = await peer.hear(0)
        if not isinstance(asks, Challenge):
            raise RendezvousError("it is no rendezvous")
        asked = Join(_VERSION, who, nonce, b"")
        proof = join_proof(token, asks.nonce, asked)
        await peer.say(msgspec.structs.replace(asked, proof=proof))
        answer = await peer.hear(0)
    except (EOFError, ConnectionError):
        return False
    except TROUBLE as error:
        raise RendezvousError(f"it is something else: {error}") from error
    if isinstance(answer, Refused):
        raise UsageError(answer.why)
    expected = prove(token, "joined", nonce)
    if not isinstance(answer, Joined) or not hmac.compare_digest(answer.proof, expected):
        raise RendezvousError("it does not know the token")
    peer.proven = True
    return True
