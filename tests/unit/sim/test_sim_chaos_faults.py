"""Faults of the chaos fabric are told as the seam asks, and nothing lands where it must not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tep.backends.base import Access, Kind, Status, WriteBatch, new_completions
from tep.base.errors import BadDescriptor, ClosedError, FabricError, UsageError
from tep.memory.source import Memory, adapt
from tep.sim.chaos import ChaosFabric
from tep.sim.clock import FabricEnv
from tep.sim.faults import Chaos, KillNic, Restart, Revoke
from tep.sim.row_log import RowLog
from tests.unit.sim.sim_seam import CALM, NS, Seam

PAGES = [(256 * k, 256 * k, 256) for k in range(12)]


# ---------------------------------------------------------------- keys and ranges


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"rkey": 12345}, Status.REMOTE_KEY),
        ({"lkey": 12345}, Status.LOCAL_KEY),
        ({"dst": 2**63}, Status.REMOTE_RANGE),
        ({"nbytes": 3000}, Status.REMOTE_RANGE),
        ({"nbytes": 3 * 2**30}, Status.LOCAL_KEY),
        ({"src": 1}, Status.LOCAL_KEY),
    ],
)
def test_c11_bad_keys_and_ranges_change_nothing(change: dict[str, int], status: Status) -> None:
    """A write under a wrong key or beyond the end is somebody else's memory."""
    seam = Seam(replace(CALM, fragments=5))
    good = seam.batch([(0, 2048, 1024)], 3)
    row = {name: getattr(good, name) for name in ("src", "lkey", "dst", "rkey", "nbytes")}
    row = {k: v if isinstance(v, int) else int(v[0]) for k, v in row.items()} | change
    bad = WriteBatch(
        1, good.peer, row["src"], row["lkey"], row["dst"], row["rkey"], row["nbytes"], 3, 99
    )
    seam.offer(bad)
    seam.run()
    [seen] = seam.of(Kind.WRITE)

    assert (status, 1, 0, 99) == (seen.status, seen.count, seen.row, seen.ctx)
    assert not seam.b.dst.any()
    assert not seam.imms()
    assert [("a/0", 99, 0, status)] == seam.fabric.failed


def test_keys_are_of_one_nic_and_one_side() -> None:
    """A key that works on another NIC too would hide every mix-up of keys."""
    seam = Seam(nics=4)
    keys = [key for side in (seam.a, seam.b) for key in side.sources + side.targets]
    numbers = [number for key in keys for number in (key.lkey, key.rkey)]

    assert len(set(numbers)) == len(numbers)
    wrong = seam.batch([(0, 0, 64)], nic=0, remote=1)
    wrong.rkey = seam.b.targets[0].rkey
    seam.offer(wrong)
    seam.run()
    assert {Status.REMOTE_KEY: 1} == seam.ended()


def test_bases_are_made_up_or_offsets() -> None:
    """Providers differ; an engine that forgets `base` must fail on one of them."""
    made_up = Seam(CALM)
    offsets = Seam(replace(CALM, offsets=True))

    assert 0 == offsets.b.targets[0].base
    assert made_up.b.targets[0].base > 2**32
    assert made_up.b.targets[0].base != made_up.b.dst.ctypes.data


def test_register_refuses_what_a_nic_cannot_reach() -> None:
    """Device memory, or read-only memory as a target, would crash the first copy."""
    seam = Seam()
    nic = seam.a.node.domains[0]
    with pytest.raises(FabricError, match="memory on cuda:0 cannot be registered"):
        nic.register(Memory(4096, 64, "cuda:0", False, None), Access.SOURCE)
    readonly = adapt(b"constant")
    with pytest.raises(FabricError, match="are read-only and cannot be a target"):
        nic.register(readonly, Access.SOURCE_AND_TARGET)
    key = nic.register(readonly, Access.SOURCE)
    batch = seam.batch([(0, 0, 8)])
    batch.rkey = key.rkey
    assert key.rkey != key.lkey


def test_addresses_are_checked() -> None:
    """Bytes from a peer are hostile."""
    nic = Seam().a.node.domains[0]
    for bad in (b"", b"sim:b/0", b"sim:b/0#x", b"tcp:b/0#1", b"sim:\xff/0#1", b"sim:b/0#1 ", b"\0"):
        with pytest.raises(BadDescriptor, match="is not the address of a simulated NIC"):
            nic.connect(bad)
    assert nic.connect(b"sim:b/0#1") == nic.connect(b"sim:b/0#1")


