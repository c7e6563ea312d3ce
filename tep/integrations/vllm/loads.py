"""The decoder's half of a worker: the loads that were ordered, and their results.

Rule 1: a load is reported when nothing can be written to its blocks any more, or, `doubt_s` after
it failed, as one in doubt: the scheduler keeps its blocks out of use until it is certain. Rule 2:
every load is reported once. Rule 3: the cache's lock guards all. Rule 4: a source is an address
that a request names; a prefiller is an engine that answers there, and only its own answers say
which process it is.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from tep import NetAddr, TepError
from tep.apps.kvcache import KvBlocks, KvLoad, KvReceiver, Patience
from tep.integrations.vllm.terms import Kind, Load, Report, Source, Terms, Told, Want, encode

__all__ = ["Loads", "has_ended", "mark_here"]

logger = logging.getLogger(__name__)

DROPS = 8
"""Number of times a prefiller is sent a drop that it does not answer."""


class _Ask:
    """A question to one prefiller's rank, repeated until it answers."""

    def __init__(self, addr: NetAddr, want: Want, began_s: float, tries: float) -> None:
        self.addr, self.want, self.began_s, self.tries = addr, want, began_s, tries
        self.told_s = -math.inf


class _Loading:
    def __init__(self, order: Load, load: KvLoad, asks: list[_Ask]) -> None:
        self.order, self.load, self.asks = order, load, asks
        self.failed_s = math.inf


