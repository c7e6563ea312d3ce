"""The fake device itself, through its verbs: a fake that is wrong would prove nothing.

Each test drives programs (tests/efa_fake/driver.c) that post and poll as libfabric's provider does.
With thread=0 the device moves only inside their calls, so that a run replays to the letter.
"""

from __future__ import annotations

import errno
import itertools
import os
import signal
from collections import Counter

import pytest

from tests.support.efa_ends import (
    ALL,
    BAD_ADDRESS,
    BAD_DEST_QPN,
    BAD_LENGTH,
    INLINE,
    INVALID_LKEY,
    LOCAL_LENGTH,
    LOCAL_WRITE,
    READ,
    REMOTE_READ,
    REMOTE_WRITE,
    RNR,
    SEND,
    UNKNOWN_PEER,
    UNREACH,
    UNRESP,
    WC_RDMA_READ,
    WC_RDMA_WRITE,
    WC_RECV,
    WC_RECV_WRITE_IMM,
    WRITE,
    WRITE_IMM,
    End,
    Program,
    until,
)
from tests.support.fake_efa import fabric
from tests.support.here import need_fake_efa

pytestmark = pytest.mark.slow  # a compiler, processes


@pytest.fixture
def start():
    """A function that starts a run with some settings; all ends with the test."""
    need_fake_efa()
    opened, programs = [], []

    def begin(faults=(), **settings):
        run = fabric({"thread": 0, "timeout_us": 2000, "rnr_us": 10, **settings}, faults)
        opened.append(run)
        fabric_run = run.__enter__()

        def program(host=0):
            programs.append(Program(fabric_run, host))
            return programs[-1]

        return fabric_run, program

    yield begin
    for one in programs:
        one.end()
    for run in reversed(opened):
        run.__exit__(None, None, None)


def pair(start, **settings):
    """Two ends of one process on two NICs, that know each other."""
    run, program = start(**settings)
    one = program()
    a, b = End(one, nic=0), End(one, nic=1)
    return run, a.meet(b), b


def traffic(start, seed, **settings):
    """200 rows with immediates from a to b: (order of immediates, order of completions, bytes)."""
    _, a, b = pair(start, seed=seed, **settings)
    expected = a.fill(200 * 64, 7)
    b.recv(200)
    assert (200, 0) == a.post(b, count=200, nbytes=64)
    seen = until([b, a], lambda seen: len(seen[a]) == len(seen[b]) == 200)
    assert expected == b.bytes(0, 200 * 64)
    assert {(WC_RDMA_WRITE, 0)} == {(wc.opcode, wc.status) for wc in seen[a]}
    assert {(WC_RECV_WRITE_IMM, 64)} == {(wc.opcode, wc.nbytes) for wc in seen[b]}
    assert set(range(100, 300)) == {wc.imm for wc in seen[b]}
    assert 200 == len({wc.id for wc in seen[b]}), "each took a receive of its own"
    return [wc.imm for wc in seen[b]], [wc.id for wc in seen[a]]


def inversions(order):
    return sum(a > b for a, b in itertools.pairwise(order))


def test_disorder_replays_from_its_seed(start):
    """A failure that does not come again cannot be mended; one order for all seeds finds little."""
    first, again, other = traffic(start, 3), traffic(start, 3), traffic(start, 4)

    assert first == again
    assert first != other
    for order in (*first, *other):
        assert inversions(order) > 20
    assert first[0] != [i - first[1][0] + 100 for i in first[1]], "two orders, not one"


def test_in_order_where_asked(start):
    """The search for a failure's cause begins by taking disorder away."""
    imms, ids = traffic(start, 3, shuffle=0)

    assert 0 == inversions(imms) == inversions(ids)


