"""One peer as rows and messages go to it: the way there, its regions, and how the way ends.

A peer is met without waiting: what is posted before it has answered stands in line. A peer that has
no room for us, or for which there is no room here, is called again for as long as C17 allows.
Nothing here looks at a row.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from tep.backends.base import LATER, SHORT, Batch, Status
from tep.backends.common import STRONG, HostRegion
from tep.backends.local.channel import (
    Address,
    Channel,
    Control,
    Hello,
    Refused,
    Said,
    Share,
    Unshare,
    Watches,
    Welcome,
    close_all,
    is_bell,
    why,
)
from tep.backends.local.copying import Target, can_reach, open_memory
from tep.backends.local.memory import COPYING, LaneWriter, SharedMap, Witness
from tep.backends.local.port import (
    ASLEEP,
    BOARD,
    MAGIC,
    PORT_BYTES,
    PROOF,
    READABLE,
    REGIONS,
    SLOTS,
    TABLE,
    UNWRITABLE,
)
from tep.memory.source import Memory

__all__ = ["Line", "Outbound", "Segment", "Way"]

_NEWS: Final = select.EPOLLIN | select.EPOLLRDHUP
_AGAIN_S: Final = 0.02
_pwrite: Final = os.pwrite
_TARGETS_MAX: Final = 4096  # regions of one peer that are remembered


class Way(Enum):
    """The states of the way to a peer."""

    ASKING = auto()  # it has not answered yet
    UP = auto()
    GONE = auto()  # for good: an address is never used again


@dataclass(slots=True, eq=False)
class Segment:
    """Rows `at` to `stop` of a batch, in line; `moved` bytes of row `at` are there already."""

    batch: Batch
    at: int
    stop: int
    moved: int = 0


Line = deque[Segment]
"""Rows of one peer that wait, in order."""


class Outbound:
    """The way to one peer.

    Attributes:
        why: in words, once the way is gone or restricted.
        pid: of the peer's process, or 0 where the kernel does not let us write there.
        memory: a descriptor of its memory, for put(); -1 = none.
        targets: the peer's regions that were used before, by key; see target().
        line, reads: rows that wait, in order.
        letters: messages that wait for room in the lane: payload, ctx.
        board: the word of the peer's port that our tail goes to.
        open: ctx of the messages in the lane, in order.
        controls: control messages that wait for room in the socket, with their ctx.
        unrung: bytes of the row list at the head of the line that were shown without a bell.

    Args:
        sender: our own address.
        patience_s: how long to call a peer that cannot answer, or for which there is no room here.
        lost: called when the way has ended, except by release(); or when nobody has let us in for
            so long: then what stands in line has to fail, and what comes later is tried anew.
    """

    def __init__(
        self,
        address: Address,
        sender: bytes,
        name: str,
        watches: Watches,
        fence: Callable[[], None],
        patience_s: float,
        lost: Callable[[Outbound], None],
    ) -> None:
        self.address = address
        self.way = Way.ASKING
        self.why = ""
        self.pid = 0
        self.memory = -1
        self.lane: LaneWriter  # what it reads from us; there once we have called
        self.words: memoryview  # of its port, once it is UP
        self.line: Line = deque()
        self.reads: Line = deque()
        self.letters: deque[tuple[bytes, int]] = deque()
        self.open: deque[int] = deque()
        self.controls: deque[tuple[Control, int]] = deque()
        self.unrung = 0
        self._name, self._sender = name, sender
        self._watches = watches
        self._fence = fence
        self._patience_s = patience_s
        self._lost = lost
        self._channel: Channel | None = None
        self._port: SharedMap | None = None
        self._peer_bell = -1
        self._pidfd = -1
        self._called = False  # there is a lane
        self._again_s = 0.0  # when to call again
        self._until_s = 0.0  # when to stop calling; 0: not tried yet
        self._witness = 0
        self._waits = False  # something could not be said
        self.board = 0
        self.targets: dict[int, Target] = {}
        self._shares: dict[int, tuple[Share, SharedMap]] = {}

    # --- the way there

    def ask(self) -> None:
        """Knock at the peer's socket, unless that is done already, or was just now in vain."""
        if self._channel is not None or self.way is not Way.ASKING:
            return
        now_s = time.monotonic()
        if now_s < self._again_s:
            return
        if not self._until_s:
            self._until_s = now_s + self._patience_s
        try:
            self._knock()
        except OSError as error:
            if error.errno in LATER:  # its queue of callers is full
                self._call_again(f"it cannot be called: {why(error.errno or 0)}")
            else:
                self.end(f"nobody listens there ({why(error.errno or 0)})")

    def _knock(self) -> None:
        if not self._called:
            self.lane = LaneWriter(self._fence)
            self._called = True
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            sock.connect(self.address.socket)
            self._watches.add(sock.fileno(), self._hear, _NEWS)
        except OSError:
            sock.close()
            raise
        self._channel = Channel(sock)
        hello = Hello(self.address.token, self._name, self._sender)
        self._channel.say(hello, self.lane.fd, self._watches.bell)

    def _call_again(self, reason: str) -> None:
        """It did not work this time: hang up, and try again soon, or give up what is in line."""
        if self._channel is not None:
            self._watches.drop(self._channel.fd)
            self._channel.close()
            self._channel = None
        now_s = time.monotonic()
        if now_s < self._until_s:
            self._again_s = now_s + _AGAIN_S
            self._watches.wake_in(_AGAIN_S)
        else:
            self.why = f"for {self._patience_s} s: {reason}"
            self._again_s = self._until_s = 0.0
            self._lost(self)

    def _hear(self) -> None:
        channel = self._channel
        if channel is None:
            return
        channel.flush()
        for said, fds in channel.hear():
            if channel is not self._channel:  # hung up on account of what came before
                close_all(fds)
                continue
            match said:
                case Welcome() if self.way is Way.ASKING and len(fds) == 2:
                    self._enter(channel, said, fds)
                case Welcome() if self.way is Way.ASKING and not fds:
                    self._call_again(f"its answer had no room here: {why(errno.EMFILE)}")
                case Share() if len(fds) == 1:
                    self._share(said, fds[0])
                case Unshare():
                    self._unshare(said.number)
                case Refused():
                    self.end(f"it refused: {said.why}")
                case _:
                    close_all(fds)
        if not channel.open and channel is self._channel:
            self._hung_up()

    def _hung_up(self) -> None:
        if self.way is Way.UP:
            self.end("its process ended, or closed its engine")
        elif self.way is Way.ASKING:  # it ended, which the next call tells; or had no room for us
            self._call_again(
                "it hangs up; it may have no descriptors or memory left (ulimit -n, ulimit -v)"
            )

    def _enter(self, channel: Channel, welcome: Welcome, fds: list[int]) -> None:
        port_fd, bell = fds
        try:
            if welcome.slot >= SLOTS or not is_bell(bell):
                raise OSError(errno.EPROTO, "its answer makes no sense")
            port = SharedMap(port_fd, PORT_BYTES)
        except OSError as error:
            os.close(bell)
            if error.errno in SHORT:
                self._call_again(f"its memory cannot be mapped: {why(error.errno or 0)}")
            else:
                self.end(f"its memory cannot be mapped: {error}")
            return
        finally:
            os.close(port_fd)
        self._port, self._peer_bell, self.words = port, bell, port.words
        if self.words[0] != MAGIC:
            self.end("its port is of another version of tep; run the same release in both")
            return
        close_all([self.lane.fd])  # it has it now
        self.lane.fd = -1
        pid, proof = channel.peer_pid, bytes(self.words[PROOF : PROOF + 2])
        self.board = BOARD + 2 * welcome.slot
        self._witness = Witness.byte(welcome.witness, welcome.slot)
        code = can_reach(pid, welcome.witness, proof) if pid else errno.ESRCH
        self.pid = 0 if code else pid
        self.memory = -1 if code else open_memory(pid, welcome.witness, proof)
        if code:
            self.why = f"process_vm_readv of process {pid or self.address.pid}: {why(code)}"
        self._pidfd = self._watches.add_process(pid, lambda: self.end("its process ended"))
        self.way = Way.UP

    def end(self, reason: str) -> None:
        """There is no way any more."""
        if self.way is Way.GONE:
            return
        self.way = Way.GONE
        self.why = reason
        if self._channel is not None:
            self._watches.drop(self._channel.fd)
        if self._pidfd >= 0:
            self._watches.drop(self._pidfd)
        self.release()
        self._lost(self)

    def release(self) -> None:
        """Let go of descriptors and mappings. Idempotent."""
        self.way = Way.GONE
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        close_all([self._peer_bell, self._pidfd, self.memory])
        self._peer_bell = self._pidfd = self.memory = -1
        self.targets.clear()
        for _, found in self._shares.values():
            found.close()
        self._shares.clear()
        if self._port is not None:
            self._port.close()
            self._port = None
        if self._called:
            close_all([self.lane.fd])
            self.lane.fd = -1
            self.lane.close()

    def try_say(self, what: Said) -> bool:
        """Say something at once; False = it has to wait, and room in the socket wakes us."""
        channel = self._channel
        if channel is None:  # nobody has taken our call yet
            return False
        said = channel.try_say(what)
        if not channel.open:
            self._hung_up()
        elif said == self._waits:
            self._waits = not said
            self._watches.epoll.modify(channel.fd, _NEWS | (0 if said else select.EPOLLOUT))
        return said

    # --- what lies there

    def target(self, key: int, *, reads: bool) -> Target | None:
        """The peer's region of this key, which may be written, or read; else None.

        What changed since is found at the copy: begin_copy().
        """
        allowed = key & READABLE if reads else not key & UNWRITABLE
        return (self.targets.get(key) or self._find(key)) if allowed else None

    def _find(self, key: int) -> Target | None:
        if self.way is not Way.UP:
            return None
        word = TABLE + 4 * (key & REGIONS - 1)
        if not key or self.words[word] != key:
            return None
        self._fence()
        base, nbytes, share = self.words[word + 1 : word + 4].tolist()
        if self.words[word] != key or base + nbytes > 2**64:
            return None
        mapped = self._mapped(share, base, nbytes) if share else None
        if self.way is not Way.UP:
            return None
        if len(self.targets) >= _TARGETS_MAX:
            self.targets.clear()
        found = Target(key, word, base, nbytes, mapped, self._witness)
        if not share or mapped is not None:  # else it may still come
            self.targets[key] = found
        return found

    def begin_copy(self, target: Target) -> bool:
        """Announce a copy; False = the key was withdrawn. See `memory`, rule 2."""
        self.lane.words[COPYING] = 1
        self._fence()
        if self.words[target.word] == target.key:
            return True
        self.lane.words[COPYING] = 0
        self.targets.pop(target.key, None)
        return False

    def without_key(self) -> Status:
        """The status of a row whose key does not hold: perhaps the peer has closed."""
        self._watches.look()
        return Status.REMOTE_KEY if self.way is Way.UP else Status.UNREACHABLE

    def _mapped(self, number: int, base: int, nbytes: int) -> HostRegion | None:
        if number not in self._shares:
            self._hear()  # the descriptor was sent before the key was published
        found = self._shares.get(number)
        if found is None:
            return None
        share, mapping = found
        offset = base - share.address
        if not 0 <= offset <= mapping.nbytes - nbytes:
            self.end(f"{nbytes} bytes at {offset} of a shared memory of {mapping.nbytes}")
            return None
        return HostRegion(
            Memory(mapping.address + offset, nbytes, "cpu", False, mapping), base, writable=True
        )

    def _share(self, share: Share, fd: int) -> None:
        try:
            if share.number not in self._shares:
                self._shares[share.number] = share, SharedMap(fd, share.nbytes, populate=True)
        except (OSError, ValueError, OverflowError):
            pass  # not mapped: it is written through the kernel
        finally:
            os.close(fd)

    def _unshare(self, number: int) -> None:
        found = self._shares.pop(number, None)
        if found is not None:
            self.targets.clear()
            found[1].close()

    def put(self, data: memoryview, dst: int) -> bool:
        """Write a short row into the peer's memory, once there is `memory`; False: not all of it.

        For one row this takes half of the time of process_vm_writev, which looks the process up,
        and asks whether we may, in each call. Whoever gets False has to find out why by that one.
        """
        try:
            if _pwrite(self.memory, data, dst) == len(data):
                return True
        except (OSError, OverflowError):
            pass
        os.close(self.memory)
        self.memory = -1
        return False

    # --- telling it

    def publish(self, *, ring: bool = True) -> None:
        """Let the peer see what was put into the lane, and wake it if it sleeps."""
        words, lane = self.words, self.lane
        if not STRONG:
            self._fence()
        words[self.board] = lane.tail
        words[self.board + 1] = lane.mtail
        if not ring:
            return
        self._fence()
        if words[ASLEEP]:
            words[ASLEEP] = 0
            with contextlib.suppress(OSError):  # rung 2**64 times: it is ringing still
                os.eventfd_write(self._peer_bell, 1)