class Loads:
    """All loads of one worker.

    Attributes:
        loading: the loads that have not been reported, by request.
        asks: the questions that have no answer yet, by number.
        done: number of successful loads.
    """

    def __init__(self, blocks: KvBlocks, terms: Terms, meet: Callable[[NetAddr], object]) -> None:
        patience = Patience(cancel_s=terms.beat_s, request_s=terms.load_s, linger_s=terms.doubt_s)
        self.receiver = KvReceiver(blocks, patience=patience)
        self._blocks, self._terms, self._meet = blocks, terms, meet
        self.loading: dict[str, _Loading] = {}
        self._doubtful: list[_Loading] = []
        self.asks: dict[int, _Ask] = {}
        self._keeps: dict[str, list[_Ask]] = {}
        self._strangers: set[NetAddr] = set()  # engines that were asked and have not answered yet
        self._marks: dict[tuple[str, int], str] = {}  # processes of prefillers' ranks
        self._dead: set[tuple[str, int]] = set()
        self._latest: dict[str, int] = {}  # latest epochs that answered, by the engine's own name
        self._gone: set[str] = set()
        self._refused: list[tuple[Load, str]] = []
        self._number = 0
        self.done = 0

    # ------------------------------------------------------------------ the scheduler's orders

    def start(self, order: Load) -> None:
        """Ask for blocks, and have the engines watched that have answered before."""
        source = order.source
        try:
            load = self.receiver.expect(source.key, order.blocks, timeout_s=self._terms.load_s)
        except TepError as error:
            self._refused.append((order, str(error)))
            return
        with self._blocks.lock:
            asks = self._ask(source, "load", load.ticket)
            self.loading[order.request] = _Loading(order, load, asks)
            if any((ask.addr.name, ask.addr.epoch) in self._dead for ask in asks):
                load.cancel("the prefiller is dead")  # it is asked all the same, in case it lives
        for ask in asks:
            if ask.addr not in self._strangers:
                self._meet(ask.addr)

    def keep(self, sources: Sequence[Source]) -> None:
        """Ask the given sources, and no others, to keep blocks that requests here will load."""
        wanted = {source.key: source for source in sources}
        for key in self._keeps.keys() - wanted.keys():
            for ask in self._keeps.pop(key):
                self.asks.pop(ask.want.number, None)
        for key in wanted.keys() - self._keeps.keys():
            self._keeps[key] = self._ask(wanted[key], "keep")

    def drop(self, source: Source) -> None:
        self._ask(source, "drop", tries=DROPS)

    def end(self, request: str) -> None:
        """Cancel an aborted request's load, if there is one."""
        if request in self.loading:
            self.loading[request].load.cancel("the request was aborted")

    # ------------------------------------------------------------------ prefillers

    def answered(self, peer: NetAddr, answer: Told) -> bool:
        """Take the answer of a prefiller's rank and have it watched; False: nobody had asked it."""
        ask = self.asks.get(answer.number)
        if ask is None or ask.addr != peer or ask.want.key != answer.key:
            return False
        who, name = (peer.name, peer.epoch), own_name(peer.name)
        self._dead.discard(who)
        self._latest[name] = max(peer.epoch, self._latest.get(name, 0))
        if answer.process:
            self._marks[who] = answer.process
        kind = ask.want.kind
        if answer.state == "card" and kind == "load":
            del self.asks[answer.number]
            self._number += 1  # a note with another body needs another number
            card = self._blocks.card()
            ask.want = msgspec.structs.replace(ask.want, number=self._number, card=card)
            self.asks[self._number] = ask
            self._say(ask)
        elif answer.state == "gone":
            self._give_up(ask, f"{peer.name}: {answer.reason}")
        elif answer.state == "taken" and kind == "load":
            del self.asks[answer.number]
        self._meet(peer)
        return True

    def has_successor(self, name: str, epoch: int) -> bool:
        """Return True if a later incarnation of a prefiller has answered."""
        return self._latest.get(own_name(name), 0) > epoch

    def dead(self, name: str, epoch: int) -> None:
        """Fence a prefiller that is certain to be dead: no write of it can arrive any more."""
        with self._blocks.lock:
            self._marks.pop((name, epoch), None)
            self._dead.add((name, epoch))
            self.lost(name, epoch)
            self.receiver.fenced(name, epoch)

    def lost(self, name: str, epoch: int) -> None:
        """Cancel loads from a prefiller that is lost or has restarted."""
        for one in tuple(self.loading.values()):
            if any(ask.addr.name == name and ask.addr.epoch <= epoch for ask in one.asks):
                one.load.cancel(f"prefiller {name} is lost")
        for ask in tuple(self.asks.values()):
            if ask.want.kind != "load" and (ask.addr.name, ask.addr.epoch <= epoch) == (name, True):
                self._give_up(ask, f"prefiller {name} is lost")

    # ------------------------------------------------------------------ time and results

    def poll(self, report: Report) -> None:
        """Repeat unanswered questions, and add the new results to a report."""
        self.receiver.poll()
        self._look_for_dead()
        with self._blocks.lock:
            now_s = self._now_s()
            self._look_at_strangers(now_s)
            for ask in tuple(self.asks.values()):
                if now_s - ask.told_s >= self._terms.beat_s:
                    self._say(ask)
            for one in tuple(self.loading.values()):
                self._look(one, now_s, report)
            refused, self._refused = self._refused, []
            for order, why in refused:
                logger.error("request %s was not loaded: %s", order.request, why)
                report.received.add(order.request)
                report.bad.update(block for group in order.blocks for block in group)
                report.failed.add(order.request)
            rank = self._blocks.rank
            for one in [one for one in self._doubtful if one.load.finished]:
                self._doubtful.remove(one)
                report.certain.setdefault(rank, set()).add(one.order.request)
            report.gone |= self._gone
            self._gone = set()

    def _look(self, one: _Loading, now_s: float, report: Report) -> None:
        load, request = one.load, one.order.request
        if load.state == "failed":
            one.failed_s = min(one.failed_s, now_s)
        if not load.finished and not now_s - one.failed_s >= self._terms.doubt_s:
            return
        del self.loading[request]
        for ask in one.asks:
            self.asks.pop(ask.want.number, None)
        report.received.add(request)
        self.done += load.ok
        if not load.finished:
            self._doubtful.append(one)
            report.failed.add(request)
            report.doubt.setdefault(self._blocks.rank, set()).add(request)
        elif not load.ok:
            report.bad.update(block for group in load.failed_blocks for block in group)
            if len(one.order.blocks) > 1:  # ids are unique in a group only
                report.failed.add(request)
        if not load.ok:
            logger.warning("request %s was not loaded: %s", request, load.reason)
            self.drop(one.order.source)

    def _look_for_dead(self) -> None:
        """Ask the system whether prefillers on this machine have ended, if a failed load waits."""
        waited = [one.load for one in (*self.loading.values(), *self._doubtful)]
        if not any(load.state in {"open", "failed"} for load in waited):
            return
        for who, mark in tuple(self._marks.items()):
            if has_ended(mark):
                self.dead(*who)

    def _look_at_strangers(self, now_s: float) -> None:
        """Give up engines that do not answer, or use another engine's address; forget them."""
        blocks, asked = self._blocks, set()
        for ask in tuple(self.asks.values()) if self._strangers else ():
            if ask.addr in self._strangers and not blocks.has_spoken(ask.addr):
                why = self._doubtful_address(ask.addr)
                if not why and now_s - ask.began_s >= self._terms.lost_after_s:
                    why = f"{ask.addr.name} has never answered"
                if why:
                    self._give_up(ask, why)
                else:
                    asked.add(ask.addr)
        for addr in self._strangers - asked:
            self._strangers.discard(addr)
            if not blocks.has_spoken(addr):
                blocks.engine.remove_peer(addr)

    def _doubtful_address(self, addr: NetAddr) -> str:
        other = self._blocks.other_at(addr)
        return "" if other is None else f"{addr.name} is said to be where {other.name} is"

    def _give_up(self, ask: _Ask, why: str) -> None:
        """End a question whose prefiller has nothing for it."""
        self.asks.pop(ask.want.number, None)
        if ask.want.kind == "keep":
            self._gone.add(ask.want.key)
        for one in tuple(self.loading.values()):
            if ask in one.asks:
                one.load.cancel(why)

    def _ask(
        self, source: Source, kind: Kind, ticket: bytes = b"", tries: float = math.inf
    ) -> list[_Ask]:
        found = []
        for raw in source.ranks:
            addr = self._blocks.named(NetAddr.from_bytes(raw))
            self._number += 1
            want = Want(self._number, source.key, kind, source.early, b"", ticket)
            ask = self.asks[self._number] = _Ask(addr, want, self._now_s(), tries)
            found.append(ask)
            if not self._blocks.has_spoken(addr):
                self._strangers.add(addr)
            self._say(ask)
        return found

    def _say(self, ask: _Ask) -> None:
        ask.told_s = self._now_s()
        ask.tries -= 1
        if ask.addr in self._strangers and self._doubtful_address(ask.addr):
            return  # the next poll gives it up
        self._blocks.send_note(ask.addr, ask.want.number, encode(ask.want))
        if ask.tries <= 0:
            self.asks.pop(ask.want.number, None)

    def _now_s(self) -> float:
        return self._blocks.engine.driver.now_s()


