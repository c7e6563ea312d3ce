"""The engine's share of the contract: subclass EngineContract, give it an `engines` fixture.

    import pytest
    import tep
    from tep.testing.contract_engine import EngineContract, OpenEngines

    class TestMyEngines(EngineContract):
        @pytest.fixture
        def engines(self):
            with OpenEngines(lambda: tep.TransferEngine.open("my_backend", nics=2)) as engines:
                yield engines

Here are the clauses that engine and backend keep together; what shows at the seam alone is in the
clauses_* rooms.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Self, TypeVar

import numpy as np
import numpy.typing as npt
import pytest

from tep.base.api import Barrier, Paged, Pages, Scatter, ScatterDst, Shape, Single
from tep.base.errors import BusyError, ClosedError, FabricError, StaleEpoch, TepError
from tep.base.wire import MrDesc, NetAddr
from tep.core.handles import Handle, Transfer
from tep.core.plan import count_imms
from tep.core.regions import MrHandle
from tep.engine import TransferEngine

__all__ = ["EngineContract", "Engines", "OpenEngines"]

E = TypeVar("E", bound=TepError)

_BLANK = 0x5A


class Engines:
    """The maker of one test's engines. Subclass it, or use OpenEngines.

    Attributes:
        timeout_s: time limit of a wait, on the engines' clock.
        can_restart: True if restart() works.
    """

    timeout_s: float = 30.0
    can_restart: bool = False

    def engine(self) -> TransferEngine:
        """Open an engine with two NICs that reaches all others of this test."""
        raise NotImplementedError

    def restart(self, engine: TransferEngine) -> TransferEngine:
        """End an engine, and open its next incarnation under the same name."""
        raise NotImplementedError

    def close(self) -> None:
        """Close all engines. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class OpenEngines(Engines):
    """Engines from a function that opens one.

    Args:
        open_engine: opens one under a name of its own.
        reopen: opens one under this name, whose former engine was closed; None: none can restart.
    """

    def __init__(
        self,
        open_engine: Callable[[], TransferEngine],
        reopen: Callable[[str], TransferEngine] | None = None,
    ) -> None:
        self._open_engine = open_engine
        self._reopen = reopen
        if reopen is not None:
            self.can_restart = True
        self.opened: list[TransferEngine] = []

    def engine(self) -> TransferEngine:
        found = self._open_engine()
        self.opened.append(found)
        return found

    def restart(self, engine: TransferEngine) -> TransferEngine:
        assert self._reopen is not None, "can_restart is False"
        engine.close()
        reborn = self._reopen(engine.name)
        self.opened.append(reborn)
        return reborn

    def close(self) -> None:
        for engine in reversed(self.opened):
            engine.close()


class _Memory:
    """One region of one engine."""

    def __init__(self, engine: TransferEngine, nbytes: int, *, noise: bool = False) -> None:
        self.bytes: npt.NDArray[np.uint8] = np.full(nbytes, _BLANK, np.uint8)
        if noise:
            self.bytes[:] = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
        self.mr: MrHandle
        self.mr, desc = engine.reg_mr(self.bytes)
        self.desc: MrDesc = MrDesc.from_bytes(desc.to_bytes())  # as it comes from a peer


def _raised(kind: type[E], call: Callable[[], object]) -> E | None:
    """Return the exception of that kind that a call raises, or None; others go through."""
    try:
        call()
    except kind as error:
        return error
    return None


def _until(
    done: Callable[[], bool], a: TransferEngine, b: TransferEngine, engines: Engines
) -> None:
    """Let engines turn until something has happened that no handle tells of."""
    target = _Memory(b, 1)
    for _ in range(1000):
        if done():
            return
        a.submit_barrier([target.desc], 77).wait(engines.timeout_s)
        b.expect_imm_count(77, 1).wait(engines.timeout_s)


