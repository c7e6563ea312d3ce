"""The handshake by which two processes prove that they know one token, which is never sent.

The listener sends a nonce. The caller answers with a proof over that nonce and over its own
introduction, and sends a nonce of its own; the listener proves the same. So a proof is good for
one connection, one caller and one direction. The later messages are not encrypted: an attacker
who can change packets in flight can take over a caller's connection.
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
    """Compute a proof of the token, for one question and one answer."""
    key = hashlib.sha256(token.encode()).digest()
    return hmac.digest(key, msgspec.msgpack.encode((what, *words)), "sha256")


def join_proof(token: str, nonce: bytes, asked: Join) -> bytes:
    """Compute the caller's proof, over the listener's nonce and the caller's introduction."""
    return prove(token, "join", nonce, asked.version, asked.who, asked.nonce)


# ---------------------------------------------------------------------- the listener


async def challenge(peer: Peer, token: str) -> Join:
    """Ask a stranger for its proof; check it and return the stranger's introduction.

    Raises one of TROUBLE if the proof fails; the stranger gets the reason.
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
    """Send a caller a refusal with its reason.

    Raises:
        RendezvousError: always, with the same reason.
    """
    await peer.say(Refused(why))
    raise RendezvousError(why)


async def welcome(peer: Peer, token: str, asked: Join) -> None:
    """Admit a caller, and prove to it that this is the right listener."""
    await peer.say(Joined(prove(token, "joined", asked.nonce)))


# ---------------------------------------------------------------------- the caller


async def enter(host: str, port: int, token: str, who: Who, timeout_s: float) -> Peer:
    """Connect until a listener that knows the token admits us.

    The listener may not be up yet, and it disconnects the oldest of many callers.

    Args:
        host: the listener's host.
        port: the listener's port.
        token: the secret that both know.
        who: this process's introduction to the listener.
        timeout_s: time limit of all tries, seconds.

    Raises:
        TimeoutError: no listener admitted us in time; says how the last try failed.
        RendezvousError: the listener does not know the token, or speaks another protocol.
        UsageError: the listener refused; says why.
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
    """Introduce this process; return True if it is admitted, False if the listener hung up."""
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
