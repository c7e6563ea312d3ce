"""The worker's turn: messages, counting by columns, races of commands, the end of everything."""

from __future__ import annotations

import pytest

from tep.backends.base import Kind, Status
from tep.base.api import EngineOptions, Pages
from tep.base.errors import BadRequest, BusyError, Cancelled, ClosedError, FabricError
from tep.control.channel import sooner
from tep.core.imm import ImmTable
from tests.support.inside import machine_of, worker_of
from tests.support.script import Scripted, memory, scripted


def write(own: Scripted, npages: int = 4):
    mr, desc = own.engine.reg_mr(memory(1 << 20))
    pages = Pages(range(npages))
    return own.engine.submit_paged_writes(64, (mr, pages), (desc, pages))


def test_messages_wait_for_room_and_keep_their_order() -> None:
    """A refused message that is forgotten, or overtaken, breaks a protocol built on them."""
    own = scripted()
    own.nics[0].send_room = 2
    sent = [own.engine.submit_send(own.engine.main_address, bytes([k])) for k in range(5)]
    own.turn(2)
    assert [b"\0", b"\1"] == [payload for _, payload, _ in own.nics[0].sent]
    assert not own.engine.stats().transfers_done
    own.nics[0].send_room = 10
    own.turn()
    assert [bytes([k]) for k in range(5)] == [payload for _, payload, _ in own.nics[0].sent]
    assert len({ctx for _, _, ctx in own.nics[0].sent}) == 5
    own.nics[0].acknowledge()
    own.turn()
    assert all(message.ok for message in sent)
    assert not machine_of(own.engine).busy()


def test_payload_is_copied_at_submit() -> None:
    """The caller reuses its buffer for the next message at once."""
    own = scripted()
    buffer = bytearray(b"first")
    own.engine.submit_send(own.engine.main_address, buffer)
    buffer[:] = b"other"
    own.turn()

    assert b"first" == own.nics[0].sent[0][1]


def test_failed_message_says_which_and_why() -> None:
    """A message lost without a word is a hang somewhere else."""
    own = scripted()
    sent = own.engine.submit_send(own.engine.main_address, b"12345")
    own.turn()
    assert "message of 5 bytes to a: pending, posted" == sent.describe()
    own.nics[0].acknowledge(Status.REMOTE_KEY)
    own.turn()
    with pytest.raises(
        FabricError, match="message of 5 bytes to a failed on NIC 0: REMOTE_KEY: as"
    ):
        sent.result()
    assert 1 == own.engine.stats().transfers_failed


def test_message_can_be_cancelled_until_a_nic_has_it() -> None:
    """Afterwards it may arrive: only its completion tells."""
    own = scripted()
    own.nics[0].send_room = 1
    first, second = (own.engine.submit_send(own.engine.main_address, b"x") for _ in range(2))
    own.turn()
    first.cancel()
    second.cancel()
    own.turn()
    assert (False, True) == (first.finished, second.cancelled)
    with pytest.raises(
        Cancelled, match="cancelled: message of 1 bytes to a: .* waiting for the NIC"
    ):
        second.result()
    own.nics[0].acknowledge()
    own.nics[0].send_room = 5
    own.turn()
    assert first.ok
    assert 1 == len(own.nics[0].sent)


def test_messages_go_by_a_nic_that_lives() -> None:
    """Messages all leave by NIC 0 until it dies."""
    own = scripted(2)
    own.nics[0].go_down()
    own.turn()
    own.engine.submit_send(own.engine.main_address, b"x")
    own.turn()

    assert (0, 1) == (len(own.nics[0].sent), len(own.nics[1].sent))


def test_cancelled_expectation_leaves_its_arrivals() -> None:
    """Counted immediates belong to whoever asks next."""
    own = scripted()
    first = own.engine.expect_imm_count(7, 5)
    own.nics[0].arrive(7, 3)
    own.turn()
    second = own.engine.expect_imm_count(7, 3)
    first.cancel()
    own.turn()

    assert (True, True) == (first.cancelled, second.ok)
    with pytest.raises(Cancelled, match="cancelled: imm 0x7: . of 5 arrived"):
        first.result()


