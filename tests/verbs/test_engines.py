"""Whole engines over real libibverbs: the engine's contract, processes, asyncio, a file."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import os
import time
from pathlib import Path

import numpy as np
import pytest

import tep
from tep.base.units import KiB, MiB
from tep.base.wire import MrDesc
from tep.testing.contract_engine import EngineContract, OpenEngines
from tests.support.descriptors import open_descriptors
from tests.support.inside import nics_of
from tests.verbs.rig import Peer, buffer, engine, noise, pages, pair, turn_until


def device_engines(devices):
    """Engines of two NICs each, on one pair of devices after the other."""
    numbers = itertools.count()

    def opened(name=None):
        number = next(numbers)
        at = 2 * number % len(devices)
        return engine(name or f"e{number}-{time.time_ns()}", (devices * 2)[at : at + 2])

    return OpenEngines(opened, opened)


class TestEngines(EngineContract):
    """Worker threads, two NICs an engine."""

    @pytest.fixture
    def engines(self, devices):
        with device_engines(devices) as engines:
            yield engines


# Two processes take turns on one virtual CPU: a row may be long under way without being lost.
PATIENT = {"timeout": 17, "retry_cnt": 6}


def receive(pipe, devices, nbytes, count):
    """The other process: offers memory, waits for its immediates, says what it got."""
    with engine("receiver", devices, **PATIENT) as here:
        target = buffer(nbytes)
        _, desc = here.reg_mr(target)
        got = here.expect_imm_count(7, count)
        pipe.send(desc.to_bytes())
        got.wait(60)
        pipe.send(hashlib.sha256(target).digest())
        pipe.recv()


def test_two_processes_move_16_mib_striped_over_four_nics(devices):
    """The ends of one process may share memory by accident; two processes share only the wire."""
    nbytes, page = 16 * MiB, 64 * KiB
    with Peer(receive, devices[4:8], nbytes, nbytes // page) as peer:
        source = noise(nbytes)
        with engine("sender", devices[:4], **PATIENT) as here:
            mr, _ = here.reg_mr(source)
            desc = MrDesc.from_bytes(peer.ask())
            all_pages = pages(nbytes // page)
            sent = here.submit_paged_writes(page, (mr, all_pages), (desc, all_pages), imm=7)
            sent.wait(60)
            digest = peer.ask()
            carried = [nic.nbytes for nic in here.stats().nics]
            peer.pipe.send(None)

    assert hashlib.sha256(source).digest() == digest
    assert [nbytes // 4] * 4 == carried


def test_asyncio_awaits_transfers_and_counts(devices):
    """The documented way to write programs: no callback, no blocking wait."""

    async def main(a, b):
        source, target = noise(MiB), buffer(MiB)
        (mr, _), (_, desc) = a.reg_mr(source), b.reg_mr(target)
        got = b.expect_imm_count(3, 16)
        sent = a.submit_paged_writes(64 * KiB, (mr, pages(16)), (desc, pages(16)), imm=3)
        async with asyncio.timeout(20):
            await asyncio.gather(_await(sent), _await(got))
        return bool((source == target).all())

    with engine("a", devices[:2]) as a, engine("b", devices[2:4]) as b:
        assert asyncio.run(main(a, b))


async def _await(handle):
    await handle


def test_a_real_file_arrives_whole(devices):
    """The demo's claim, on a real provider: the SHA-256 agrees, by counted immediates alone."""
    path = max(Path(json.__file__).parents[1].glob("*.py"), key=lambda file: file.stat().st_size)
    data = path.read_bytes()
    page = 4 * KiB
    count = -(-len(data) // page)
    with pair(devices[:2], devices[4:8]) as (a, b):
        source, target = buffer(count * page), buffer(count * page)
        source[: len(data)] = np.frombuffer(data, np.uint8)
        (mr, _), (_, desc) = a.reg_mr(source), b.reg_mr(target)
        shuffled = tep.Pages(np.random.default_rng(1).permutation(count))
        expected = tep.count_imms(tep.Paged(count), 2, 4)
        got = b.expect_imm_count(9, expected)
        a.submit_paged_writes(page, (mr, shuffled), (desc, shuffled), imm=9)
        got.wait(60)

    assert hashlib.sha256(data).digest() == hashlib.sha256(target[: len(data)]).digest()


def test_engines_come_and_go(devices):
    """Elastic decoders join and leave for days: nothing may pile up at who stays."""
    warm, visits = (10, 100) if os.environ.get("TEP_LONG") else (5, 10)
    ring = []
    with engine("hub", devices[:1], ring) as hub:
        _, desc = hub.reg_mr(buffer(4 * KiB))

        def visit(k):
            with engine(f"guest{k}", devices[1:2], ring) as visitor:
                mr, _ = visitor.reg_mr(buffer(4 * KiB))
                got = hub.expect_imm_count(5, 1)
                visitor.submit_single_write(64, (mr, 0), (desc, 0), imm=5).wait(20)
                got.wait(20)
            for _ in range(10):
                hub.driver.turn()

        for k in range(warm):
            visit(k)
        before = _holds(hub)
        for k in range(warm, warm + visits):
            visit(k)

        assert before == _holds(hub)


def _holds(hub):
    """Count descriptors of this process, and queue pairs of the hub once the guests' are gone."""
    turn_until(hub, lambda: not nics_of(hub)[0].peers.draining.conns)
    return open_descriptors(), len(nics_of(hub)[0].peers.conns)
