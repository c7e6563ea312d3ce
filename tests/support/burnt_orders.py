"""Two transfers under one immediate, and one expectation of both, in any order. Not a test.

What must come out each time:
 1. The expectation ends, whenever it is stated and whatever gets lost: done if both transfers are.
 2. When it is done all bytes of both transfers are there, and nothing changes them afterwards.
 3. Once a transfer has failed or was cancelled, its sender takes nothing under the immediate; once
    the receiver knows, no expectation of it is done.
 4. When nothing is on its way any more, both ends may remove the immediate and use it again, even
    if a copy of an old notice comes late.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial

import numpy as np

from tep.base.api import Pages, Routing
from tep.base.errors import BurntImm, FabricError
from tep.core.handles import Expectation, Transfer
from tests.support.inside import worker_of
from tests.support.orders import Fabric
from tests.world.explore import Choices

__all__ = ["Play"]

PAGE = 8
IMM = 7
FREED = 0xEE
WAITS_MAX = 60


class Play:
    """Transfers of node a to node b, and b's expectations, in one order.

    Args:
        chooser: chooses the order.
        nics: numbers of NICs of both engines.
        doomed: one of these NICs dies, numbered over both engines; empty: none.
        rows: rows of each transfer.
        cancels: number of transfers that are cancelled, at any moment.
        cuts: number of cuts of the path between two NICs, each until nothing else can happen.
        pinned: True: all goes over the first NIC of a.
        failover: True: the sender retries lost rows.
        reuse: True: the immediate is used again in the end; only if no row fails, since such
            a row may still be in flight.
        knobs: losses, copies, flush and depth, see `Fabric`.

    Attributes:
        ends: the results of the transfers and of the expectations.
    """

    def __init__(
        self,
        chooser: Choices,
        nics: tuple[int, int],
        *doomed: int,
        rows: int = 1,
        cancels: int = 0,
        cuts: int = 0,
        pinned: bool = False,
        failover: bool = True,
        reuse: bool = False,
        **knobs: int,
    ) -> None:
        self.fabric = fabric = Fabric(chooser, nics, doomed, **knobs)
        fabric.more, fabric.state = self._more, self._state
        worker_of(fabric.engines[0]).group.failover = failover
        self.lanes = [(x, y) for x in fabric.nics[: nics[0]] for y in fabric.nics[nics[0] :]]
        self.rows, self.cancels, self.cuts, self.reuse = rows, cancels, cuts, reuse
        self.routing = Routing(domain=0) if pinned else Routing()
        self.sent: list[Transfer] = []
        self.targets: list[np.ndarray] = []
        self.got: list[Expectation] = []
        self.used: set[int] = set()
        self.refused = 0
        self.wrong: list[str] = []
        self._send()
        fabric.run()
        self._check()

    # ------------------------------------------------------------------ what applications do

    def _send(self) -> None:
        a, b = self.fabric.engines
        number = len(self.targets)
        self.fabric.note(0, ("send", number))
        self.fabric.note(1, ("target", number))
        self.targets.append(np.zeros(self.rows * PAGE, np.uint8))
        mr, _ = a.reg_mr(np.full(self.rows * PAGE, number + 1, np.uint8))
        _, desc = b.reg_mr(self.targets[-1])
        pages = Pages(range(self.rows))
        burnt = any(sent.finished and not sent.ok for sent in self.sent) and number < 2
        try:
            sent = a.submit_paged_writes(
                PAGE, (mr, pages), (desc, pages), IMM, routing=self.routing
            )
        except BurntImm:
            assert burnt, "refused, and nothing under its immediate had failed"
            self.refused += 1
        else:
            assert not burnt, "taken, and another under its immediate had failed"
            self.sent.append(sent)

    def _expect(self, first: int, n: int) -> None:
        """State the expectation of n transfers."""
        self.fabric.note(1, ("expect", n))
        got = self.fabric.engines[1].expect_imm_count(IMM, n * self.rows)
        self.got.append(got)
        got.add_done_callback(partial(self._reached, range(first, first + n)))

    def _reached(self, numbers: range, got: Expectation) -> None:
        if not got.ok:
            known = isinstance(got.error, FabricError) and got.error.code == "PEER_FAILED"
            if not known:
                self.wrong.append(f"an expectation failed: {got.error!r}")
            return
        if IMM in worker_of(self.fabric.engines[1]).imms.burnt.why:
            self.wrong.append("an expectation of a burnt immediate is done")
        for number in numbers:
            target = self.targets[number] if number < len(self.targets) else np.zeros(1)
            if {number + 1} != set(target.tolist()):
                self.wrong.append(f"done without all bytes of transfer {number}")
            target[:] = FREED  # the reader is through, and writes there
            self.used.add(number)

    def _again(self) -> None:
        """Use the immediate again: nothing is on its way but copies of old messages."""
        self.reuse, self.cancels = False, 0
        for owner, engine in enumerate(self.fabric.engines):
            self.fabric.note(owner, "remove")
            engine.remove_imm(IMM)
        self._send()
        self._expect(2, 1)

    # ------------------------------------------------------------------ what else may happen

    def _more(self) -> list[Callable[[], None]]:
        assert not self.wrong, self.wrong  # engines catch what their callbacks raise
        fabric, found = self.fabric, []
        out = any(not flight.ended for flight in fabric.flights)
        live = [n for n, sent in enumerate(self.sent) if not sent.finished]
        if self.cuts and out:
            found += [partial(self._cut, lane) for lane in self.lanes if lane not in fabric.cuts]
        if self.cancels:
            found += [partial(self._cancel, number) for number in live]
        if len(self.targets) < 2:
            found.append(self._send)
        if not self.got:
            found.append(partial(self._expect, 0, 2))
        ended = len(self.targets) > 1 and self.got and not live and self.got[-1].finished
        told = not worker_of(fabric.engines[0]).notices.describe()
        sure = all(ctx is None for _, _, _, ctx in fabric.controls)
        if self.reuse and ended and told and sure:
            found.append(self._again)
        if not (found or out or fabric.controls or fabric.fences):
            if fabric.cuts:
                found.append(fabric.cuts.clear)
            elif not ended or not told:
                found.append(self._wait)
        return found

    def _cut(self, lane: tuple) -> None:
        self.cuts -= 1
        self.fabric.cuts.add(lane)

    def _cancel(self, number: int) -> None:
        self.cancels -= 1
        self.fabric.note(0, ("cancel", number))
        self.sent[number].cancel()

    def _wait(self) -> None:
        """Nothing is left to do, and a question or a notice is repeated."""
        fabric = self.fabric
        fabric.now_s += 1.0
        assert fabric.now_s < WAITS_MAX, f"nothing goes on: {self.sent} {self.got}"
        for owner in range(2):
            fabric.note(owner, "wait")

    def _state(self) -> Hashable:
        return self.cancels, self.cuts, self.reuse, self.refused, len(self.targets), len(self.got)

    # ------------------------------------------------------------------ what must come out

    def _check(self) -> None:
        assert not self.wrong, self.wrong
        assert all(handle.finished for handle in (*self.sent, *self.got)), (self.sent, self.got)
        both, *later = self.got
        if len(self.sent) >= 2 and not self.refused and all(sent.ok for sent in self.sent[:2]):
            assert both.ok, f"both are done, and their count is not: {both}"
        assert all(got.ok for got in later), f"used again in vain: {later}"
        assert all(sent.ok for sent in self.sent[2:]), self.sent
        for number in self.used:
            assert {FREED} == set(self.targets[number].tolist()), "written to after its release"
        self.ends = tuple(handle.state.value for handle in (*self.sent, *self.got))
        for engine in self.fabric.engines:
            engine.close()
