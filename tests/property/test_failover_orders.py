"""A NIC dies at any point, and events come in any order: every case of a few rows is tried.

What must come out each time: the transfer is done, each count is reached exactly once, with its
bytes, and nobody writes to memory whose reader was released or reads a source that was given back.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from unittest import mock

import numpy as np
import pytest

from tep.api import Pages, Routing, ScatterDst
from tep.testing.explore import Choices
from tests.support.orders import Fabric, every

PAGE = 8
IMM = 7


class Play:
    """One transfer in one order.

    Attributes:
        made_good: rows that were posted on a NIC that died.
    """

    def __init__(
        self, chooser: Choices, kind: str, rows: int, nics: tuple[int, int], doomed: tuple[int, ...]
    ) -> None:
        fabric = Fabric(chooser, nics, doomed)
        a, b = fabric.engines
        nbytes = 0 if kind == "barrier" else rows * PAGE
        self.source = np.arange(1, rows * PAGE + 1, dtype=np.uint8)
        self.sent = self.source.copy()
        self.target = np.zeros(rows * PAGE, np.uint8)
        self.fired = 0
        mr, _ = a.reg_mr(self.source)
        _, desc = b.reg_mr(self.target)
        imms = list(range(IMM, IMM + rows)) if kind == "imms" else [IMM]
        each = 1 if kind == "imms" else rows
        for k, imm in enumerate(imms if kind != "silent" else []):
            which = slice(k * PAGE, (k + 1) * PAGE) if kind == "imms" else slice(0, nbytes)
            b.expect_imm_count(imm, each, on_done=lambda _, which=which: self._reached(which))
        pages = Pages(range(rows))
        sends: dict[str, Callable] = {
            "page": lambda: a.submit_paged_writes(PAGE, (mr, pages), (desc, pages), IMM),
            "imms": lambda: a.submit_paged_writes(PAGE, (mr, pages), (desc, pages), imms),
            "silent": lambda: a.submit_paged_writes(PAGE, (mr, pages), (desc, pages)),
            "single": lambda: a.submit_single_write(
                nbytes, (mr, 0), (desc, 0), IMM, routing=Routing(num_shards=rows)
            ),
            "scatter": lambda: a.submit_scatter(
                mr, [ScatterDst(PAGE, k * PAGE, (desc, k * PAGE)) for k in range(rows)], IMM
            ),
            "barrier": lambda: a.submit_barrier([desc] * rows, IMM),
        }
        transfer = sends[kind]()
        transfer.add_done_callback(lambda _: self.source.fill(0xDD))  # it is free, and used
        fabric.run()

        assert transfer.ok, transfer.error
        if kind == "silent":
            assert list(self.sent) == list(self.target)
        else:
            assert len(imms) == self.fired, "a count was never reached"
            done_with = set() if kind == "barrier" else {0xEE}
            assert done_with == set(self.target[:nbytes].tolist()), "written to after its release"
        assert () == b.stats().imms_unexpected, "an immediate came twice"
        assert (False, False) == (a._machine.busy(), b._machine.busy())
        stats = transfer.stats()
        assert stats.rows_posted == stats.rows_back == stats.rows + stats.rows_again
        self.made_good = a._worker.failover.rows
        a.close()
        b.close()

    def _reached(self, which: slice) -> None:
        assert list(self.target[which]) == list(self.sent[which]), "fired before its bytes came"
        self.fired += 1
        self.target[which] = 0xEE  # the reader is through, and writes there


def in_every_order(kind: str, rows: int, nics: tuple[int, int], doomed: tuple[int, ...]) -> int:
    """Play all orders; return how many there were."""
    plays = [Play(chooser, kind, rows, nics, doomed) for chooser in every()]
    assert any(play.made_good for play in plays), "nothing was ever lost"
    return len(plays)


KINDS = ("page", "imms", "silent", "single", "scatter", "barrier")


@pytest.mark.parametrize("kind", KINDS)
def test_two_rows_and_any_nic_of_either_side(kind: str) -> None:
    """An immediate twice releases the next reader early, one that is missing hangs this one."""
    assert 100 < in_every_order(kind, 2, (2, 2), (0, 1, 2, 3))


@pytest.mark.parametrize(("nics", "doomed"), [((2, 1), (0, 1)), ((1, 2), (1, 2)), ((2, 3), (2,))])
def test_sides_with_different_numbers_of_nics(nics, doomed) -> None:
    """Where one lane's end dies, all lanes that share the end are in doubt."""
    assert 30 < in_every_order("page", 2, nics, doomed)


def test_a_machine_that_stalls_plays_the_same_orders() -> None:
    """Where a slow machine asks twice, its orders are others, and the odometer misses some."""
    quick = in_every_order("page", 2, (2, 1), (0, 1))
    with mock.patch("tep.drivers.time.monotonic", side_effect=count(step=5)):
        assert quick == in_every_order("page", 2, (2, 1), (0, 1))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["page", "imms", "silent", "scatter"])
@pytest.mark.parametrize("doomed", [(0,), (1,), (2,), (3,)])
def test_three_rows_and_any_nic_of_either_side(kind: str, doomed) -> None:
    """Two rows on one lane: of equal rows nobody can say which one landed."""
    assert 1000 < in_every_order(kind, 3, (2, 2), doomed)


@pytest.mark.slow
def test_three_rows_of_one_kind_and_one_nic() -> None:
    """The same in little, for every run of the suite."""
    assert 1000 < in_every_order("page", 3, (2, 2), (0,))
