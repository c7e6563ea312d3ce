"""The receiving half of a local NIC: its port's memory, who writes to it, what arrives.

The port's memory is made by its owner and mapped by every sender:

    word    field     written by   content
    0       magic     owner        MAGIC
    8       asleep    both         1: ring my bell after publishing a tail; whoever rings clears it
    16      proof     owner        u64[2], random: a sender that reads the same through the kernel
                                   knows that it reaches the right process
    64      board     senders      u64[1024][2]: tail and mtail of the sender in that slot
    4096    table     owner        u64[65536][4]: key or 0, address, length, arena or 0

Rule 1: a table entry's key is written last and withdrawn first. Rule 2: after a key is withdrawn,
nobody writes under it: `withdraw` waits until no sender is in the middle of a copy that may have
begun before. Nothing here is posted or completed at a sender.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from tep.backends.base import Status
from tep.backends.hostcopy import HostRegion
from tep.backends.local.address import Address
from tep.backends.local.channel import (
    Channel,
    Hello,
    Note,
    Refused,
    Share,
    Unshare,
    Welcome,
    close_all,
)
from tep.backends.local.memory import Arena, SharedMap, arena_of, new_memfd
from tep.backends.local.rings import LaneReader
from tep.errors import BackendUnavailable, FabricError

__all__ = [
    "ASLEEP",
    "BOARD",
    "MAGIC",
    "PORT_BYTES",
    "PROOF",
    "REGIONS",
    "TABLE",
    "Inbound",
    "Port",
    "Watches",
]

MAGIC: Final = 0x9047_5445_5001
ASLEEP: Final = 8
PROOF: Final = 16
BOARD: Final = 64
TABLE: Final = 4096
SLOTS: Final = 1024
REGIONS: Final = 65536
PORT_BYTES: Final = 8 * (TABLE + 4 * REGIONS)

_BACKLOG: Final = 1024
_PAUSE_S: Final = 20e-6


class Watches:
    """The descriptors of one NIC, in one epoll set, and who is told of their events."""

    def __init__(self) -> None:
        self.epoll = select.epoll()
        self._poll = self.epoll.poll
        self._told: dict[int, Callable[[], None]] = {}

    def add(self, fd: int, told: Callable[[], None], events: int = select.EPOLLIN) -> None:
        """Watch a descriptor."""
        self.epoll.register(fd, events)
        self._told[fd] = told

    def add_bell(self, fd: int) -> None:
        """Watch an eventfd that nobody reads: each ring is one edge, and taken back by look()."""
        self.epoll.register(fd, select.EPOLLIN | select.EPOLLET)

    def drop(self, fd: int) -> None:
        """Watch it no more; before it is closed."""
        if self._told.pop(fd, None) is not None:
            self.epoll.unregister(fd)

    def look(self) -> bool:
        """Tell everybody whose descriptor has news; whether there was any."""
        found = self._poll(0)
        for fd, _ in found:
            told = self._told.get(fd)  # None: a bell, or dropped on account of another just now
            if told is not None:
                told()
        return bool(found)


@dataclass(slots=True, eq=False)
class Inbound:
    """One sender.

    Attributes:
        channel: to it.
        slot: on the board.
        tails: its two words there.
        lane: its memory; None until it has said Hello.
        bell: its eventfd.
        pidfd: readable once its process is dead, even if a forked child holds its socket; or -1.
        gone: it will write no more; what it wrote is still taken.
    """

    channel: Channel
    slot: int
    tails: memoryview
    lane: LaneReader | None = None
    bell: int = -1
    pidfd: int = -1
    gone: bool = False


class Port:
    """What the senders of one NIC see.

    Attributes:
        words: of the port's memory.
        ready: senders with something to take.
        pool: receive buffers.

    Args:
        note: called with the bytes of each note that arrives, and its sender's address.

    Raises:
        BackendUnavailable: no socket, or no shared memory.
    """

    def __init__(
        self,
        address: Address,
        watches: Watches,
        bell: int,
        fence: Callable[[], None],
        note: Callable[[bytes, bytes], None],
    ) -> None:
        self._note = note
        self._address = address
        self._watches = watches
        self._bell = bell
        self._fence = fence
        try:
            self._fd = new_memfd("tep-port", PORT_BYTES)
            self._map = SharedMap(self._fd, PORT_BYTES)
            self._listener = socket.socket(
                socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK
            )
            self._listener.bind(address.socket)
            self._listener.listen(_BACKLOG)
        except OSError as error:
            what = f"shared memory and a UNIX socket for {address}"
            raise BackendUnavailable("the local backend cannot start", ((what, str(error)),)) from (
                error
            )
        self.words = self._map.words
        self.words[PROOF] = int.from_bytes(os.urandom(8), "little")
        self.words[PROOF + 1] = int.from_bytes(os.urandom(8), "little")
        self.words[0] = MAGIC
        self._proof_at = self._map.address + 8 * PROOF
        self.ready: dict[Inbound, None] = {}
        self.starved: dict[Inbound, None] = {}
        self._inbounds: dict[int, Inbound] = {}  # by slot
        self._free_slots = list(range(SLOTS - 1, -1, -1))
        self._board = self.words[BOARD:BOARD]
        self._seen = b""
        self._regions: dict[int, tuple[int, Arena | None]] = {}
        self._free_regions: deque[int] = deque()
        self._regions_used = 0
        self._serial = int.from_bytes(os.urandom(5), "little") << 6
        self._shared: dict[Arena, int] = {}
        watches.add(self._listener.fileno(), self._accept)

    # --- regions

    def grant(self, region: HostRegion) -> int:
        """Let senders write to a region; return its key."""
        if self._free_regions:
            index = self._free_regions.popleft()
        elif self._regions_used < REGIONS - 1:  # the last one stays empty: see new_key()
            index = self._regions_used
            self._regions_used += 1
        else:
            raise FabricError(
                f"local NIC: {REGIONS - 1} regions are registered, and no more can be; register "
                "larger ones and select pages with offsets"
            )
        arena = arena_of(region.origin, region.nbytes)
        if arena is not None:
            self._shared[arena] = self._shared.get(arena, 0) + 1
            if self._shared[arena] == 1:
                for inbound in self._inbounds.values():
                    self._share(inbound, arena)
        key = self.new_key(index)
        at = TABLE + 4 * index
        self.words[at + 1] = region.origin
        self.words[at + 2] = region.nbytes
        self.words[at + 3] = 0 if arena is None else arena.number
        self._fence()
        self.words[at] = key
        self._regions[key] = index, arena
        return key

    def new_key(self, index: int = REGIONS - 1) -> int:
        """A key that was never used; by default one under which nobody can write."""
        self._serial = self._serial + 1 & 2**46 - 1
        return (self._serial or 1) << 16 | index

    def withdraw(self, key: int, timeout_s: float) -> None:
        """Let nobody write under a key any more; what is being written is finished first.

        Raises:
            FabricError: a sender has stopped in the middle of a copy, for longer than timeout_s.
        """
        found = self._regions.pop(key, None)
        if found is None:
            return
        index, arena = found
        self.words[TABLE + 4 * index] = 0
        if arena is not None:
            self._shared[arena] -= 1
            if not self._shared[arena]:
                del self._shared[arena]
                for inbound in self._inbounds.values():
                    inbound.channel.say(Unshare(arena.number))
        self._await_copies(timeout_s)
        self._free_regions.append(index)

    def _await_copies(self, timeout_s: float) -> None:
        self._fence()
        deadline_s = 0.0
        for inbound in list(self._inbounds.values()):
            while inbound.lane is not None and not inbound.gone and inbound.lane.copying:
                now_s = time.monotonic()
                deadline_s = deadline_s or now_s + timeout_s
                if now_s > deadline_s:
                    raise FabricError(
                        f"local NIC: process {inbound.channel.peer_pid} has been in the middle of "
                        f"a write here for {timeout_s} s (stopped by a signal?): the memory must "
                        "not be used for anything else yet",
                        code=Status.PROVIDER.name,
                    )
                time.sleep(_PAUSE_S)
                self._watches.look()  # or it died

    def _share(self, inbound: Inbound, arena: Arena) -> None:
        inbound.channel.say(Share(arena.number, arena.address, arena.nbytes), arena.fd)

    # --- senders

    def _accept(self) -> None:
        while self._free_slots:
            try:
                sock, _ = self._listener.accept()
            except OSError:  # nobody more, or no descriptor left: they wait
                return
            sock.setblocking(False)
            slot = self._free_slots.pop()
            at = BOARD + 2 * slot
            inbound = Inbound(Channel(sock), slot, self.words[at : at + 2])
            self._inbounds[inbound.slot] = inbound
            self._watches.add(
                inbound.channel.fd,
                lambda inbound=inbound: self._hear(inbound),  # type: ignore[misc]  # bound now
                select.EPOLLIN | select.EPOLLRDHUP,
            )
            self._hear(inbound)

    def _hear(self, inbound: Inbound) -> None:
        inbound.channel.flush()
        for said, fds in inbound.channel.hear():
            if isinstance(said, Hello) and inbound.lane is None and len(fds) == 2:
                self._welcome(inbound, said, fds)
            elif isinstance(said, Note) and inbound.lane is not None and not fds:
                self._note(said.payload, said.sender)
            else:
                close_all(fds)
        if not inbound.channel.open:
            self._lose(inbound)

    def _welcome(self, inbound: Inbound, hello: Hello, fds: list[int]) -> None:
        channel = inbound.channel
        lane_fd, inbound.bell = fds
        try:
            if hello.token != self._address.token:
                raise OSError("the address is of another NIC or another incarnation")
            inbound.lane = LaneReader(lane_fd, self._fence)
        except OSError as error:
            channel.say(Refused(str(error)))
            channel.open = False
            return
        finally:
            os.close(lane_fd)
        inbound.tails[0] = inbound.tails[1] = 0
        self._seen = b""  # else the slot's last sender and this one could publish the same tail
        if 2 * inbound.slot >= len(self._board):
            self._board = self.words[BOARD : BOARD + 2 * inbound.slot + 2]
        self._watch_process(inbound)
        channel.say(Welcome(inbound.slot, self._proof_at), self._fd, self._bell)
        for arena in self._shared:
            self._share(inbound, arena)

    def _watch_process(self, inbound: Inbound) -> None:
        try:
            inbound.pidfd = os.pidfd_open(inbound.channel.peer_pid)
        except (OSError, AttributeError):  # cannot be named here: its socket will have to tell
            return
        self._watches.add(inbound.pidfd, lambda: self._lose(inbound))

    def _lose(self, inbound: Inbound) -> None:
        """A sender is gone: stop watching it; its slot is free once what it wrote is taken."""
        if inbound.gone:
            return
        inbound.gone = True
        self._watches.drop(inbound.channel.fd)
        if inbound.pidfd >= 0:
            self._watches.drop(inbound.pidfd)
        self.scan()
        self.ready[inbound] = None  # the last look; then drop() is called

    def drop(self, inbound: Inbound) -> None:
        """Forget a sender that is gone and of whom everything has been taken."""
        if self._inbounds.pop(inbound.slot, None) is None:
            return
        self.ready.pop(inbound, None)
        self.starved.pop(inbound, None)
        inbound.tails[0] = inbound.tails[1] = 0
        self._release(inbound)
        self._free_slots.append(inbound.slot)
        self._accept()  # somebody may have waited for the slot

    def _release(self, inbound: Inbound) -> None:
        inbound.channel.close()
        close_all([fd for fd in (inbound.bell, inbound.pidfd) if fd >= 0])
        inbound.tails.release()
        if inbound.lane is not None:
            inbound.lane.close()
            inbound.lane = None

    def scan(self) -> Mapping[Inbound, None]:
        """Find senders that published something new; return who is ready."""
        now = self._board.tobytes()
        if now != self._seen:
            # The bytes are a hint, since a block copy may tear; the words are read one by one.
            self._seen = now
            for inbound in self._inbounds.values():
                lane = inbound.lane
                if lane is not None:
                    tail, mtail = inbound.tails.tolist()
                    if tail != lane.tail or mtail != lane.mtail:
                        lane.tail, lane.mtail = tail, mtail
                        self.ready[inbound] = None
        return self.ready

    def unseen(self) -> bool:
        """Whether the board has changed since the last scan."""
        return self._board.tobytes() != self._seen

    # --- ends

    def close(self, timeout_s: float) -> None:
        """Be unreachable from now on; what is being written is finished first."""
        for key in self._regions:
            self.words[TABLE + 4 * (key & REGIONS - 1)] = 0
        self._regions.clear()
        try:
            self._await_copies(timeout_s)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Let go of everything here, saying nothing: a close without manners, or a forked child."""
        self.ready.clear()
        self.starved.clear()
        self._listener.close()
        for inbound in self._inbounds.values():
            self._release(inbound)
        self._inbounds.clear()
        self._board.release()
        self._map.close()
        close_all([self._fd])
