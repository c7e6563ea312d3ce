"""Engines whose process runs short, that nobody closes, or that end with it."""

from __future__ import annotations

import errno
import gc
import itertools
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest

import tep
from tep.backends.base import Access
from tep.backends.loopback import open_domains
from tep.base.errors import BurntImm, ClosedError, FabricError, TepError, WaitTimeout
from tep.drivers.threads import ThreadDriver
from tep.drivers.turning import TurnDriver
from tep.engine import TransferEngine
from tests.support.descriptors import open_descriptors
from tests.support.inside import machine_of, nics_of
from tests.support.pairs import pair

WAIT_S = 60.0

SHORT = [errno.EMFILE, errno.ENOMEM, errno.EINTR]


@pytest.mark.parametrize("error", [*(OSError(n, "scarce") for n in (*SHORT, errno.EIO)), None])
@pytest.mark.parametrize("nics", [1, 2])
def test_a_nic_whose_poll_raises_is_polled_again_if_that_may_pass(
    error: OSError | None, nics: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EMFILE or a MemoryError, once, ended all transfers over a NIC for good."""
    with pair(nics, nics, threads=True) as p:
        nic = nics_of(p.a)[0]
        poll = type(nic).poll
        left = [1]

        def short(self: object, out: object) -> int:
            if self is nic and left:
                left.pop()
                raise error or MemoryError("scarce")
            return int(poll(self, out))

        p.a.submit_single_write(8, (p.mr, 0), (p.desc, 0), 1).wait(WAIT_S)
        monkeypatch.setattr(type(nic), "poll", short)
        sent, ends = [], []
        for _ in range(20):
            try:
                sent.append(p.a.submit_single_write(8, (p.mr, 0), (p.desc, 0), 2))
            except BurntImm:  # the worker has met the error, and those before this one failed
                ends.append("failed")
        for transfer in sent:
            try:
                transfer.wait(WAIT_S)
                ends.append("done")
            except WaitTimeout:
                raise
            except TepError:
                ends.append("failed")
        while left:  # the rows may have gone over the other NIC
            p.a.driver.call(lambda: None)
        passing = error is None or error.errno != errno.EIO
        assert not passing or ends.count("done") == 20
        if nics == 2 or passing:
            p.a.submit_single_write(8, (p.mr, 0), (p.desc, 0), 3).wait(WAIT_S)
            p.b.expect_imm_count(3, 1).wait(WAIT_S)
        else:
            with pytest.raises(FabricError, match="no NIC .*'scarce'.*; open it anew"):
                p.a.submit_single_write(8, (p.mr, 0), (p.desc, 0), 3).wait(WAIT_S)
        p.b.expect_imm_count(2, ends.count("done")).wait(WAIT_S)


def test_a_nic_that_raises_now_and_then_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time counted for ever: after days a NIC would be given up for what had always passed."""
    with pair(1, 1) as p:
        nic, polls = nics_of(p.a)[0], itertools.count()
        healthy = type(nic).poll

        def scarce(self: object, out: object) -> int:
            if self is nic and next(polls) % 2:
                raise MemoryError("scarce")
            return healthy(self, out)

        monkeypatch.setattr("tep.engine.worker._SHORT_MAX", 4)
        monkeypatch.setattr(type(nic), "poll", scarce)
        for _ in range(20):
            p.settle(last := p.a.submit_single_write(8, (p.mr, 0), (p.desc, 0), 1))
            assert last.ok, last.error
        assert next(polls) > 20


SCARCE = [OSError(errno.EMFILE, "scarce"), OSError(errno.EINTR, "scarce"), MemoryError("scarce")]


@pytest.mark.parametrize("error", SCARCE, ids=repr)
@pytest.mark.parametrize("verb", ["post", "post_send", "post_control", "connect"])
@pytest.mark.parametrize("nics", [1, 2])
def test_what_a_nic_raises_ends_no_engine(
    error: BaseException, verb: str, nics: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MemoryError, or an OSError of post(), ended every transfer to every peer."""
    with pair(nics, nics) as p:
        p.b.submit_recvs(64, 8, lambda _: None)
        p.settle(p.a.submit_single_write(8, (p.mr, 0), (p.desc, 0), 1))
        other = p.more("other", 1)
        _, there = other.reg_mr(np.zeros(8, np.uint8))
        nic, left = nics_of(p.a)[0], [2]
        healthy = getattr(type(nic), verb)

        def scarce(self: object, *args: object) -> object:
            if self is nic and left[0]:
                left[0] -= 1
                raise error
            return healthy(self, *args)

        monkeypatch.setattr(type(nic), verb, scarce)
        sent = [
            p.a.submit_single_write(8, (p.mr, 0), (p.desc, 0), 2),
            p.a.submit_send(p.b.main_address, b"x"),
            p.a.submit_single_write(8, (p.mr, 0), (there, 0), 2),
            p.a.submit_barrier([p.desc], 77),
        ]
        sent[-1].cancel()  # of which its target is told
        p.settle(*sent)
        p.quiet()

        assert left[0] < 2, "nothing was raised"
        if nics == 2 or getattr(error, "errno", 0) == errno.EINTR:
            p.settle(last := p.a.submit_single_write(8, (p.mr, 0), (p.desc, 0), 3))
            assert last.ok, last.error
        p.settle(p.b.submit_single_write(8, (p.dst_mr, 0), (there, 0), 4))
        p.a.close()
        assert p.a.stats().callback_errors == 0


@pytest.mark.parametrize("error", [OSError(errno.EIO, "broken"), MemoryError("broken")], ids=repr)
@pytest.mark.parametrize("verb", ["post", "post_read", "post_send", "post_control", "poll"])
@pytest.mark.parametrize("nics", [1, 2])
def test_a_nic_that_raises_after_it_has_worked_leaves_the_engine_closable(
    error: BaseException, verb: str, nics: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it had taken came back to an engine that did not know of it: KeyError in close()."""
    with pair(nics, nics) as p:
        p.b.submit_recvs(64, 8, lambda _: None)
        sink, _ = p.a.reg_mr(np.zeros(64, np.uint8), access=Access.SINK)
        _, there = p.b.reg_mr(np.ones(64, np.uint8), access=Access.READABLE)
        p.settle(p.a.submit_single_write(8, (p.mr, 0), (p.desc, 0), 1))
        p.quiet()
        nic, left = nics_of(p.a)[0], [1]
        healthy = getattr(type(nic), verb)

        def late(self: object, *args: object) -> object:
            done = healthy(self, *args)
            if self is nic and left and done:
                left.pop()
                raise error
            return done

        monkeypatch.setattr(type(nic), verb, late)
        pages = tep.Pages(range(5))
        sent = [
            p.a.submit_paged_writes(8, (p.mr, pages), (p.desc, pages), 2),
            p.a.submit_single_read(8, (there, 0), (sink, 0)),
            p.a.submit_send(p.b.main_address, b"x"),
            p.a.submit_barrier([p.desc], 77),
        ]
        sent[-1].cancel()  # of which its target is told
        p.quiet(100)
        p.a.close()
        assert not left, "nothing was raised"
        assert all(each.finished for each in sent)
        assert all(each.ok or each.error or each.state.name == "CANCELLED" for each in sent)


@pytest.mark.parametrize("verb", ["post", "post_read", "post_send"])
def test_what_signals_interrupt_again_and_again_is_called_again(
    verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine slept beside what it had to post: EINTR took nothing, and no NIC has news."""
    with pair(1, 1, threads=True) as p:
        p.b.submit_recvs(64, 8, lambda _: None)
        p.a.submit_single_write(8, (p.mr, 0), (p.desc, 0), 1).wait(WAIT_S)
        sink, _ = p.a.reg_mr(np.zeros(8, np.uint8), access=Access.SINK)
        _, there = p.b.reg_mr(np.zeros(8, np.uint8), access=Access.READABLE)
        nic, left = nics_of(p.a)[0], [9]
        healthy = getattr(type(nic), verb)

        def interrupted(self: object, *args: object) -> object:
            if self is nic and left[0]:
                left[0] -= 1
                raise OSError(errno.EINTR, "interrupted")
            return healthy(self, *args)

        monkeypatch.setattr(type(nic), verb, interrupted)
        match verb:
            case "post":
                p.a.submit_single_write(8, (p.mr, 0), (p.desc, 0), 2).wait(WAIT_S)
            case "post_read":
                p.a.submit_single_read(8, (there, 0), (sink, 0)).wait(WAIT_S)
            case _:
                p.a.submit_send(p.b.main_address, b"x").wait(WAIT_S)
        assert 0 == left[0]


@pytest.mark.parametrize("error", [OSError(errno.EIO, "broken"), MemoryError("broken")], ids=repr)
@pytest.mark.parametrize("ends", ["by itself", "by close"])
@pytest.mark.parametrize("nics", [1, 2])
def test_a_nic_that_can_be_polled_no_more_keeps_nobody_waiting(
    error: BaseException, ends: str, nics: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows never came back: its transfers, and close(), would have waited for ever."""
    with pair(nics, nics) as p:
        nic = nics_of(p.a)[0]
        kind, closed = type(nic), []
        poll, close = kind.poll, kind.close

        def broken(self: object, out: object) -> int:
            if self is nic:
                raise error
            return int(poll(self, out))

        def noted(self: object) -> None:
            closed.append(self)
            close(self)

        monkeypatch.setattr(kind, "poll", broken)
        monkeypatch.setattr(kind, "close", noted)
        sent = [p.a.submit_single_write(8, (p.mr, 0), (p.desc, 0), 5) for _ in range(3)]
        sent.append(p.a.submit_send(p.b.main_address, b"x"))
        if ends == "by itself":
            p.settle(*sent)
            assert nic in closed
        p.a.close()
        assert all(each.finished for each in sent)
        assert nic in closed
        if nics == 1:
            assert not any(each.ok for each in sent)
        p.quiet()
        came = dict(p.b.stats().imms_unexpected).get(5, 0)
        assert came >= sum(each.ok for each in sent[:3])
        assert came <= 3


@pytest.mark.parametrize("code", SHORT)
def test_a_connection_that_cannot_be_made_fails_what_goes_there(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the limit of descriptors one new peer ended an engine."""
    with pair(threads=True) as p:
        other = p.more("other", 1)
        _, there = other.reg_mr(np.zeros(8, np.uint8))
        p.a.submit_single_write(8, (p.mr, 0), (p.desc, 0), 1).wait(WAIT_S)
        kind = type(nics_of(p.a)[0])
        connect = kind.connect

        def short(self: object, address: bytes) -> int:
            raise OSError(code, "scarce")

        monkeypatch.setattr(kind, "connect", short)
        with pytest.raises(FabricError, match="scarce"):
            p.a.submit_single_write(8, (p.mr, 0), (there, 0)).wait(WAIT_S)
        p.a.submit_single_write(8, (p.mr, 0), (p.desc, 0), 1).wait(WAIT_S)
        monkeypatch.setattr(kind, "connect", connect)
        p.a.submit_single_write(8, (p.mr, 0), (there, 0)).wait(WAIT_S)
        p.b.expect_imm_count(1, 2).wait(WAIT_S)


@pytest.mark.parametrize("backend", ["loopback", "local"])
def test_engines_that_are_dropped_leave_no_thread_and_no_descriptor(backend: str) -> None:
    """Thirty dropped pairs were sixty threads and up to 1,320 descriptors."""

    def drop() -> list[weakref.ref[tep.TransferEngine]]:
        a, b = (tep.TransferEngine.open(backend, name=name) for name in "ab")
        mr, _ = a.reg_mr(np.zeros(64, np.uint8))
        _, desc = b.reg_mr(np.zeros(64, np.uint8))
        a.submit_single_write(8, (mr, 0), (desc, 0), 1).wait(WAIT_S)
        b.expect_imm_count(1, 1).wait(WAIT_S)
        return [weakref.ref(a), weakref.ref(b)]

    def look(refs: list[weakref.ref[tep.TransferEngine]], mine: set[threading.Thread]) -> int:
        for _ in range(100):
            gc.collect()
            for thread in mine:
                thread.join(0.05)
            left = sum(ref() is not None for ref in refs)
            left += sum(thread.is_alive() for thread in mine)
            if not left:
                break
        return left

    def collected() -> None:
        workers = {t for t in threading.enumerate() if t.name.endswith("-worker")} - before
        refs = drop()
        mine = {t for t in threading.enumerate() if t.name.endswith("-worker")} - before - workers
        with pytest.warns(ResourceWarning, match="was not closed"):
            assert look(refs, mine) == 0, "an engine or a worker is left that nobody holds"

    before = set(threading.enumerate())
    collected()
    gc.collect()
    fds = open_descriptors()
    for _ in range(5):
        collected()
    gc.collect()
    assert open_descriptors() <= fds + 2


EXITS = {
    "with work": "for _ in range(100): a.submit_single_write(64, (mr, 0), (d, 0), 1)",
    "waiting": (
        "threading.Thread(target=lambda: b.expect_imm_count(9, 1).wait(99), daemon=True).start();"
        "time.sleep(0.05)"
    ),
    "atexit": (
        "import atexit; atexit.register("
        "lambda: a.submit_single_write(8, (mr, 0), (d, 0), 1).wait(20))"
    ),
}


@pytest.mark.parametrize("backend", ["loopback", "local"])
@pytest.mark.parametrize("case", EXITS)
def test_a_process_ends_with_an_open_engine_in_silence(backend: str, case: str) -> None:
    """The worker tripped over NICs that the interpreter had taken down, and said so at length."""
    program = (
        "import threading, time, numpy as np, tep\n"
        f"a, b = (tep.TransferEngine.open({backend!r}, name=n) for n in 'ab')\n"
        "mr, _ = a.reg_mr(np.zeros(64, np.uint8)); _, d = b.reg_mr(np.zeros(64, np.uint8))\n"
        "a.submit_single_write(8, (mr, 0), (d, 0), 1).wait(20)\n"
        f"{EXITS[case]}\nprint('leaving')\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert (ended.stdout, ended.stderr, ended.returncode) == ("leaving\n", "", 0)


def test_a_crash_tells_its_cause_to_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Users saw WaitTimeout only, and the engine took submits that no step would serve."""
    with pair() as p:
        pending = p.b.expect_imm_count(1, 1)

        def bug(*_: object) -> bool:
            raise RuntimeError("a bug of ours")

        monkeypatch.setattr(machine_of(p.b), "step", bug)
        with pytest.raises(RuntimeError):
            pending.wait(WAIT_S)
        with pytest.raises(TepError, match="a bug of ours") as found:
            pending.wait(WAIT_S)
        assert isinstance(found.value.__cause__, RuntimeError)
        with pytest.raises(TepError, match="a bug of ours"):
            p.b.expect_imm_count(2, 1)


# The worker's traceback, as a bug in tep leaves it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("driver", [ThreadDriver, TurnDriver])
def test_a_crash_on_a_worker_tells_its_cause(
    driver: type[ThreadDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a worker the cause is on another thread: without it nobody knows what to look for."""
    opened = open_domains(1, name="a")
    with TransferEngine(opened.domains, driver=driver("a"), name="a", epoch=1) as engine:
        pending = engine.expect_imm_count(1, 1)

        def bug(*_: object) -> bool:
            raise RuntimeError("a bug of ours")

        monkeypatch.setattr(machine_of(engine), "step", bug)
        engine.driver.kick()
        for call in (lambda: pending.wait(WAIT_S), lambda: engine.expect_imm_count(2, 1)):
            with pytest.raises(ClosedError, match="a bug of ours") as found:
                call()
            assert isinstance(found.value.__cause__, RuntimeError)