def test_fabric_refuses_bad_nodes() -> None:
    """A name that its own address cannot carry would be unreachable without a word."""
    fabric = ChaosFabric(FabricEnv(), Chaos())
    fabric.node("a", 1)
    for name, nics, message in (
        ("a", 1, "is there already"),
        ("b", 0, "nics=0; 1 to 64"),
        ("", 1, "1 to 200 bytes"),
        ("x\0y", 1, "1 to 200 bytes"),
    ):
        with pytest.raises(UsageError, match=message):
            fabric.node(name, nics)
    with pytest.raises(UsageError, match="NICs 0 to 0, not 3"):
        fabric.kill_nic("a", 3)
    with pytest.raises(UsageError, match="no node 'z'"):
        fabric.restart("z")
    assert ("n/a/me", 0, 1) == fabric.parse(fabric.node("n/a/me", 1).domains[0].address)


# ---------------------------------------------------------------- messages


def _send(seam: Seam, payload: bytes, ctx: int) -> None:
    nic = seam.a.node.domains[0]
    assert nic.post_send(nic.connect(seam.b.node.domains[0].address), payload, ctx)


def test_messages_wait_for_a_buffer() -> None:
    """Too few receives are a matter of time, not an error; without events, no busy waiting."""
    seam = Seam(replace(CALM, ordered=True))
    inbox = seam.b.node.domains[0]
    for k in range(5):
        _send(seam, b"message %d" % k, k)
    seam.run()
    assert [] == seam.of(Kind.SENT)
    inbox.post_recvs(32, 2)
    seam.run()
    first = seam.of(Kind.RECV)
    assert [b"message 0", b"message 1"] == [bytes(inbox.recv_view(s.ctx)) for s in first]
    for seen in first:
        inbox.recv_done(seen.ctx)
    seam.run()
    for seen in seam.of(Kind.RECV)[2:4]:
        inbox.recv_done(seen.ctx)
    seam.run()

    sent = [(s.ctx, s.status) for s in seam.of(Kind.SENT)]
    assert [(k, Status.OK) for k in range(5)] == sorted(sent)
    assert 5 == len(seam.of(Kind.RECV))


def test_a_message_longer_than_the_buffers_fails_at_its_sender() -> None:
    """Cut short, it would be decoded as something else."""
    seam = Seam()
    inbox = seam.b.node.domains[0]
    inbox.post_recvs(8, 1)
    _send(seam, b"nine bytes", 1)
    seam.run()
    _send(seam, b"eight ok", 2)
    seam.run()

    assert [(1, Status.LENGTH), (2, Status.OK)] == [(s.ctx, s.status) for s in seam.of(Kind.SENT)]
    _send(seam, bytes(seam.a.node.domains[0].caps.max_msg_bytes + 1), 3)
    seam.run()
    assert Status.LENGTH == seam.of(Kind.SENT)[-1].status


# ---------------------------------------------------------------- faults


def test_f11_a_dead_nic_ends_rows_on_it_and_towards_it() -> None:
    """Silence is the hang; and a row that landed but was not acknowledged is still a failure."""
    ambiguous = {Status.NIC_DOWN: 0, Status.UNREACHABLE: 0}
    for seed in range(60):
        row_log = RowLog()
        chaos = Chaos.draw(seed, sq_depth=6, dead_after_ps=300 * NS, pause_ps=0)
        seam = Seam(chaos, nics=2, row_log=row_log)
        on_dead = seam.write(PAGES, 1, nic=0)
        towards = seam.write(PAGES, 2, nic=1, remote=1)
        alive = seam.write(PAGES, 3, nic=1, remote=0)
        kill_at = 100 * NS + seed * 20 * NS
        seam.env.call_at(kill_at, lambda _, s=seam: s.fabric.kill_nic("b", 1))
        seam.env.call_at(kill_at + 50 * NS, lambda _, s=seam: s.fabric.kill_nic("a", 0))
        seam.run()
        assert {Status.OK: 12} == seam.ended(alive)
        for ctx, status in ((on_dead, Status.NIC_DOWN), (towards, Status.UNREACHABLE)):
            ended = seam.ended(ctx)
            assert seam.accepted[ctx] == ended.total()
            assert set(ended) <= {Status.OK, status, Status.FLUSHED}
            ambiguous[status] += seam.imms()[1 if ctx == on_dead else 2] > ended[Status.OK]
        at_dead = [r for r in row_log.records() if (r.node, r.nic) == ("b", 1)]
        assert [] == [r for r in at_dead if r.what in ("place", "imm") and r.t_ps > kill_at]
        downs = [(s.where, s.status) for s in seam.of(Kind.DOWN)]
        assert [("a/0", Status.NIC_DOWN), ("b/1", Status.NIC_DOWN)] == sorted(downs)

    assert min(ambiguous.values()) > 0, "some immediates arrive whose row is reported failed"