def test_segments_of_a_row_land_in_any_order_before_its_immediate(start):
    """SRD sprays packets: a reader that trusts the last byte of a row reads what has not come."""
    run, a, b = pair(start, mtu=100)
    expected = a.fill(64_000, 11)
    b.recv(1)
    a.post(b, nbytes=64_000)
    holes = 0
    imm = []
    while not imm:
        imm = b.poll()
        landed = b.bytes(0, 64_000)
        if not imm:
            a.poll()
            blank = [landed[k : k + 100] == bytes(100) for k in range(0, 64_000, 100)]
            holes += any(x and not y for x, y in itertools.pairwise(blank))

    assert expected == b.bytes(0, 64_000)
    assert holes, "a later segment was there before an earlier one"
    assert 640 == run.total()["segments"]


def test_a_row_may_land_whole(start):
    """The other extreme of the same device."""
    run, a, b = pair(start, segments=0)
    a.fill(64_000, 11)
    b.recv(1)
    a.post(b, nbytes=64_000)
    until([b, a], lambda seen: seen[b])

    assert 1 == run.total()["segments"]


def test_two_processes(start):
    """The same between processes: nothing of it may hang on one address space."""
    run, program = start(seed=5)
    a, b = End(program(host=0)), End(program(host=1))
    a.meet(b)
    expected = a.fill(100_000, 3)
    b.recv(10)
    a.post(b, count=10, nbytes=10_000)
    seen = until([a, b], lambda seen: len(seen[a]) == len(seen[b]) == 10)

    assert expected == b.bytes(0, 100_000)
    assert set(range(100, 110)) == {wc.imm for wc in seen[b]}
    assert 100_000 == run.counters()[0, 0]["bytes"]
    assert 10 == run.counters()[1, 0]["imms_landed"]


def test_reads_and_messages(start):
    """The provider's own protocols use them: handshakes are messages, some are inline."""
    _, a, b = pair(start)
    expected = b.fill(5000, 9)
    a.post(b, op=READ, nbytes=5000)
    seen = until([a, b], lambda seen: seen[a])
    assert [(WC_RDMA_READ, 0)] == [(wc.opcode, wc.status) for wc in seen[a]]
    assert expected == a.bytes(0, 5000)
    assert [] == seen[b]

    hello = a.fill(24, 5)
    b.recv(2, nbytes=64)
    a.post(b, op=SEND, nbytes=24)
    a.post(b, op=INLINE, nbytes=24, imm=77)
    seen = until([a, b], lambda seen: len(seen[b]) == len(seen[a]) == 2)
    assert hello == b.bytes(0, 24)
    assert [(WC_RECV, 24)] * 2 == [(wc.opcode, wc.nbytes) for wc in seen[b]]
    assert {0, 77} == {wc.imm for wc in seen[b]}


def last_status(a, b):
    (wc,) = until([a, b], lambda seen: seen[a])[a]
    return wc.status


def test_what_is_wrong_ends_in_the_devices_codes(start):
    """tep's table of codes is tested against these."""
    run, program = start()
    one, two = program(), program(host=1)
    a, b, stranger = End(one), End(two), End(one, nic=1)
    a.meet(b)
    stranger.know(b)
    size = 1 << 20
    b.recv(50, nbytes=16)

    def of(end=a, **how):
        assert (1, 0) == end.post(b, **{"op": WRITE, **how})
        return last_status(end, b)

    assert 0 == of()
    assert BAD_ADDRESS == of(rkey=b.rkey ^ 0x5A5A)
    assert BAD_ADDRESS == of(rkey=b.lkey)
    assert BAD_ADDRESS == of(raddr=b.at + size - 4)
    assert BAD_ADDRESS == of(raddr=b.at - 4)
    assert INVALID_LKEY == of(lkey=b.lkey)
    assert INVALID_LKEY == of(lkey=a.rkey)
    assert INVALID_LKEY == of(at=size - 4, raddr=b.at)
    assert BAD_DEST_QPN == of(qpn=999)
    assert UNRESP == of(qkey=5)
    assert UNKNOWN_PEER == of(stranger)
    assert UNKNOWN_PEER == of(stranger, op=WRITE_IMM)
    assert UNKNOWN_PEER == of(stranger, op=READ)
    assert 0 == of(stranger, op=SEND), "messages need no handle"
    assert BAD_LENGTH == of(op=SEND, nbytes=17)
    assert LOCAL_LENGTH == of(op=SEND, nbytes=8929)
    b.know(stranger)
    assert 0 == of(stranger)
    status = {k: v for k, v in run.total().items() if k.startswith("status")}
    assert sum(status.values()) == 17


