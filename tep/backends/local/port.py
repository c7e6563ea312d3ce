"""The receiving half of a local NIC: its port's memory, who writes to it, what arrives.

The port's memory is made by its owner and mapped by every sender:

    word    field     written by   content
    0       magic     owner        MAGIC
    8       asleep    both         1: ring my bell after publishing a tail; whoever rings clears it
    16      proof     owner        u64[2], random: a sender that reads the same in the witness
                                   (see `memory`) knows that it reaches the right process
    64      board     senders      u64[1024][2]: tail and mtail of the sender in that slot
    4096    table     owner        u64[65536][4]: key or 0, address, length, arena or 0

Whoever has connected and not said Hello yet is a *caller*: it needs no token, so callers are few,
have little time, and give their descriptors back first. A peer that is hung up on calls again.

A key says what it allows: bit 62 is set where peers may read, bit 63 where they may not write.

Rule 1: a table entry's key is written last and withdrawn first. Rule 2: after a key is withdrawn,
nobody writes or reads under it: `withdraw` waits until no sender is in the middle of a copy that
may have begun before. Nothing here is posted or completed at a sender.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import resource
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from tep.backends.base import SHORT, Status
from tep.backends.common import HostRegion
from tep.backends.local.channel import (
    Address,
    Channel,
    Control,
    Hello,
    Refused,
    Share,
    Unshare,
    Watches,
    Welcome,
    close_all,
    is_bell,
    why,
)
from tep.backends.local.memory import (
    EVENTS,
    MESSAGES_BYTES,
    Arena,
    LaneReader,
    SharedMap,
    Witness,
    arena_of,
    new_memfd,
)
from tep.base.errors import BackendUnavailable, FabricError

__all__ = [
    "ASLEEP", "BOARD", "MAGIC", "PORT_BYTES", "PROOF", "READABLE", "REGIONS", "SLOTS", "TABLE",
    "UNWRITABLE", "Inbound", "Port",
]  # fmt: skip

MAGIC: Final = 0x9047_5445_5003
ASLEEP: Final = 8
PROOF: Final = 16
BOARD: Final = 64
TABLE: Final = 4096
SLOTS: Final = 1024
REGIONS: Final = 65536
READABLE: Final = 1 << 62
UNWRITABLE: Final = 1 << 63
PORT_BYTES: Final = 8 * (TABLE + 4 * REGIONS)

_log = logging.getLogger("tep")

_BACKLOG: Final = 1024
_CALLERS_MAX: Final = 64
_CALLER_S: Final = 1.0
_HEARD_MAX: Final = 64  # of one sender, in one go
_PAUSE_S: Final = 20e-6


@dataclass(slots=True, eq=False)
class Inbound:
    """One sender.

    Attributes:
        tails: its two words on the board.
        lane: its memory; None once it is dropped.
        bell: its eventfd.
        sender: address of its NIC.
        may_map: whether the kernel would let its user write here, and so do we with alloc_shared().
        pidfd: readable once its process is dead, even if a forked child holds its socket; or -1.
        gone: it will write no more; what it wrote is still taken.
    """

    channel: Channel
    slot: int
    tails: memoryview
    lane: LaneReader | None
    bell: int
    sender: bytes
    may_map: bool
    pidfd: int = -1
    gone: bool = False


class Port:
    """The side of one NIC that its senders see.

    Attributes:
        words: of the port's memory.
        ready: senders with something to take.
        callers: who has not said Hello, and until when it may be silent; the oldest first.

    Args:
        control: called with each control message that arrives, and its sender's address.
    """

    def __init__(
        self,
        address: Address,
        watches: Watches,
        fence: Callable[[], None],
        control: Callable[[bytes, bytes], None],
    ) -> None:
        self._control = control
        self._address = address
        self._watches = watches
        self._fence = fence
        proof = os.urandom(16)
        with contextlib.ExitStack() as undo:
            try:
                self._fd = new_memfd("tep-port", PORT_BYTES)
                undo.callback(os.close, self._fd)
                self._map = SharedMap(self._fd, PORT_BYTES)
                undo.callback(self._map.close)
                self._witness = Witness(proof)
                undo.callback(self._witness.close)
                self._spare = os.dup(watches.bell)
                undo.callback(lambda: close_all([self._spare]))
                self._listener = socket.socket(
                    socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK
                )
                undo.callback(self._listener.close)
                self._listener.bind(address.socket)
                self._listener.listen(_BACKLOG)
                watches.add(self._listener.fileno(), self._accept)
            except OSError as error:
                what = f"shared memory and a UNIX socket for {address}"
                raise BackendUnavailable(
                    "the local backend cannot start", ((what, why(error.errno or 0)),)
                ) from error
            self._let_go = undo.pop_all().close
        self.words = self._map.words
        self.words[PROOF : PROOF + 2] = memoryview(proof).cast("Q")
        self.words[0] = MAGIC
        self.callers: dict[Channel, float] = {}
        self._short = False  # of descriptors, as far as is known
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._callers_max = max(1, min(_CALLERS_MAX, limit // 16))
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

    # --- regions

    def grant(self, region: HostRegion, *, readable: bool) -> int:
        """Let senders write to a region, where it is `writable`, and read it; return its key."""
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
        key = self.new_key(index) | (READABLE if readable else 0)
        key |= 0 if region.writable else UNWRITABLE
        at = TABLE + 4 * index
        self.words[at + 1] = region.origin
        self.words[at + 2] = region.nbytes
        self.words[at + 3] = 0 if arena is None else arena.number
        self._fence()
        self.words[at] = key
        self._regions[key] = index, arena
        return key

    def new_key(self, index: int = REGIONS - 1) -> int:
        """A key that was never used; by default one under which nobody can write or read."""
        self._serial = self._serial + 1 & 2**46 - 1
        return (self._serial or 1) << 16 | index

    def withdraw(self, key: int, timeout_s: float) -> None:
        """Let nobody write or read under a key any more; copies under way are finished first.

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
                        f"a copy here for {timeout_s} s (stopped by a signal?): the memory must "
                        "not be used for anything else yet",
                        code=Status.PROVIDER.name,
                    )
                time.sleep(_PAUSE_S)
                self._watches.look()  # or it died

    def _share(self, inbound: Inbound, arena: Arena) -> None:
        if inbound.may_map:
            share = Share(arena.number, arena.address, arena.nbytes)
            inbound.channel.say(share, arena.fd, owner=arena)

    # --- senders

    def _accept(self) -> None:
        for _ in range(_BACKLOG):
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:  # nobody more
                return
            except OSError as error:
                if error.errno not in SHORT:  # it has hung up already
                    continue
                if not self.callers:
                    self._turn_away_next()
                    return
                self._turn_away(next(iter(self.callers)))
                continue
            self._short = False
            sock.setblocking(False)
            if len(self.callers) >= self._callers_max:
                self._turn_away(next(iter(self.callers)))
            self._take_call(Channel(sock))

    def _take_call(self, channel: Channel) -> None:
        events = select.EPOLLIN | select.EPOLLRDHUP
        try:
            self._watches.add(channel.fd, lambda: self._meet(channel), events)
        except OSError:
            channel.close()
            return
        self.callers[channel] = time.monotonic() + _CALLER_S
        self._watches.wake_in(_CALLER_S)
        self._meet(channel)

    def _turn_away(self, channel: Channel) -> None:
        del self.callers[channel]
        self._watches.drop(channel.fd)
        channel.close()

    def _turn_away_next(self) -> None:
        """All descriptors are in use by others: hang up on who waits, or we are woken for ever."""
        if not self._short:
            self._short = True
            _log.warning("%s: no descriptor is left (ulimit -n): new peers wait", self._address)
        os.close(self._spare)
        with contextlib.suppress(OSError):
            self._listener.accept()[0].close()
        try:
            self._spare = os.dup(self._watches.bell)
        except OSError:  # another thread was quicker
            self._spare = -1

    def hang_up_on_silent(self) -> None:
        now_s = time.monotonic()
        for channel, until_s in list(self.callers.items()):
            if now_s < until_s:
                self._watches.wake_in(until_s - now_s)
                return
            self._turn_away(channel)

    def _meet(self, channel: Channel) -> None:
        """A caller has said something, or has hung up."""
        for said, fds in channel.hear(1):
            if not isinstance(said, Hello) or len(fds) != 2:
                close_all(fds)
            elif self._welcome(channel, said, fds):
                return
            channel.open = False
        if not channel.open:
            self._turn_away(channel)

    def _welcome(self, channel: Channel, hello: Hello, fds: list[int]) -> bool:
        """Take a caller for a sender; False = not, and its descriptors are closed."""
        lane_fd, bell = fds
        refusal, lane = "", None
        if not hmac.compare_digest(hello.token, self._address.token):
            refusal = "the address is of another NIC or another incarnation"
        elif not is_bell(bell):
            refusal = "its bell is no eventfd that does not block"
        elif self._free_slots:  # if there is none, it calls again
            try:
                lane = LaneReader(lane_fd, self._fence)
            except OSError as error:
                refusal = "" if error.errno in SHORT else str(error)
        os.close(lane_fd)
        if lane is None:
            os.close(bell)
            if refusal:
                channel.say(Refused(refusal))
            return False
        self._take_in(channel, lane, bell, hello.sender)
        return True

    def _take_in(self, channel: Channel, lane: LaneReader, bell: int, sender: bytes) -> None:
        del self.callers[channel]
        slot = self._free_slots.pop()
        at = BOARD + 2 * slot
        tails, may_map = self.words[at : at + 2], channel.may_write
        inbound = Inbound(channel, slot, tails, lane, bell, sender, may_map)
        self._inbounds[slot] = inbound
        inbound.tails[0] = inbound.tails[1] = 0
        self._seen = b""  # else the slot's last sender and this one could publish the same tail
        if 2 * slot >= len(self._board):
            self._board = self.words[BOARD : BOARD + 2 * slot + 2]
        self._watches.tell(channel.fd, lambda: self._hear(inbound))
        inbound.pidfd = self._watches.add_process(channel.peer_pid, lambda: self._lose(inbound))
        for arena in self._shared:  # before the answer: rows may come as soon as that is read
            self._share(inbound, arena)
        channel.say(Welcome(slot, self._witness.address), self._fd, self._watches.bell)
        self._hear(inbound)

    def _hear(self, inbound: Inbound) -> None:
        if inbound.gone:
            return
        inbound.channel.flush()
        for said, fds in inbound.channel.hear(_HEARD_MAX):
            if isinstance(said, Control) and not fds:
                self._control(said.payload, said.sender)
            else:
                close_all(fds)
        if not inbound.channel.open:
            self._lose(inbound)

    def _lose(self, inbound: Inbound) -> None:
        """A sender is gone; what it wrote is still taken."""
        self.scan()
        self.part(inbound)

    def part(self, inbound: Inbound) -> None:
        """Take nothing more of a sender: its slot is free once what was seen of it is taken."""
        if inbound.gone:
            return
        inbound.gone = True
        self._watches.drop(inbound.channel.fd)
        if inbound.pidfd >= 0:
            self._watches.drop(inbound.pidfd)
        self.ready[inbound] = None  # the last look; then drop() is called

    def drop(self, inbound: Inbound) -> None:
        """Forget a sender that is gone, once all that it sent has been taken."""
        if self._inbounds.pop(inbound.slot, None) is None:
            return
        self.ready.pop(inbound, None)
        self.starved.pop(inbound, None)
        inbound.tails[0] = inbound.tails[1] = 0
        self._release(inbound)
        self._free_slots.append(inbound.slot)

    def _release(self, inbound: Inbound) -> None:
        inbound.channel.close()
        close_all([inbound.bell, inbound.pidfd])
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
                if lane is not None and not inbound.gone:
                    tail, mtail = inbound.tails.tolist()
                    if tail == lane.tail and mtail == lane.mtail:
                        continue
                    if (
                        0 <= tail - lane.head <= EVENTS
                        and 0 <= mtail - lane.mhead <= MESSAGES_BYTES
                    ):
                        lane.tail, lane.mtail = tail, mtail
                        self.ready[inbound] = None
                    else:  # only a peer that is broken, or hostile, writes this
                        self.part(inbound)
        return self.ready

    def unseen(self) -> bool:
        return self._board.tobytes() != self._seen

    # --- ends

    def close(self, timeout_s: float) -> None:
        """Be unreachable from now on; copies under way are finished first."""
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
        for channel in self.callers:
            channel.close()
        self.callers.clear()
        for inbound in self._inbounds.values():
            self._release(inbound)
        self._inbounds.clear()
        self._board.release()
        self._let_go()
