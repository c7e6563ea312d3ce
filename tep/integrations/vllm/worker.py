"""One worker's half of the connector, without vLLM: loads from, and sends to, other KV caches.

The engine's thread answers other workers, also while vLLM is between two steps.
"""

from __future__ import annotations

import logging
import time
from typing import Final

import msgspec

from tep import (
    BadDescriptor,
    BusyError,
    ClosedError,
    NetAddr,
    PeerChange,
    PeerEvent,
    PeerState,
    PeerWatch,
    StaleEpoch,
    UsageError,
    WaitTimeout,
)
from tep.apps.kvcache import KvBlocks
from tep.integrations.vllm.holds import Holds
from tep.integrations.vllm.loads import Loads, mark_here
from tep.integrations.vllm.terms import Orders, Report, Step, Terms, Told, Want, decode, encode

__all__ = ["Worker"]

logger = logging.getLogger(__name__)

_PAUSE_S: Final = 0.0005


class Worker:
    """The execution of the scheduler's orders in one worker.

    Args:
        blocks: its cache, with all tensors; the cache and its engine are this worker's alone.

    Attributes:
        steps: the steps of the orders that were executed last.
    """

    def __init__(self, blocks: KvBlocks, terms: Terms = Terms()) -> None:
        blocks.name_by_address()  # requests bring addresses
        self._blocks, self._terms = blocks, terms
        self._process = mark_here()
        self.holds = Holds(blocks, terms, self._meet)
        self.loads = Loads(blocks, terms, self._meet)
        self.steps: list[Step] = []
        self._strangers: dict[tuple[str, int], NetAddr] = {}
        self._watches: dict[tuple[str, int], PeerWatch | None] = {}
        blocks.on_note(self._on_note)
        blocks.engine.on_peer(self._on_peer)

    @property
    def address(self) -> bytes:
        return self._blocks.engine.main_address.to_bytes()

    def stop(self, orders: Orders) -> set[str]:
        """Stop preempted requests before a step; return those still being read, to ask again."""
        with self._blocks.lock:
            return {request for request in orders.stops if not self.holds.stop(request)}

    def stop_all(self, orders: Orders) -> None:
        """Wait until no NIC reads blocks of preempted requests.

        Raises:
            WaitTimeout: one still does after `load_s`; this worker cannot go on.
        """
        late_s = time.monotonic() + self._terms.load_s
        while left := self.stop(orders):
            if time.monotonic() > late_s:
                raise WaitTimeout(
                    f"after load_s={self._terms.load_s:g} s a NIC still reads blocks of preempted "
                    f"requests, to be used for others: {', '.join(sorted(left))}. Restart "
                    f"this worker.\n{self._blocks.engine.stall_report()}"
                )
            time.sleep(_PAUSE_S)

    def obey(self, orders: Orders) -> None:
        """Begin a step: execute all orders but `stops`."""
        with self._blocks.lock:
            for step in orders.steps:
                self.holds.step(step)
            for hold in orders.holds:
                self.holds.hold(hold)
            for request, key in orders.ends.items():
                if key:
                    self.holds.end(request, key)
                else:
                    self.loads.end(request)
            self.loads.keep(orders.keeps)
            for source in orders.drops:
                self.loads.drop(source)
            self.steps = orders.steps
        for order in orders.loads:
            self.loads.start(order)

    def layer_saved(self, layer: int, steps: list[Step] | None = None) -> None:
        """Note a computed layer of this step, or of an earlier one."""
        with self._blocks.lock:
            for step in self.steps if steps is None else steps:
                self.holds.layer_saved(step, layer)

    def poll(self) -> Report:
        """Report the results since the last call; also repeat messages and check timeouts."""
        for who, addr in tuple(self._strangers.items()):
            del self._strangers[who]
            if who not in self._watches:  # else notes have come meanwhile
                self._watch(addr)
        for who, watch in tuple(self._watches.items()):
            if watch is not None and watch.state is not PeerState.ALIVE:
                self._lost(*who)  # also for transfers that began after it was lost
                if watch.state is PeerState.RESTARTED:
                    del self._watches[who]
                elif self.loads.has_successor(*who):
                    self.loads.dead(*who)
                    self._blocks.engine.remove_peer(watch.peer)
                    del self._watches[who]
        report = Report(sent=self.holds.poll())
        self.loads.poll(report)
        return report

    def _on_note(self, peer: NetAddr, body: bytes) -> None:
        try:
            note = decode(body)
        except BadDescriptor:
            return
        if isinstance(note, Told):
            self.loads.answered(peer, note)
            return
        # Answers have numbers below 0, so that they differ from our Wants'.
        try:
            answer = self.holds.answer(peer, note)
        except Exception as error:  # noqa: BLE001  # the decoder must get an answer
            answer = _no_answer(peer, note, error)
        answer = msgspec.structs.replace(answer, process=self._process)
        self._blocks.send_note(peer, ~note.number, encode(answer))

    def _meet(self, addr: NetAddr) -> None:
        """Watch an engine from the next poll on; watch_peer() waits for the engine's thread."""
        if (addr.name, addr.epoch) not in self._watches:
            self._strangers[addr.name, addr.epoch] = addr

    def _watch(self, addr: NetAddr) -> None:
        who, terms = (addr.name, addr.epoch), self._terms
        try:
            self._watches[who] = self._blocks.engine.watch_peer(
                addr, every_s=terms.beat_s, lost_after_s=terms.lost_after_s
            )
        except StaleEpoch:
            self._lost(*who)
        except ClosedError:
            pass  # it is being removed, having never answered; its next answer comes here again
        except (BusyError, UsageError) as error:
            # Transfers with a peer that cannot be watched end at their deadlines.
            logger.warning("%s is not watched: %s", addr.name, error)
            self._watches[who] = None

    def _lost(self, name: str, epoch: int) -> None:
        with self._blocks.lock:
            self.holds.lost(name, epoch)
            self.loads.lost(name, epoch)

    def _on_peer(self, event: PeerEvent) -> None:
        if event.kind in {PeerChange.LOST, PeerChange.RESTARTED}:
            self._lost(event.peer, event.epoch)


def _no_answer(peer: NetAddr, want: Want, error: Exception) -> Told:
    """Answer a decoder after a bug here."""
    logger.error("no answer to %s (%s)", peer.name, want.kind, exc_info=error)
    return Told(want.number, want.key, "gone", f"{type(error).__name__}: {error}"[:1000])