def test_burst_of_every_kind_in_one_poll_is_sorted_out() -> None:
    """Above 24 completions the columns take over; a mixed burst must not lose its minority."""
    own = scripted(options=EngineOptions(poll_rows=256))
    sent = write(own, 60)
    message = own.engine.submit_send(own.engine.main_address, b"x")
    got = [own.engine.expect_imm_count(imm, 40) for imm in (1, 0x10001)]
    own.turn()
    nic = own.nics[0]
    for _ in range(20):
        nic.arrive(1)
        nic.finish(2)
        nic.arrive(0x10001, 2)
        nic.arrive(1, 1)
    nic.finish()
    nic.acknowledge()
    own.turn()

    assert [True, True] == [want.ok for want in got]
    assert sent.ok
    assert message.ok
    assert 80 == own.engine.stats().imms_counted
    assert () == own.engine.stats().imms_unexpected


def test_bursts_of_several_nics_are_counted_before_what_came_after_them() -> None:
    """Equal bursts are counted together: a word that came after them must not overtake them."""
    own = scripted(3)
    told: list[tuple[int, int]] = []
    own.engine.on_imm(range(1, 3), lambda imm, count: told.append((imm, count)))
    for _ in range(3):  # it takes two to know that they are equal
        told.clear()
        for nic, (imm, count) in zip(own.nics, ((1, 30), (1, 30), (2, 2)), strict=True):
            for _ in range(count):
                nic.arrive(imm)
        own.turn()
        assert sorted(imm for imm, _ in told) == [imm for imm, _ in told]
        assert 62 == sum(count for _, count in told)
    assert (1, 60) == told[0]
    assert 3 * 62 == own.engine.stats().imms_counted


def test_burst_larger_than_one_poll_is_not_cut() -> None:
    """Completions beyond the buffer come with the next step, which step() must ask for."""
    own = scripted(options=EngineOptions(poll_rows=8))
    got = own.engine.expect_imm_count(1, 100)
    for _ in range(100):
        own.nics[0].arrive(1)
    turns = 0
    while own.driver.turn():
        turns += 1
    assert got.ok
    assert turns >= 100 // 8


@pytest.mark.parametrize("errors", [0, 1])
def test_completions_of_many_batches_in_one_poll(errors) -> None:
    """Counts summed by batch must not mix batches, nor hide the one error among them."""
    own = scripted(options=EngineOptions(poll_rows=512))
    sent = [write(own, 9) for _ in range(12)]
    own.turn()
    nic = own.nics[0]
    nic.finish(50)
    nic.finish(errors, Status.LENGTH)
    nic.finish()
    own.turn()
    failed = [k for k, transfer in enumerate(sent) if transfer.error]

    assert ([5] if errors else []) == failed
    assert 12 - errors == own.engine.stats().transfers_done


def test_unknown_kinds_of_completion_are_a_bug_not_a_message() -> None:
    """Taken for a message, it would hand a user another's bytes."""
    own = scripted()
    own.nics[0]._events.append((99, 0, 1, 0, 0, 0, 0))
    with pytest.raises(AssertionError, match="unknown kind 99"):
        machine_of(own.engine).step()
    assert 99 not in {int(kind) for kind in Kind}


def test_more_commands_than_one_step_takes_keep_their_order() -> None:
    """A cancel must not overtake its submit."""
    own = scripted(options=EngineOptions(commands_max=3))
    mr, desc = own.engine.reg_mr(memory(1 << 10))
    sent = [own.engine.submit_single_write(8, (mr, 0), (desc, 0)) for _ in range(10)]
    sent[9].cancel()
    own.turn()
    assert 3 == len(own.posted)
    own.turn(5)
    assert 9 == len(own.posted)
    assert sent[9].cancelled