class EngineContract:
    """A subclass named Test... gives the fixture `engines`."""

    def test_c03_a_request_larger_than_every_queue_goes_through(self, engines: Engines) -> None:
        """Back-pressure is the engine's to bear: rows wait, and none is lost or posted twice."""
        a, b = engines.engine(), engines.engine()
        n = 5000
        source, target = _Memory(a, 64 * n, noise=True), _Memory(b, 64 * n)
        order = np.random.default_rng(3).permutation(n)
        got = b.expect_imm_count(9, n)
        sent = a.submit_paged_writes(
            64, (source.mr, Pages(np.arange(n))), (target.desc, Pages(order)), 9
        )
        got.wait(engines.timeout_s)
        pages = target.bytes.reshape(n, 64)[order]
        sent.wait(engines.timeout_s)

        assert np.array_equal(source.bytes.reshape(n, 64), pages), "counted before the bytes came"
        assert 9 not in dict(b.stats().imms_unexpected)

    def test_c06_a_reached_count_means_all_bytes(self, engines: Engines) -> None:
        """The receiver learns of its data by the count alone, over all NICs together."""
        a, b = engines.engine(), engines.engine()
        for nbytes in (1, 4097, 1_000_001):
            source, target = _Memory(a, nbytes, noise=True), _Memory(b, nbytes)
            got = b.expect_imm_count(nbytes, count_imms(Single(nbytes), 2, 2))
            a.submit_single_write(nbytes, (source.mr, 0), (target.desc, 0), nbytes)
            got.wait(engines.timeout_s)
            assert np.array_equal(source.bytes, target.bytes), nbytes

    def test_c08_every_request_makes_the_immediates_it_says(self, engines: Engines) -> None:
        """The receiver asks count_imms() what to wait for; one more or less is a hang or a race."""
        a, b = engines.engine(), engines.engine()
        source, target = _Memory(a, 65536, noise=True), _Memory(b, 65536)
        page = Pages([0, 1, 2])
        slices = [ScatterDst(100, 0, (target.desc, 0))]
        asked: list[tuple[Shape, Transfer]] = [
            (Single(65536), a.submit_single_write(65536, (source.mr, 0), (target.desc, 0), 0)),
            (Paged(3), a.submit_paged_writes(64, (source.mr, page), (target.desc, page), 1)),
            (Scatter(100), a.submit_scatter(source.mr, slices, 2**32 - 1)),
            (Barrier(), a.submit_barrier([target.desc], 0x01020304)),
        ]
        for _, sent in asked:
            sent.wait(engines.timeout_s)
        for (shape, _), imm in zip(asked, (0, 1, 2**32 - 1, 0x01020304), strict=True):
            b.expect_imm_count(imm, count_imms(shape, 2, 2)).wait(engines.timeout_s)
            assert imm not in dict(b.stats().imms_unexpected), shape

    def test_c11_a_withdrawn_region_fails_the_transfer(self, engines: Engines) -> None:
        """The sender is told which peer and row; the receiver's count does not move."""
        a, b = engines.engine(), engines.engine()
        source, target = _Memory(a, 4096, noise=True), _Memory(b, 4096)
        b.deregister(target.mr)
        sent = a.submit_single_write(4096, (source.mr, 0), (target.desc, 0), 5)
        error = _raised(FabricError, lambda: sent.wait(engines.timeout_s))

        assert error is not None
        assert error.code not in ("", "OK", "FLUSHED")
        assert b.name in str(error)
        assert 5 not in dict(b.stats().imms_unexpected)
        assert (target.bytes == _BLANK).all()
        again = _Memory(b, 4096)
        a.submit_single_write(4096, (source.mr, 0), (again.desc, 0), 6).wait(engines.timeout_s)
        b.expect_imm_count(6, 1).wait(engines.timeout_s)

    def test_c13_an_older_epoch_is_refused(self, engines: Engines) -> None:
        """Old descriptors outlive a peer's restart, in queues and in other people's messages."""
        if not engines.can_restart:
            pytest.skip("these engines cannot restart")
        a, b = engines.engine(), engines.engine()
        source, target = _Memory(a, 4096, noise=True), _Memory(b, 4096)
        a.submit_single_write(64, (source.mr, 0), (target.desc, 0)).wait(engines.timeout_s)
        reborn = engines.restart(b)
        fresh = _Memory(reborn, 4096)

        # Before a has heard of the new incarnation, the rows find out.
        stale = a.submit_single_write(64, (source.mr, 0), (target.desc, 0), 7)
        assert _raised(FabricError, lambda: stale.wait(engines.timeout_s)) is not None
        assert (fresh.bytes == _BLANK).all()
        # Afterwards the engine refuses before anything is posted.
        a.submit_single_write(64, (source.mr, 0), (fresh.desc, 0), 8).wait(engines.timeout_s)
        error = _raised(
            StaleEpoch, lambda: a.submit_single_write(64, (source.mr, 0), (target.desc, 0), 7)
        )
        assert error is not None
        assert str(target.desc.addr.epoch) in str(error)
        reborn.expect_imm_count(8, 1).wait(engines.timeout_s)
        assert 7 not in dict(reborn.stats().imms_unexpected)

    def test_c13_addresses_survive_bytes(self, engines: Engines) -> None:
        """A published address must be readable in another process, by another Python."""
        a, b = engines.engine(), engines.engine()
        got: list[bytes] = []
        b.submit_recvs(256, 2, lambda view: got.append(bytes(view)))
        address = NetAddr.from_bytes(b.main_address.to_bytes())
        a.submit_send(address, b"hello").wait(engines.timeout_s)
        _until(lambda: bool(got), a, b, engines)

        assert b.main_address == address
        assert [b"hello"] == got

    def test_c14_close_settles_everything(self, engines: Engines) -> None:
        """A wait on a handle of a closed engine has to return."""
        a, b = engines.engine(), engines.engine()
        source, target = _Memory(a, 65536, noise=True), _Memory(b, 65536)
        pages = Pages(np.arange(64))
        handles: list[Handle] = [
            a.submit_paged_writes(1024, (source.mr, pages), (target.desc, pages), 3)
            for _ in range(20)
        ]
        handles.append(a.expect_imm_count(1, 1))
        handles.append(a.submit_send(b.main_address, b"no receive is posted"))
        a.close()

        assert all(handle.finished for handle in handles)
        assert not handles[-2].ok
        a.close()
        assert isinstance(_raised(TepError, handles[-2].result), ClosedError)

    def test_c15_a_closed_engine_refuses(self, engines: Engines) -> None:
        """An error at the call says whose fault it is; one from the depths does not."""
        a, b = engines.engine(), engines.engine()
        source, target = _Memory(a, 64, noise=True), _Memory(b, 64)
        page = Pages([0])
        a.close()
        calls: tuple[Callable[[], object], ...] = (
            lambda: a.submit_single_write(64, (source.mr, 0), (target.desc, 0)),
            lambda: a.submit_paged_writes(64, (source.mr, page), (target.desc, page)),
            lambda: a.submit_scatter(source.mr, [ScatterDst(64, 0, (target.desc, 0))]),
            lambda: a.submit_barrier([target.desc], 1),
            lambda: a.submit_send(b.main_address, b"x"),
            lambda: a.submit_recvs(64, 1, print),
            lambda: a.expect_imm_count(1, 1),
            lambda: a.reg_mr(bytearray(64)),
            lambda: a.deregister(source.mr),
        )
        for k, call in enumerate(calls):
            assert _raised(ClosedError, call) is not None, k
        assert (target.bytes == _BLANK).all()

    def test_c16_a_region_in_use_is_not_freed(self, engines: Engines) -> None:
        """Memory that goes back to its owner while a NIC reads it sends the owner's next bytes."""
        a, b = engines.engine(), engines.engine()
        n = 3000
        source, target = _Memory(a, 256 * n, noise=True), _Memory(b, 256 * n)
        was = source.bytes.copy()
        pages = Pages(np.arange(n))
        sent = a.submit_paged_writes(256, (source.mr, pages), (target.desc, pages), 4)
        refused = _raised(BusyError, lambda: a.deregister(source.mr)) is not None
        if not refused:  # it had ended already, then; either way the source is free only now
            assert sent.finished
        sent.wait(engines.timeout_s)
        if refused:
            a.deregister(source.mr)
        source.bytes[:] = 0
        b.expect_imm_count(4, n).wait(engines.timeout_s)

        assert np.array_equal(was, target.bytes)
        again = _raised(
            ClosedError, lambda: a.submit_single_write(1, (source.mr, 0), (target.desc, 0))
        )
        assert again is not None, "a freed region is a source again"

    def test_c17_a_closed_peer_fails_transfers_and_messages(self, engines: Engines) -> None:
        """A writer to a peer that is gone must get an error that names the peer."""
        a, b = engines.engine(), engines.engine()
        source, target = _Memory(a, 4096, noise=True), _Memory(b, 4096)
        a.submit_single_write(4096, (source.mr, 0), (target.desc, 0)).wait(engines.timeout_s)
        name, address = b.name, b.main_address
        b.close()
        ends = (
            a.submit_single_write(4096, (source.mr, 0), (target.desc, 0), 1),
            a.submit_send(address, b"is anybody there?"),
        )
        for handle in ends:
            error = _raised(FabricError, functools.partial(handle.wait, engines.timeout_s))
            assert error is not None
            assert name in str(error)

    def test_c21_messages_pass_through_a_rotating_pool(self, engines: Engines) -> None:
        """Descriptors are exchanged by messages; two buffers have to carry any number of them."""
        a, b = engines.engine(), engines.engine()
        got: list[bytes] = []
        b.submit_recvs(64, 2, lambda view: got.append(bytes(view)))
        sent = [b"message %d" % k for k in range(50)]
        for handle in [a.submit_send(b.main_address, payload) for payload in sent]:
            handle.wait(engines.timeout_s)
        _until(lambda: len(got) >= len(sent), a, b, engines)

        assert sorted(sent) == sorted(got)
