"""tep.compat.mooncake: Mooncake's calls and answers, between engines of one process."""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import pytest

from tep.compat.mooncake import TransferEngine, TransferNotify, TransferOpcode

WAIT_S = 60.0
NBYTES = 1 << 16


class Half:
    """An engine, its memory, and where others find it."""

    def __init__(self, seed):
        self.engine = TransferEngine()
        assert 0 == self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "")
        self.name = f"127.0.0.1:{self.engine.get_rpc_port()}"
        self.memory = np.random.default_rng(seed).integers(0, 256, NBYTES, np.uint8)
        self.at = self.memory.ctypes.data
        assert 0 == self.engine.register_memory(self.at, NBYTES)


@pytest.fixture(params=["local", "loopback"])
def pair(request, monkeypatch):
    monkeypatch.setenv("TEP_NIXL_BACKEND", request.param)
    halves = [Half(seed) for seed in (1, 2)]
    yield halves
    for half in halves:
        half.engine.close()


def test_one_piece(pair):
    """SGLang's and vLLM's way: sync, by address."""
    a, b = pair
    assert b.at == a.engine.get_first_buffer_address(b.name)
    assert a.at == a.engine.get_first_buffer_address(a.name)
    assert 0 == a.engine.transfer_sync_write(b.name, a.at, b.at + 512, 256)
    assert (a.memory[:256] == b.memory[512:768]).all()
    assert 0 == a.engine.transfer_sync_read(b.name, a.at + 4096, b.at, 128)
    assert (a.memory[4096:4224] == b.memory[:128]).all()


@pytest.mark.parametrize("how", ["sync", "async", "submit"])
def test_many_pieces(pair, how):
    """A batch is one transfer."""
    a, b = pair
    here, there = ([at + 1024 * k for k in range(50)] for at in (a.at, b.at))
    lengths = [100 + k for k in range(50)]
    match how:
        case "sync":
            assert 0 == a.engine.batch_transfer_sync_write(b.name, here, there, lengths)
        case "async":
            batch = a.engine.batch_transfer_async_write(b.name, here, there, lengths)
            assert batch
            assert 0 == a.engine.get_batch_transfer_status([batch])
        case _:
            for piece in zip(here, there, lengths, strict=True):
                batch, end_s = a.engine.transfer_submit_write(b.name, *piece), time.monotonic()
                while (status := a.engine.transfer_check_status(batch)) == 0:
                    assert time.monotonic() < end_s + WAIT_S
                assert 1 == status
    for k, length in enumerate(lengths):
        part = slice(1024 * k, 1024 * k + length)
        assert (a.memory[part] == b.memory[part]).all()


def test_notifications(pair):
    """Checkpoint-engine and SGLang are told with the last batch."""
    a, b = pair
    told, op = TransferNotify("bench", "7"), TransferOpcode.Write
    assert 0 == a.engine.batch_transfer_sync(b.name, [a.at], [b.at], [64], op, told)
    found, end_s = [], time.monotonic() + WAIT_S
    while not found and time.monotonic() < end_s:
        found = b.engine.get_notifies()
    assert [told] == found


def test_memory_that_is_registered_later_is_found(pair):
    """The peer's list is asked for again."""
    a, b = pair
    assert 0 == a.engine.transfer_sync_write(b.name, a.at, b.at, 8)
    more = b.engine.allocate_managed_buffer(4096)
    assert 0 == b.engine.write_bytes_to_buffer(more, b"hello", 5)
    assert 0 == a.engine.transfer_sync_read(b.name, a.at, more, 5)
    assert b"hello" == a.engine.read_bytes_from_buffer(a.at, 5)
    assert 0 == b.engine.free_managed_buffer(more, 4096)


def test_errors_are_numbers(pair, monkeypatch):
    """Programs look at the status."""
    a, b = pair
    monkeypatch.setenv("MC_TRANSFER_TIMEOUT", "5")
    assert -1 == TransferEngine().initialize("h", "127.0.0.1:2379", "tcp", "")
    assert 0 == a.engine.send_probe(b.name)
    assert -1 == a.engine.send_probe("127.0.0.1:1")
    assert -1 == a.engine.transfer_sync_write("127.0.0.1:1", a.at, b.at, 8)
    assert -1 == a.engine.transfer_sync_write(b.name, a.at, b.at + NBYTES, 8)
    assert 0 == a.engine.batch_transfer_async_read(b.name, [a.at], [1], [8])
    assert -1 == a.engine.get_batch_transfer_status([0])
    assert -1 == a.engine.transfer_check_status(99)
    assert -1 == a.engine.unregister_memory(1)
    assert 0 == a.engine.batch_register_memory([a.at + 64], [64])
    assert 0 == a.engine.batch_unregister_memory([a.at + 64, a.at])
    assert -1 == a.engine.transfer_sync_write(b.name, a.at, b.at, 8)
    monkeypatch.setenv("TEP_NIXL_BACKEND", "none such")
    assert -1 == TransferEngine().initialize("h", "P2PHANDSHAKE", "tcp", "")


@pytest.mark.slow
def test_programs_import_it_unmodified():
    """`from mooncake.engine import TransferEngine` is all that they know."""
    code = "from mooncake.engine import TransferEngine as T; "
    code += "print(T.TransferOpcode.Write, T.__module__)"
    command = [sys.executable, "-m", "tep.compat.mooncake", "--", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)

    assert "1 tep.compat.mooncake" == done.stdout.strip()