def test_f11_posts_after_down_are_noted() -> None:
    """An engine that goes on using a NIC it knows to be dead is caught by this list."""
    seam = Seam()
    seam.fabric.kill_nic("a", 0)
    nic = seam.a.node.domains[0]
    batch = seam.batch(PAGES)
    assert 12 == nic.post(batch, 0, 12)
    assert [] == seam.fabric.violations
    seam.run()
    assert {Status.NIC_DOWN: 12} == seam.ended()
    nic.post(batch, 0, 1)

    assert ["a/0: posted on after its DOWN was polled"] == seam.fabric.violations


def test_f13_a_dead_peer_may_take_long_but_keeps_the_promise() -> None:
    """C17: within caps.peer_timeout_s, also where that is half a second."""
    seam = Seam(replace(CALM, dead_after_ps=500_000_000 * NS))
    seam.fabric.kill_nic("b", 0)
    seam.write(PAGES)
    seam.run()
    limit_ps = seam.a.node.domains[0].caps.peer_timeout_s * 1e12

    assert {Status.UNREACHABLE: 12} == seam.ended()
    assert 250_000_000 * NS <= max(seen.t_ps for seen in seam.seen) <= limit_ps


def test_f14_a_lost_registration_fails_later_rows_and_freezes_memory() -> None:
    """Deregistered memory belongs to somebody else from that moment on."""
    for seed in range(20):
        seam = Seam(Chaos.draw(seed))
        ctx = seam.write(PAGES, 4)
        seam.run(us=0.5)
        seam.fabric.revoke("b")
        frozen = seam.b.dst.copy()
        seam.run()
        ended = seam.ended(ctx)
        assert (frozen == seam.b.dst).all()
        assert 12 == ended.total()
        assert set(ended) <= {Status.OK, Status.REMOTE_KEY, Status.FLUSHED}
        assert ended[Status.REMOTE_KEY] > 0


def test_a_source_lost_in_flight_is_a_local_error() -> None:
    """A fragment that is read late finds no source any more; that is the sender's matter."""
    statuses = set()
    for seed in range(10):
        seam = Seam(replace(CALM, seed=seed, late_read=True))
        seam.write(PAGES, 4)
        seam.run(us=0.15)
        seam.fabric.revoke("a")
        seam.run()
        assert 12 == seam.ended().total()
        statuses |= set(seam.ended())

    assert {Status.OK, Status.LOCAL_KEY} == statuses


@pytest.mark.parametrize("key_reuse", [False, True])
def test_f15_f16_a_new_incarnation_is_out_of_reach_of_old_rows(key_reuse: bool) -> None:
    """Old rows with old keys in the new owner's memory: the corruption nobody can explain."""
    stale = 0
    for seed in range(30):
        seam = Seam(Chaos.draw(seed, key_reuse=key_reuse, dead_after_ps=300 * NS, pause_ps=0))
        old_keys = [key.rkey for key in seam.b.sources + seam.b.targets]
        ctx = seam.write(PAGES, 4)
        seam.run(us=0.1 + seed / 20)
        reborn = seam.adopt(seam.fabric.restart("b"), 4096)
        new_keys = [key.rkey for key in reborn.sources + reborn.targets]
        late = seam.batch(PAGES, 5, to=seam.b)
        seam.offer(late)
        seam.run()

        assert key_reuse == (old_keys == new_keys)
        assert 2 == reborn.node.epoch
        assert not reborn.dst.any()
        assert {Status.STALE_PEER: 12} == seam.ended(late.ctx)
        assert 12 == seam.ended(ctx).total()
        assert set(seam.ended(ctx)) <= {Status.OK, Status.STALE_PEER, Status.FLUSHED}
        stale += Status.STALE_PEER in seam.ended(ctx)
        assert not [s for s in seam.of(Kind.IMM) if s.imm == 5]
        fresh = seam.write(PAGES, 6, to=reborn)
        seam.run()
        assert {Status.OK: 12} == seam.ended(fresh)
        assert (reborn.dst[:3072] == seam.a.src[:3072]).all()

    assert stale > 10


def test_a_sender_that_restarts_leaves_nothing_behind() -> None:
    """Rows of a crashed process must not land after it: its new self knows nothing of them."""
    seam = Seam(replace(CALM, fragments=4, reorder_ps=3000 * NS))
    seam.write(PAGES, 4)
    seam.run(us=1.0)
    seam.fabric.restart("a")
    frozen = seam.b.dst.copy()
    counted = seam.imms()
    seam.run(us=0.2)
    seam.run()

    assert (frozen == seam.b.dst).all()
    assert seam.imms().total() - counted.total() <= 12
    assert [] == [s for s in seam.seen if s.where == "a/0" and s.t_ps > 1_000 * 1000 + 100 * NS]


