"""Transfers whose NIC dies or whose path is cut, in whatever order events come. Not a test.

What must come out each time:
 1. A transfer ends; it is done unless it was cancelled, or nobody can say what became of another
    one under its immediate. After one that was not done, the next round takes fresh immediates.
 2. When it is done its bytes are there. A reader is released when all immediates have come that
    were announced; then all bytes are there, and nobody writes there again.
 3. As many immediates come as the done transfers have rows, and of the others no more than theirs.
 4. A source that was given back is not read again.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable
from functools import partial

import numpy as np

from tep.base.api import Pages, Routing, ScatterDst
from tep.core.handles import Transfer
from tep.core.path import Link
from tests.support.inside import machine_of, peers_of, worker_of
from tests.support.orders import Fabric
from tests.world.explore import Choices

__all__ = ["KINDS", "Play"]

PAGE = 8
IMM = 7
FREED = 0xEE
WAITS_MAX = 40
FRESH = 16
"""The distance between the immediates of two rounds, if something failed."""

_BESIDE = re.compile("are of failed requests|another request|failed on that path before")
"""A transfer fails so because another one under its immediate has."""

KINDS = ("page", "imms", "silent", "single", "scatter", "barrier")


class Play:
    """Transfers of node a to node b, in one order.

    Args:
        chooser: chooses the order.
        kind: one of KINDS.
        rows: rows of each transfer.
        nics: numbers of NICs of both engines.
        doomed: one of these NICs dies, numbered over both engines; empty: none.
        rounds: transfers, one after the other, under one immediate as long as none fails.
        sharing: transfers of each round, which are in flight together.
        cancels: number of transfers that are cancelled, at any moment.
        cuts: number of cuts of the path between two NICs, one at a time.
        heal: True: cuts end when nothing else can happen, and paths are reopened before the
            next round.
        restarts: number of crashes of the sender; it goes on with the next round.
        knobs: losses, copies and flush, see `Fabric`.

    Attributes:
        made_good: rows that were posted on a path that died.
        ends: the results of the transfers.
    """

    def __init__(
        self,
        chooser: Choices,
        kind: str,
        rows: int,
        nics: tuple[int, int],
        doomed: tuple[int, ...] = (),
        *,
        rounds: int = 1,
        sharing: int = 1,
        cancels: int = 0,
        cuts: int = 0,
        heal: bool = False,
        restarts: int = 0,
        **knobs: int,
    ) -> None:
        self.kind, self.rows = kind, rows
        self.rounds, self.sharing, self.heal = rounds, sharing, heal
        self.cancels, self.cuts, self.restarts = cancels, cuts, restarts
        self.fabric = fabric = Fabric(chooser, nics, doomed, **knobs)
        fabric.more, fabric.state = self._more, self._state
        self.lanes = [(x, y) for x in fabric.nics[: nics[0]] for y in fabric.nics[nics[0] :]]
        self.sent: list[Transfer] = []
        self.wrong: list[str] = []
        self.crashed: set[int] = set()
        self.met: Counter[int] = Counter()  # cuts, by the transfers that were open
        self.targets: list[np.ndarray] = []
        self.come: Counter[int] = Counter()
        self.imms: list[int] = []  # the first immediate of each transfer
        self.freed = 0
        b = fabric.engines[1]
        self.descs = []
        for _ in range(rounds * sharing):
            self.targets.append(np.zeros(rows * PAGE, np.uint8))
            self.descs.append(b.reg_mr(self.targets[-1])[1])
        b.on_imm(range(IMM, IMM + rounds * FRESH), self._arrived)
        self._round()
        fabric.run()
        self._check()

    # ------------------------------------------------------------------ what applications do

    def _round(self) -> None:
        a = self.fabric.engines[0]
        imm = self.imms[-1] if self.imms else IMM
        if self.crashed or any(map(self._has_failed, range(len(self.sent)))):
            imm += FRESH
        self.fabric.note(0, ("round", len(self.sent), imm))
        for _ in range(self.sharing):
            number = len(self.sent)
            self.imms.append(imm)
            source = np.full(self.rows * PAGE, number + 1, np.uint8)
            mr, _ = a.reg_mr(source)
            sent = self._submit(mr, self.descs[number], imm)
            self.sent.append(sent)
            sent.add_done_callback(partial(self._ended, number, source))

    def _submit(self, mr, desc, imm: int) -> Transfer:
        a, rows, nbytes = self.fabric.engines[0], self.rows, self.rows * PAGE
        pages, imms = Pages(range(rows)), list(range(imm, imm + rows))
        sends: dict[str, Callable] = {
            "page": lambda: a.submit_paged_writes(PAGE, (mr, pages), (desc, pages), imm),
            "imms": lambda: a.submit_paged_writes(PAGE, (mr, pages), (desc, pages), imms),
            "silent": lambda: a.submit_paged_writes(PAGE, (mr, pages), (desc, pages)),
            "single": lambda: a.submit_single_write(
                nbytes, (mr, 0), (desc, 0), imm, routing=Routing(num_shards=rows)
            ),
            "scatter": lambda: a.submit_scatter(
                mr, [ScatterDst(PAGE, k * PAGE, (desc, k * PAGE)) for k in range(rows)], imm
            ),
            "pinned": lambda: a.submit_single_write(
                nbytes, (mr, 0), (desc, 0), imm, routing=Routing(domain=0)
            ),
            "barrier": lambda: a.submit_barrier([desc] * rows, imm),
        }
        return sends[self.kind]()

    def _ended(self, number: int, source: np.ndarray, sent: Transfer) -> None:
        source.fill(0xDD)  # it is free, and used
        if sent.ok and not self._has(number):
            self.wrong.append("done before its bytes came")

    def _has(self, number: int, page: slice = slice(None)) -> bool:
        """Return True if the bytes of a transfer are there, or its reader has been released."""
        found = set(self.targets[number][page].tolist())
        return self.kind == "barrier" or found <= {number + 1, FREED}

    def _arrived(self, imm: int, count: int) -> None:
        self.come[imm] += count
        first = imm - (imm - IMM) % FRESH
        mine = [number for number, other in enumerate(self.imms) if other == first]
        if any(n in self.crashed or self._has_failed(n) for n in mine):
            return  # its receiver has been told, and counts no more
        page, due = slice(None), len(mine) * self.rows
        if self.kind == "imms":
            page, due = slice((imm - first) * PAGE, (imm - first + 1) * PAGE), len(mine)
        if self.come[imm] != due:
            return
        for number in mine:
            if not self._has(number, page):
                self.wrong.append("fired before its bytes came")
            self.targets[number][page] = FREED
        self.freed += 1

    def _has_failed(self, number: int) -> bool:
        return self.sent[number].finished and not self.sent[number].ok

    # ------------------------------------------------------------------ what else may happen

    def _more(self) -> list[Callable[[], None]]:
        assert not self.wrong, self.wrong  # engines catch what their callbacks raise
        fabric, found = self.fabric, []
        out = any(not flight.ended for flight in fabric.flights)
        live = [n for n, sent in enumerate(self.sent) if self._is_open(n) and not sent.finished]
        if self.cuts and out and not fabric.cuts:
            found += [partial(self._cut, lane) for lane in self.lanes]
        if self.cancels:
            found += [partial(self._cancel, number) for number in live]
        more = len(self.sent) < self.rounds * self.sharing
        if more and live and self.restarts:
            found.append(self._restart)
        shut = self.heal and any(link.closed or not all(link.alive) for link in self._links())
        if more and not live and not shut:
            found.append(self._round)
        if not (found or out or fabric.controls or fabric.fences):
            if fabric.cuts and self.heal:
                found.append(fabric.cuts.clear)
            elif live or (more and shut):
                found.append(self._wait)
        return found

    def _links(self) -> list[Link]:
        return [link for engine in self.fabric.engines for link in peers_of(engine).links.values()]

    def _is_open(self, number: int) -> bool:
        return number not in self.crashed

    def _cut(self, lane: tuple) -> None:
        self.cuts -= 1
        self.fabric.cuts.add(lane)
        self.met.update(n for n, sent in enumerate(self.sent) if not sent.finished)

    def _cancel(self, number: int) -> None:
        self.cancels -= 1
        self.fabric.note(0, ("cancel", number))
        self.sent[number].cancel()

    def _restart(self) -> None:
        self.restarts -= 1
        self.crashed |= {n for n, sent in enumerate(self.sent) if not sent.finished}
        self.fabric.restart(0)
        self._round()

    def _wait(self) -> None:
        """Nothing is left to do, and a question is repeated."""
        fabric = self.fabric
        fabric.now_s += 1.0
        assert fabric.now_s < WAITS_MAX, f"nothing goes on: {self.sent}"
        for owner in range(2):
            fabric.note(owner, "wait")

    def _state(self) -> Hashable:
        budgets = self.cancels, self.cuts, self.restarts, self.freed
        return budgets, len(self.sent), tuple(sorted(self.met.items()))

    # ------------------------------------------------------------------ what must come out

    def _check(self) -> None:
        a, b = self.fabric.engines
        lives = [sent for n, sent in enumerate(self.sent) if self._is_open(n)]
        self.ends = tuple("crashed" if n in self.crashed else sent.state.value
                          for n, sent in enumerate(self.sent))  # fmt: skip
        assert all(sent.finished for sent in lives), lives
        for number, sent in enumerate(self.sent):
            if not self._is_open(number):
                continue
            if sent.ok:
                assert self._has(number), f"done without its bytes: {self.targets}"
            elif sent.failed:
                hopeless = self.met[number] >= len(self.lanes)
                beside = any(end in ("failed", "cancelled") for end in self._beside(number))
                beside &= bool(_BESIDE.search(str(sent.error)))
                assert hopeless or beside, f"a path is left: {sent.error}"
            stats = sent.stats()
            assert stats.rows_back == stats.rows_posted
            if sent.ok:
                assert stats.rows_posted == stats.rows + stats.rows_again
        self._check_counts()
        assert (False, False) == (machine_of(a).busy(), machine_of(b).busy())
        self.made_good = worker_of(a).failover.rows
        a.close()
        b.close()

    def _beside(self, number: int) -> list[str]:
        """Return the results of the other transfers under its immediate."""
        ends = zip(self.ends, self.imms, strict=True)
        alike = [end for end, imm in ends if imm == self.imms[number]]
        alike.remove(self.ends[number])
        return alike

    def _check_counts(self) -> None:
        each = 1 if self.kind == "imms" else self.rows
        for first in dict.fromkeys(self.imms):
            ends = [end for end, imm in zip(self.ends, self.imms, strict=True) if imm == first]
            some = {"silent": [], "imms": range(first, first + self.rows)}.get(self.kind, [first])
            for imm in some:
                come, done = self.come[imm], ends.count("done")
                assert done * each <= come, f"imm {imm}: {come} came, of {done} done transfers"
                assert come <= len(ends) * each, f"imm {imm} came {come} times: once too often"
        if {"done"} == set(self.ends) and self.kind != "silent":
            assert self.freed, "a count was never reached"
            if self.kind != "barrier":
                assert all({FREED} == set(t.tolist()) for t in self.targets), (
                    "written to after its release"
                )