def own_name(name: str) -> str:
    """Return a peer's own name; see `NetAddr.by_address`."""
    return name.rpartition("~")[0]


# ------------------------------------------------------------------ proof of a process's end

# A mark names boot, pid namespace, pid and start of a process. It proves that a process of this
# machine has ended, which its silence would not; about processes of other machines and namespaces
# nothing can be said.


def mark_here() -> str:
    """Return the mark of this process; "" if the system does not say."""
    pid = os.getpid()
    start = _start(pid)
    place = _place()
    return f"{place}:{pid}:{start}" if place and start else ""


def has_ended(mark: str) -> bool:
    """Return True if a marked process is certain to have ended."""
    place, _, rest = mark.rpartition(":")
    place, _, pid = place.rpartition(":")
    if not (place and place == _place() and pid.isascii() and pid.isdigit() and len(pid) <= 10):
        return False
    return _start(int(pid)) != rest


def _place() -> str:
    """Return the boot and the pid namespace of this process."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{Path('/proc/self/ns/pid').readlink()}".replace(":", "")
    except OSError:
        return ""


def _start(pid: int) -> str:
    """Return a process's start, in ticks since boot; "" if there is none, or only a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return ""
    fields = stat[stat.rindex(b")") + 2 :].split()
    state, threads, start = fields[0], int(fields[17]), fields[19].decode()
    return "" if state in {b"Z", b"X"} and threads <= 1 else start