def test_a_crashed_host_is_unreachable_until_it_restarts() -> None:
    """Between crash and restart there is nobody to say STALE_PEER."""
    seam = Seam()
    seam.fabric.crash("b")
    first = seam.write(PAGES)
    seam.run()
    seam.adopt(seam.fabric.restart("b"), 64)
    second = seam.write(PAGES)
    seam.run()

    assert {Status.UNREACHABLE: 12} == seam.ended(first)
    assert {Status.STALE_PEER: 12} == seam.ended(second)


def test_an_address_that_nobody_has_is_unreachable() -> None:
    """A wrong NIC number or name must not be mistaken for a slow peer."""
    seam = Seam()
    nic = seam.a.node.domains[0]
    for address in (b"sim:nobody/0#1", b"sim:b/7#1", b"sim:b/0#9"):
        batch = seam.batch([(0, 0, 8)])
        batch.peer = nic.connect(address)
        seam.offer(batch)
        seam.run()
        assert {Status.UNREACHABLE: 1} == seam.ended(batch.ctx)
    batch.peer = 99
    with pytest.raises(UsageError, match="peer 99"):
        nic.post(batch, 0, 1)


def test_c14_close_flushes_and_is_idempotent() -> None:
    """A row without an end would keep its memory held for ever."""
    seam = Seam(replace(CALM, burst_ps=800 * NS, reorder_ps=3000 * NS))
    nic = seam.a.node.domains[0]
    nic.set_waker(lambda: None)
    batch = seam.batch(PAGES)
    nic.post(batch, 0, 12)
    seam.run(us=2)
    nic.close()
    nic.close()
    out = new_completions(64)
    statuses = [int(s) for s in out[: nic.poll(out)]["status"]]
    seam.run()

    assert 12 == len(statuses)
    assert {int(Status.OK), int(Status.FLUSHED)} == set(statuses)
    assert 0 == nic.poll(out)
    for use in (lambda: nic.post(batch, 0, 1), lambda: nic.connect(b"sim:b/0#1")):
        with pytest.raises(ClosedError, match="a/0 is closed"):
            use()


def test_closing_a_target_lets_answered_rows_end_well() -> None:
    """A reader that has counted its immediates may go: its sender must not be told of failure."""
    seam = Seam()
    ctx = seam.write(PAGES, 4)

    def close_when_counted(seen: object) -> None:
        if seam.imms()[4] == 12:
            seam.b.node.domains[0].close()

    seam.on_seen = close_when_counted
    seam.run()

    assert {Status.OK: 12} == seam.ended(ctx)
    late = seam.write(PAGES)
    seam.run()
    assert {Status.UNREACHABLE: 12} == seam.ended(late)


def test_f24_an_error_flushes_the_rows_to_that_peer_only() -> None:
    """RC breaks the connection; other peers are not concerned, and later rows work again."""
    seam = Seam(replace(CALM, ordered=True, flush_on_error=True))
    c = seam.side("c", 1, 4096)
    seam.write([(0, 2**40, 8)], 1)
    behind = seam.write(PAGES, 2)
    other = seam.write(PAGES, 3, to=c)
    seam.run()
    assert seam.ended(behind)[Status.FLUSHED] > 0
    assert {Status.OK: 12} == seam.ended(other)
    again = seam.write(PAGES, 2)
    seam.run()
    assert {Status.OK: 12} == seam.ended(again)


def test_scripted_faults_happen_at_their_time() -> None:
    """A scenario is replayed from its record alone."""
    row_log = RowLog()
    seam = Seam(row_log=row_log, nics=2)
    faults = (5 * NS, KillNic("a", 1)), (9 * NS, Revoke("b")), (12 * NS, Restart("b"))
    for at_ps, fault in faults:
        seam.fabric.env.call_at(at_ps, seam.fabric.inflict, fault)
    seam.run()
    told = [(r.t_ps // NS, r.node, r.nic, r.peer) for r in row_log.records() if r.what == "fault"]

    assert [(5, "a", 1, "kill"), (9, "b", 0, "revoke"), (9, "b", 1, "revoke")] == told[:3]
    assert (12, "b", 0, "crash") in told
    assert 2 == seam.fabric.nodes["b"].epoch


def test_a_node_may_write_to_itself() -> None:
    """Loopback through the own NIC is how one-rank jobs run."""
    seam = Seam(replace(CALM, fragments=5, reorder_ps=400 * NS))
    seam.write(PAGES, 8, to=seam.a)
    seam.run()

    assert ({Status.OK: 12}, {8: 12}) == (seam.ended(), seam.imms())
    assert (seam.a.dst[:3072] == seam.a.src[:3072]).all()
