"""The texts of public objects; test_habits checks that each has one."""

from __future__ import annotations

import pickle

import pytest

import tep
from tests.support.pairs import pair


def objects(p) -> dict[str, tuple[object, str]]:
    """One of each, with words that its repr must hold."""
    sent = p.a.submit_single_write(64, (p.mr, 0), (p.desc, 0), 7)
    p.settle(sent)
    group = p.a.add_peer_group([p.b.main_address])
    removal = p.b.remove_peer(p.more("c", 1).main_address)
    return {
        "Transfer": (sent, "single of 1 rows, 64 bytes to b: done"),
        "Expectation": (p.b.expect_imm_count(9, 3), "imm 0x9: 0 of 3 arrived; pending"),
        "Message": (
            p.a.submit_send(p.b.main_address, b"hello"),
            "message of 5 bytes to b: pending",
        ),
        "Removal": (removal, "removal of c (epoch "),
        "PeerGroup": (group, "1 peers: b"),
        "PeerWatch": (p.a.watch_peer(p.b.main_address), "alive since"),
        "Watcher": (p.b.alloc_uvm_watcher(print), "word 0 at 0x"),
        "MrHandle": (p.mr, "region 1, 65536 bytes, cpu, 0 transfers in flight"),
        "TransferEngine": (p.a, "a@loopback/1 NICs, epoch"),
        "Prepared": (
            p.a.prepare_barrier([p.desc]),
            "barrier of 1 rows, 0 bytes to b",
        ),
    }


def test_each_says_what_one_wants_to_know() -> None:
    """A log line without name, size and state has to be asked for again."""
    with pair() as p:
        for name, (found, words) in objects(p).items():
            assert repr(found).startswith(f"{name}(")
            assert words in repr(found)
            assert len(repr(found)) < 400


def test_what_travels_may_be_pickled() -> None:
    """Addresses and descriptors are values: who has a pipe for objects may use it."""
    with pair() as p:
        for value in (p.a.main_address, p.desc):
            assert value == pickle.loads(pickle.dumps(value))  # noqa: S301  # our own bytes
            assert repr(value) == f"{type(value).__name__}({value})"


def test_a_second_callback_for_messages_is_refused() -> None:
    """The first would be told of no message any more, and nobody would know why."""
    with pair() as p:
        seen: list[bytes] = []

        def take(view: memoryview) -> None:
            seen.append(bytes(view))

        p.b.submit_recvs(64, 2, take)
        p.b.submit_recvs(64, 2, take)
        with pytest.raises(tep.BadRequest, match=r"messages go to .*take.* already, with"):
            p.b.submit_recvs(64, 2, lambda view: None)
        p.settle(p.a.submit_send(p.b.main_address, b"hello"))
        p.quiet(3)
        assert [b"hello"] == seen