def test_claim_after_an_expectation_was_submitted_is_refused() -> None:
    """The expectation is in the queue only: the claim has to see it, or the worker stops on it."""
    own = scripted()
    got = own.engine.expect_imm_count(12, 1)
    with pytest.raises(BadRequest, match="imm=0xc in range.10, 20. is expected or counted already"):
        own.engine.on_imm(range(10, 20), print)
    with pytest.raises(BusyError, match="imm=0xc is expected"):
        own.engine.remove_imm(12)
    own.nics[0].arrive(12)
    own.turn()
    assert got.ok


def test_expectation_that_loses_a_race_with_a_claim_fails(monkeypatch) -> None:
    """Checked on one thread, claimed on another, taken by the worker: it must not stop that."""
    own = scripted()
    with monkeypatch.context() as moment:  # in which the claim was not there yet
        moment.setattr(ImmTable, "refuse_claimed", lambda table, imm: None)
        got = own.engine.expect_imm_count(12, 1)
    worker_of(own.engine).imms.claim(range(10, 20), print)
    own.turn()

    with pytest.raises(BadRequest, match="imm=0xc is claimed by on_imm"):
        got.result()


def test_close_settles_everything_once_in_every_stage() -> None:
    """A handle left open hangs whoever waits; one settled twice stops the worker."""
    own = scripted(2)
    calls: list[object] = []
    done = write(own)
    own.turn()
    for nic in own.nics:
        nic.finish()
    own.turn()
    half = write(own, 8)
    own.nics[0].room, own.nics[1].room = 2, 0
    own.turn()
    own.nics[0].send_room = 1
    posted, queued = (own.engine.submit_send(own.engine.main_address, b"x") for _ in range(2))
    reached = own.engine.expect_imm_count(5, 1)
    line = [own.engine.expect_imm_count(5, 9) for _ in range(2)]
    own.turn()
    own.nics[1].arrive(5, 3)  # comes out of the closing NIC's last poll
    fresh = [write(own), own.engine.expect_imm_count(6, 1)]
    fresh.append(own.engine.submit_send(own.engine.main_address, b"y"))
    everything = [half, posted, queued, reached, *line, *fresh]
    for handle in everything:
        handle.add_done_callback(calls.append)
    own.engine.close()
    own.engine.close()

    assert all(handle.finished for handle in everything)
    assert sorted(map(id, everything)) == sorted(map(id, calls))
    assert (True, True) == (done.ok, reached.ok)
    for handle in (half, queued, *line, *fresh):
        with pytest.raises(ClosedError, match="the engine was closed before this ended"):
            handle.result()
    with pytest.raises(FabricError, match="FLUSHED"):
        posted.result()
    assert all(nic.closed for nic in own.nics)
    assert not machine_of(own.engine).step()
    assert {} == worker_of(own.engine).open


def test_closing_with_all_rows_posted_reports_the_flush() -> None:
    """It is unknown whether they landed; "done" or "cancelled" would be a guess."""
    own = scripted()
    sent = write(own)
    own.turn()
    own.engine.close()
    with pytest.raises(FabricError, match="FLUSHED"):
        sent.result()
    assert 4 == sent.stats().rows_failed


def test_submit_that_crosses_with_close_is_ended() -> None:
    """Checked while open, queued when closed: nobody would take it, and its waiter would hang."""
    own = scripted()
    engine = own.engine
    mr, desc = engine.reg_mr(memory(64))
    real = machine_of(engine).check_open
    machine_of(engine).check_open = lambda what: None
    engine.close()
    seen: list[object] = []
    sent = engine.submit_single_write(8, (mr, 0), (desc, 0), on_done=seen.append)
    got = engine.expect_imm_count(1, 1, on_done=seen.append)
    machine_of(engine).check_open = real

    assert [sent, got] == seen
    for handle in (sent, got):
        with pytest.raises(ClosedError, match="the engine was closed before this ended"):
            handle.result()