def test_access_and_keys_end_with_deregistration(start):
    """A write into memory that went back to its owner must fail, whoever has the key."""
    _, program = start()
    one = program()
    a, b = End(one), End(one, nic=1)
    a.meet(b)
    for access, fails in ((LOCAL_WRITE, {WRITE, READ}), (REMOTE_READ, {WRITE}), (ALL, set())):
        _, _, rkey, at = one.do("reg", b.index, 4096, access, 0)
        for op in (WRITE, READ):
            a.post(b, op=op, rkey=rkey, raddr=at)
            assert (BAD_ADDRESS if op in fails else 0) == last_status(a, b)
    one.do("dereg", b.mr)
    a.post(b, op=WRITE)
    assert BAD_ADDRESS == last_status(a, b)


def test_read_only_memory_and_access_bits(start):
    """Pinning refuses these on a real machine: mapped model files must still be sources."""
    run, program = start()
    a = End(program())

    def reg(access, readonly, nbytes=4096):
        said = a.program.say("reg", a.index, nbytes, access, int(readonly))
        return 0 if said[0] == "ok" else int(said[1])

    assert 0 == reg(0, readonly=True)
    assert 0 == reg(REMOTE_READ, readonly=True)
    assert errno.EFAULT == reg(LOCAL_WRITE, readonly=True)
    assert errno.EINVAL == reg(REMOTE_WRITE, readonly=False)
    assert errno.EOPNOTSUPP == reg(8, readonly=False)  # IBV_ACCESS_REMOTE_ATOMIC
    assert 3 == run.total()["mr_refused"]


def test_a_dma_buf_is_reached_at_its_offset(start):
    """iova names the first byte at the offset, not the buffer's: shifted bytes would show here."""
    _, program = start()
    a, b = End(program()), End(program(host=1))
    a.meet(b)
    expected = a.fill(512, 3)
    iova, offset = 0x7000_0000, 5000
    _, _, rkey, at = b.program.do("dmabuf", b.index, 16384, offset, 4096, iova, ALL)
    a.post(b, op=WRITE, nbytes=512, rkey=rkey, raddr=iova + 100)
    assert 0 == last_status(a, b)
    said = b.program.say("peek", at, 16384)[1]
    assert bytes(offset + 100) + expected == bytes.fromhex(said)[: offset + 612]
    a.post(b, op=WRITE, rkey=rkey, raddr=iova - offset)
    assert BAD_ADDRESS == last_status(a, b)
    assert errno.EINVAL == b.program.errno("dmabuf", b.index, 4096, 4000, 4096, iova, ALL)


def test_limits(start):
    """A queue that is full refuses the whole chain; tables that are full refuse the next object."""
    run, program = start(sq=64, rq=32, cqe=128, max_qp=3, max_mr=5, max_ah=2, max_rdma=5000)
    one = program()
    a, b = End(one, cqe=64, sq=64, rq=32), End(one, cqe=64, sq=64, rq=32)
    a.meet(b)

    assert errno.EINVAL == one.errno("open", 0, 129, 64, 32, 7, 1, 0)
    assert errno.EINVAL == one.errno("open", 0, 64, 65, 32, 7, 1, 0)
    assert errno.EINVAL == one.errno("open", 0, 64, 64, 33, 7, 1, 0)
    one.do("open", 0, 64, 64, 32, 7, 1, 0)
    assert errno.ENOMEM == one.errno("open", 0, 64, 64, 32, 7, 1, 0)
    assert errno.ENOMEM == one.errno("ah", 0, 0, 1)
    for _ in range(3):
        one.do("reg", 0, 4096, ALL, 0)
    assert errno.ENOMEM == one.errno("reg", 0, 4096, ALL, 0)
    assert (32, errno.ENOMEM) == b.recv(33)
    assert (0, errno.ENOMEM) == a.post(b, count=65)
    assert (60, 0) == a.post(b, count=60, op=WRITE)
    assert (4, errno.ENOMEM) == a.post(b, count=5, op=WRITE, chain=False)
    until([a, b], lambda seen: len(seen[a]) == 64)
    assert (64, 0) == a.post(b, count=64, op=WRITE)
    until([a, b], lambda seen: len(seen[a]) == 64)
    a.post(b, op=WRITE, nbytes=5001)
    assert LOCAL_LENGTH == last_status(a, b)
    total = run.total()
    assert 60 + 4 + 64 + 1 == total["wqes"]
    assert 1 + 4 + 1 + 1 == total["doorbells"]
    assert 64 == total["batch_max"]


