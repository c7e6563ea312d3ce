"""Metadata over sockets, as NIXL's agents exchange it: one call a connection, and its answer.

Rule: whoever connects is believed, as NIXL believes him. The metadata of an agent, which says where
its memory is, is for peers that may read and write it.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Thread
from typing import Final

from tep import TepError
from tep.compat.nixl.wire import Body, decode, encode

__all__ = ["BYTES_MAX", "Listener"]

logger = logging.getLogger("tep.compat.nixl")

_WAIT_S: Final = 5.0
"""Limit of one call at the listener: a stranger who says nothing keeps others waiting as long."""

_PAUSE_S: Final = 0.1
"""After a call that could not be taken: most often there are no descriptors, for a while."""

_CALL_S: Final = 30.0
"""Limit of each wait of a caller, seconds."""

BYTES_MAX: Final = 64 << 20


class Listener:
    """The calls of one agent and, if it listens, of others to it.

    Args:
        port: to listen on, all addresses of this machine; 0: any; None: do not listen.
        answer: called with each call of another agent, on this object's thread.

    Attributes:
        port: the one that it listens on; None: none.

    Raises:
        OSError: the port is in use.
    """

    def __init__(self, port: int | None, answer: Callable[[Body], bytes]) -> None:
        self._answer = answer
        self._closed = False
        self._calls = ThreadPoolExecutor(1, "tep nixl calls")  # in the order of the program
        self._server = None if port is None else socket.create_server(("", port))
        self.port = None if self._server is None else self._server.getsockname()[1]
        if self._server is not None:
            Thread(target=self._listen, name="tep nixl listener", daemon=True).start()

    def call(self, host: str, port: int, call: Body, done: Callable[[bytes], object]) -> None:
        """Make a call, without waiting for it; done(answer) is called with an answer."""
        self._calls.submit(self._call, host, port, call, done)

    @staticmethod
    def ask(host: str, port: int, call: Body) -> bytes:
        """Make a call, and return its answer; OSError or TepError if nobody answers there."""
        with socket.create_connection((host, port), _CALL_S) as peer:
            peer.sendall(encode(call))
            peer.shutdown(socket.SHUT_WR)
            return _read(peer, _CALL_S)

    def _call(self, host: str, port: int, call: Body, done: Callable[[bytes], object]) -> None:
        try:
            raw = self.ask(host, port, call)
            if raw:
                done(raw)
        except Exception as error:  # noqa: BLE001  # nobody waits for it; NIXL logs it, too
            logger.warning("agent at %s:%d: %s: %s", host, port, type(error).__name__, error)

    def _listen(self) -> None:
        assert self._server is not None
        while not self._closed:
            try:
                peer, _ = self._server.accept()
            except OSError:
                if not self._closed:
                    time.sleep(_PAUSE_S)
                continue
            with peer:
                peer.settimeout(_WAIT_S)
                try:
                    peer.sendall(self._answer(decode(_read(peer, _WAIT_S))))
                except Exception as error:  # noqa: BLE001  # a stranger's; the next may be better
                    logger.warning("a call was refused: %s: %s", type(error).__name__, error)

    def close(self) -> None:
        self._closed = True
        self._calls.shutdown(wait=False)
        if self._server is not None:
            with contextlib.suppress(OSError):
                self._server.shutdown(socket.SHUT_RDWR)  # wakes accept()
            self._server.close()


def _read(peer: socket.socket, limit_s: float) -> bytes:
    """Read until the other side has said all."""
    found, end_s = bytearray(), time.monotonic() + limit_s
    while len(found) <= BYTES_MAX and time.monotonic() < end_s:
        part = peer.recv(1 << 16)
        if not part:
            return bytes(found)
        found += part
    raise TepError(f"a call of more than {BYTES_MAX} bytes, or of more than {limit_s} s")
