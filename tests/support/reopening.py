"""Transfers over paths that are cut, fenced off, healed and taken into use again. Not a test.

What must come out each time: a transfer that is done has its count reached exactly once, with its
bytes, no row lands where its reader was released, and in the end every path carries rows again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable
from functools import partial

import numpy as np

from tep.base.api import Pages
from tep.core.handles import Expectation, Transfer
from tep.core.path import Link
from tests.support.inside import peers_of, worker_of
from tests.support.orders import Fabric, Nic
from tests.world.explore import Choices

PAGE = 8
IMM = 7
FREED = 0xEE


class Play:
    """Transfers over paths, some of them cut for a while.

    Args:
        chooser: chooses the order.
        nics: numbers of NICs of both engines.
        rows: rows of each transfer.
        rounds: number of transfers of each sender, one after the other; one more follows when no
            path is cut any more.
        both: True: the second engine writes to the first as well.
        cuts: number of cuts of a path; each time another may be cut, two at once at the most.
        copies: number of messages that come a second time, at any later moment.

    Attributes:
        made_good: rows that a path took with it.
        failed: transfers that failed.
    """

    def __init__(
        self,
        chooser: Choices,
        nics: tuple[int, int] = (1, 2),
        *,
        rows: int = 2,
        rounds: int = 1,
        both: bool = False,
        cuts: int = 1,
        copies: int = 0,
    ) -> None:
        self.fabric = fabric = Fabric(chooser, nics, ())
        self.engines = fabric.engines
        here, there = fabric.nics[: nics[0]], fabric.nics[nics[0] :]
        self.lanes = [(ours, theirs) for ours in here for theirs in there]
        self.lanes += [(theirs, ours) for ours, theirs in self.lanes] if both else []
        self.rows, self.rounds = rows, rounds
        self.ways = 2 if both else 1
        self.cuts, self.copies = cuts, copies
        self.imms: list[int] = []
        self.kept: list[tuple[Nic, bytes, bytes]] = []
        self.fired: list[int] = []
        self.sent: list[Transfer] = []
        self.targets: list[np.ndarray] = []
        fabric.more, fabric.state = self._more, self._state
        self._send()
        fabric.run()
        self._check()

    def _state(self) -> Hashable:
        late = tuple((self.fabric.nics.index(nic), payload) for nic, payload, _ in self.kept)
        return self.cuts, self.copies, len(self.sent), late

    def _send(self) -> None:
        lost = sum(not sent.ok for sent in self.sent)
        for way in range(self.ways):
            self.fabric.note(way, ("send", len(self.sent), lost))
            self.fabric.note(1 - way, ("expect", len(self.sent), lost))
            a, b = self.engines[way], self.engines[1 - way]
            number = len(self.sent)
            mr, _ = a.reg_mr(np.full(self.rows * PAGE, number + 1, np.uint8))
            self.targets.append(np.zeros(self.rows * PAGE, np.uint8))
            _, desc = b.reg_mr(self.targets[-1])
            self.imms.append(IMM + number)
            imm, pages = self.imms[-1], Pages(range(self.rows))
            b.expect_imm_count(imm, self.rows, on_done=partial(self._reached, number))
            self.sent.append(a.submit_paged_writes(PAGE, (mr, pages), (desc, pages), imm))

    def _reached(self, number: int, got: Expectation) -> None:
        if not got.ok:
            return  # the engine is being closed
        target = self.targets[number]
        assert {number + 1} == set(target.tolist()), "fired before its bytes came"
        self.fired.append(number)
        target[:] = FREED  # the reader is through, and writes there

    def _links(self) -> list[Link]:
        return [link for engine in self.engines for link in peers_of(engine).links.values()]

    def _more(self) -> list[Callable[[], None]]:
        """Return the events that may happen beside the fabric's own."""
        fabric, links = self.fabric, self._links()
        found: list[Callable[[], None]] = []
        out = any(not flight.ended for flight in fabric.flights)
        shut = any(link.closed for link in links)
        if self.cuts and out and len(fabric.cuts) < 2:
            found += [partial(self._cut, lane) for lane in self.lanes]
        if fabric.cuts and shut:
            found.append(fabric.cuts.clear)
        if self.copies and fabric.controls:
            found.append(self._copy)
        found += [self._late] * bool(self.kept)
        if not (found or fabric.controls or fabric.fences or out):
            if fabric.cuts:
                found.append(fabric.cuts.clear)
            elif shut or not all(all(link.alive) for link in links):
                found.append(self._wait)
            elif len(self.sent) <= self.rounds * self.ways:
                self.cuts *= len(self.sent) < self.rounds * self.ways  # the last goes without
                found.append(self._send)
        return found

    def _cut(self, lane: tuple) -> None:
        self.cuts -= 1
        self.fabric.cuts.add(lane)

    def _copy(self) -> None:
        """Keep a copy of a message that is on its way."""
        self.copies -= 1
        _, there, payload, _ = self.fabric.controls[-1]
        self.kept.append((there, payload, self.fabric.controls[-1][0].address))

    def _late(self) -> None:
        """The oldest copy comes."""
        there, payload, address = self.kept.pop(0)
        there.push_control(payload, address)

    def _wait(self) -> None:
        self.fabric.now_s += 1.0
        for owner in range(2):
            self.fabric.note(owner, "wait")
        assert self.fabric.now_s < 200, "a path was never taken into use again"

    def _check(self) -> None:
        assert all(sent.finished for sent in self.sent), self.sent
        assert (self.rounds + 1) * self.ways == len(self.sent)
        for sent in self.sent[-self.ways :]:
            assert sent.ok, f"nothing was wrong any more: {sent.error}"
            assert 0 == sent.stats().rows_again, "a path was used that is still shut"
        done = [k for k, sent in enumerate(self.sent) if sent.ok]
        self.failed = len(self.sent) - len(done)
        wrong = [str(s.error) for s in self.sent if re.search("cannot be|has pruned", str(s.error))]
        assert not wrong, f"the sums of both ends do not belong together: {wrong}"
        assert set(done) <= set(self.fired), "a count was never reached"
        assert len(set(self.fired)) == len(self.fired), "a count was reached twice"
        for number in self.fired:
            assert {FREED} == set(self.targets[number].tolist()), "written to after its release"
        for link in self._links():
            assert not link.closed, "a path is not used again"
            assert all(link.alive), "a NIC is not used again"
        self.made_good = 0
        for engine in self.engines:
            for imm, _ in engine.stats().imms_unexpected:
                failed = [self.imms[k] for k, sent in enumerate(self.sent) if not sent.ok]
                assert imm in failed, "an immediate came twice"
            self.made_good += worker_of(engine).failover.rows
            engine.close()


__all__ = ["Play"]