def test_immediates_need_receives(start):
    """RNR gives back-pressure, for ever or for some tries, and the bytes come all the same."""
    run, program = start()
    one = program()
    a, b, hasty = End(one), End(one), End(one, rnr=2)
    a.meet(b)
    hasty.meet(b)
    hasty.post(b)
    assert RNR == last_status(hasty, b)
    a.post(b, count=10)
    seen = {a: [], b: []}
    for _ in range(200):
        seen[a] += a.poll()
    assert [] == seen[a]
    b.recv(10)
    seen = until([a, b], lambda seen: len(seen[a]) == len(seen[b]) == 10, seen)
    assert {0} == {wc.status for wc in seen[a]}
    assert run.total()["rnrs"] > 10


def test_a_full_queue_drops_completions(start):
    """Unsolicited writes overrun a slow reader: nothing else may bound the target's queue."""
    run, program = start(cq_depth=16)
    a, b = End(program()), End(program())
    a.meet(b)
    b.recv(200)
    for k in range(10):
        a.post(b, count=10, imm=10 * k)
        until([a], lambda seen: len(seen[a]) == 10)
    seen = b.poll()

    assert 16 == len(seen)
    assert 84 == run.total()["overruns"]
    assert (56 + 16, errno.ENOMEM) == b.recv(200), "places of lost completions stay taken"


def test_faults(start):
    """Each fault, once, with its filters; what is not meant goes on."""
    run, program = start()
    one = program()
    a, b, c = End(one, nic=0), End(one, nic=1), End(one, nic=0)
    a.meet(b)
    a.meet(c)
    b.recv(50)
    c.recv(50)

    def ends(other, **how):
        a.post(other, **how)
        return last_status(a, other)

    run.fault("fail status=7 nic=1 count=1")
    assert 0 == ends(c)
    assert [BAD_ADDRESS, 0] == [ends(b), ends(b)]
    run.fault("mute nic=1 from_nic=0 op=imm")
    assert [UNRESP, 0, 0] == [ends(b), ends(b, op=WRITE), ends(c)]
    run.clear()
    b.poll()
    run.fault("lose_ack nic=1 skip=1 count=1")
    assert [0, UNRESP, 0] == [ends(b, imm=k) for k in (1, 2, 3)]
    run.fault("drop nic=1 count=1")
    assert [0, 0] == [ends(b, imm=k) for k in (4, 5)]
    run.fault("rnr nic=1 count=3")
    before = run.total()["rnrs"]
    assert 0 == ends(b)
    assert before + 3 == run.total()["rnrs"]
    run.fault("slow nic=0 us=2000 count=2")
    assert 0 == ends(b)
    with pytest.raises(ValueError, match="not a fault"):
        run.fault("rnr often=1")


def test_a_lost_acknowledgement_is_not_a_lost_row(start):
    """The immediate is there, and the sender hears that it is not: both happen at once."""
    run, a, b = pair(start, faults=["lose_ack count=1"])
    b.recv(1)
    a.post(b, imm=9)
    seen = until([a, b], lambda seen: seen[a])

    assert [UNRESP] == [wc.status for wc in seen[a]]
    assert [9] == [wc.imm for wc in seen[b]]
    assert 1 == run.total()["acks_lost"]