def test_engine_closed_by_its_own_callback() -> None:
    """The usual reaction to a fatal message; what is left to deliver must not meet closed NICs."""
    own = scripted()
    sent = [write(own) for _ in range(3)]
    sent[0].add_done_callback(lambda _: own.engine.close())
    own.turn()
    own.nics[0].finish(4)
    own.turn(3)

    assert sent[0].ok
    assert all(transfer.finished for transfer in sent)
    assert 0 == len(own.engine.callback_errors)


def test_messages_are_handed_over_once_and_their_buffers_go_back() -> None:
    """A buffer kept, or given back before it was read, corrupts the next message."""
    own = scripted()
    seen: list[bytes] = []
    own.engine.submit_recvs(8, 2, lambda view: seen.append(bytes(view)))
    own.nics[0].receive(b"one")
    own.nics[0].receive(b"two")
    own.turn(2)

    assert [b"one", b"two"] == seen
    assert {} == own.nics[0].slots


@pytest.mark.parametrize("closes", [True, False])
def test_messages_that_come_with_the_close(closes) -> None:
    """Its reader closes the engine, or it comes out of the last poll: no closed NIC is read."""
    own = scripted()
    seen: list[bytes] = []

    def read(view: memoryview) -> None:
        seen.append(bytes(view))
        if closes:
            own.engine.close()

    own.engine.submit_recvs(8, 2, read)
    own.nics[0].receive(b"one")
    own.nics[0].receive(b"two")
    if closes:
        own.turn(2)
    own.engine.close()

    assert ([b"one"] if closes else []) == seen
    assert 0 == own.engine.stats().callback_errors


def test_message_polled_before_the_close_is_still_handed_over() -> None:
    """Its sender was told that it arrived."""
    own = scripted()
    seen: list[bytes] = []
    own.engine.submit_recvs(8, 2, lambda view: seen.append(bytes(view)))
    own.nics[0].receive(b"one")
    machine_of(own.engine).step()
    own.engine.close()

    assert [b"one"] == seen


def test_nic_that_keeps_rows_at_close_is_named() -> None:
    """A backend that breaks C14 shows here, and not as a hang months later."""
    own = scripted()
    write(own)
    own.turn()
    own.nics[0].out.clear()
    with pytest.raises(AssertionError, match="closed without returning what it had: .*paged of 4"):
        own.engine.close()


def test_an_early_expectation_needs_no_turn(monkeypatch) -> None:
    """A turn for each would cost more than all else about it; one that is due has to have it."""
    own, kicks = scripted(), []
    monkeypatch.setattr(own.engine.driver, "kick", lambda: kicks.append(True))
    early = own.engine.expect_imm_count(5, 2)
    assert not kicks
    assert 1 == own.engine.stats().expectations
    own.nics[0].arrive(5, 2)
    own.nics[0].arrive(6)
    own.turn()
    assert early.ok
    due = own.engine.expect_imm_count(6, 1)
    assert kicks
    own.turn()
    assert due.ok


def test_an_expectation_stated_while_its_immediate_is_counted_is_met(monkeypatch) -> None:
    """That step has taken its commands before: nobody else would look again, and it would hang."""
    own, stated = scripted(), []
    nic = own.nics[0]
    poll = nic.poll

    def state_then_poll(out) -> int:
        monkeypatch.setattr(nic, "poll", poll)
        stated.append(own.engine.expect_imm_count(5, 1))
        return poll(out)

    monkeypatch.setattr(nic, "poll", state_then_poll)
    nic.arrive(5)
    assert machine_of(own.engine).step(), "a driver would not turn again"
    assert machine_of(own.engine).busy()
    assert not stated[0].finished
    machine_of(own.engine).step()
    assert stated[0].ok


def test_of_two_times_an_engine_wakes_at_the_first() -> None:
    """It would sleep over a question that is due, whenever another one is due later."""
    assert [1, 1, 2, None] == [sooner(1, 2), sooner(2, 1), sooner(None, 2), sooner(None, None)]
