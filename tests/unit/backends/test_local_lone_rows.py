"""A lone short row on the local backend: which way its bytes go, and what is shown when."""

from __future__ import annotations

import os

import pytest

from tep.backends.base import Status, WriteBatch
from tep.memory.source import adapt
from tests.unit.backends.test_local_strangers import Writer, close_all, victim

__all__ = ["close_all", "victim"]  # fixtures


@pytest.mark.parametrize("way", ["its memory", "by number"])
def test_a_lone_row_shows_only_after_its_bytes_have_moved(victim, monkeypatch, way) -> None:
    """An immediate before its bytes releases a reader of old data: C6."""
    writer = Writer(victim)
    assert Status.OK == writer.write()
    out = writer.me.sender.outs[writer.peer]
    mover, name = type(out), "put"
    if way == "by number":
        os.close(out.memory)
        out.memory = -1
        mover, name = type(writer.me.sender.writes), "move_row"
    move = getattr(mover, name)
    seen = []

    def watched(*args):
        before = out.words[out.board]
        code = move(*args)
        seen.append((before, out.words[out.board], int(writer.target[0])))
        return code

    monkeypatch.setattr(mover, name, watched)
    assert Status.OK == writer.write()
    assert [(1, 1, 2)] == seen, "tail before and after the copy, and the byte after it"
    assert 2 == out.words[out.board]
    writer.close()


def test_a_lone_row_that_a_killed_peer_cannot_see_is_not_called_done(victim) -> None:
    """Its bytes go into memory of a process that has ended: whoever counts on them is wrong."""
    writer = Writer(victim)
    assert Status.OK == writer.write()
    src, lkey, dst = adapt(writer.source).ptr, writer.lkey, adapt(writer.target).ptr
    victim.die()
    row = WriteBatch(1, writer.peer, src, lkey, dst, writer.rkey, 8, None, 2)
    assert 1 == writer.me.post(row, 0, 1)

    assert Status.UNREACHABLE == writer.ended()


def test_a_row_that_the_peers_memory_does_not_take_goes_by_number(victim) -> None:
    """Kernels may forbid such writes, a process may have replaced itself: the next way decides."""
    writer = Writer(victim)
    assert Status.OK == writer.write()
    out = writer.me.sender.outs[writer.peer]
    os.close(out.memory)
    out.memory = os.open("/proc/self/mem", os.O_RDONLY)
    assert Status.OK == writer.write()
    assert [2] * 8 == writer.target.tolist()
    assert -1 == out.memory
    writer.close()