def test_faults_by_chance_replay(start):
    """A probability without a seed is a flaky test."""

    def orders():
        _, a, b = pair(start, seed=2, faults=["fail status=12 p=0.1"])
        b.recv(200)
        a.post(b, count=200)
        seen = until([a, b], lambda seen: len(seen[a]) == 200)
        return [(wc.id, wc.status) for wc in seen[a]]

    first = orders()
    assert first == orders()
    assert 5 < Counter(status for _, status in first)[12] < 50


def test_a_device_that_disappears(start):
    """A fatal event there, silence here: nothing of it completes, and peers learn in time."""
    run, program = start(thread=1)
    a, b = End(program()), End(program(host=1))
    a.meet(b)
    b.recv(5)
    run.fault("gone host=1")
    a.post(b)
    assert UNREACH == last_status(a, b)
    assert [3 + 5] == b.program.do("fatal", b.index, 5000)  # IBV_EVENT_DEVICE_FATAL
    assert [0] == a.program.do("fatal", a.index, 0)
    b.post(a)
    for _ in range(50):
        assert [] == b.poll()


def test_killed_stopped_and_restarted(start):
    """One that is stopped stays a target; one that died leaves an address to the next."""
    run, program = start(thread=1)
    a, b = End(program()), End(program(host=1), qkey=2)
    a.meet(b)
    b.recv(20)
    b.program.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, b.program.process.pid, os.WSTOPPED)
    a.post(b, count=10)
    seen = until([a], lambda seen: len(seen[a]) == 10)
    assert {0} == {wc.status for wc in seen[a]}
    b.program.process.send_signal(signal.SIGCONT)
    assert set(range(100, 110)) == {wc.imm for wc in b.poll()}

    b.program.process.kill()
    b.program.process.wait()
    a.post(b)
    assert BAD_DEST_QPN == last_status(a, a)
    again = End(program(host=1), qkey=3)
    assert (b.qpn, b.host, b.nic_1) == (again.qpn, again.host, again.nic_1)
    again.recv(5)
    again.know(a)
    a.post(b)  # to the same address, with the dead one's Q_Key
    assert UNRESP == last_status(a, a)
    a.know(again)
    a.post(again)
    assert 0 == last_status(a, a)
    assert 1 == run.counters()[1, 0]["live_qps"]


def test_completions_wake_a_sleeper_of_another_process(start):
    """Armed once, one event; without arming, none."""
    _, program = start(thread=1)
    a, b = End(program()), End(program(host=1))
    a.meet(b)
    b.recv(5)
    b.program.do("arm", b.index)
    assert [0] == b.program.do("wait", b.index, 0)
    a.post(b)
    assert [1] == b.program.do("wait", b.index, 10_000)
    a.post(b)
    until([a], lambda seen: len(seen[a]) == 2)
    assert [0] == b.program.do("wait", b.index, 0)
    assert 2 == len(b.poll())


def test_the_device_goes_on_alone(start):
    """A process that posts and then does something else must not keep its rows."""
    _, program = start(thread=1)
    a, b = End(program()), End(program(host=1))
    a.meet(b)
    b.recv(50)
    a.post(b, count=50)
    until([b], lambda seen: len(seen[b]) == 50)


def test_everything_goes_with_its_owner(start):
    """Closed or dead owners must give their places back, or long runs would run out of them."""
    run, program = start()
    one, two = program(), program()
    a, b = End(one), End(two)
    a.meet(b)
    one.do("unah", a.peers[b])
    one.do("dereg", a.mr)
    assert [0, 0] == one.do("close", a.index)
    two.process.kill()
    two.process.wait()
    End(program())
    counts = run.counters()[0, 0]

    assert (1, 1, 1, 0) == tuple(counts[f"live_{kind}"] for kind in ("qps", "cqs", "mrs", "ahs"))
