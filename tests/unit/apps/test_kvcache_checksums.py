"""Checksums of KvSender's rows: what a NIC moved wrong fails the load, and is named."""

from __future__ import annotations

import asyncio
import re

import msgspec
import numpy as np

from tep import sim
from tep.apps.kvcache import KvBlocks, KvReceiver, KvSender, Patience
from tep.sim import chaos_target

BLOCKS, RUN = 6, 64
WAIT_S = 10.0


class Pair:
    """A sender and a receiver of two layers on a fabric that keeps its promises, but for a bug."""

    def __init__(self, cluster: sim.Cluster, *, checksums: bool = True, gap: int = 0) -> None:
        self.arrays, caches = [], []
        for engine in cluster.engines:
            cache, layers = KvBlocks(engine), []
            for layer in range(2):
                layers.append(np.zeros((BLOCKS, 1 + gap, RUN + gap), np.uint8)[:, :, :RUN])
                cache.add(f"{layer}", layer, layers[-1], "btd")
            caches.append(cache)
            self.arrays.append(layers)
        self.sender = KvSender(caches[0], patience=Patience(cancel_s=1e-4), checksums=checksums)
        self.receiver = KvReceiver(caches[1], patience=Patience(cancel_s=1e-4))
        self.sender.connect(caches[1].card())

    async def request(self, name: str, value: int):
        """Write three blocks of both layers; return the load once it is over."""
        load = self.receiver.expect(name, [[1, 3, 5]], timeout_s=WAIT_S)
        send = self.sender.begin(name, [[0, 2, 4]], load.ticket)
        for layer, array in enumerate(self.arrays[0]):
            array[:] = value + layer
            send.layer_done(layer)
        await load.wait_async(WAIT_S)
        await send.wait_async(WAIT_S)
        return load


def play(main, **how):
    """Run it with a pair on a calm fabric."""
    with sim.Cluster(2, nics=1, seed=1, chaos=sim.Chaos(seed=1)) as cluster:
        return cluster.run(main(Pair(cluster, **how)))


def plant_stale_reads(monkeypatch) -> None:
    """Plant a NIC that goes on to send what a region held when it was read first.

    That is how GPUDirect fails without a word, and how a copy looks that had not ended.
    """
    kept = {}
    land = chaos_target.ChaosTarget.land

    def stale(self, fragment):
        row, start, stop, _ = fragment
        if row.region is not None:
            old = kept.setdefault(row.region, bytes(row.region.view))
            fragment = (row, start, stop, old[row.at + start : row.at + stop])
        land(self, fragment)

    monkeypatch.setattr(chaos_target.ChaosTarget, "land", stale)


def test_equal_checksums_end_as_loads_without_them():
    """A check that costs answers would stay off for ever."""

    async def main(pair):
        loads = [await pair.request(f"r{k}", 10 + k) for k in range(3)]
        assert all((there[[1, 3, 5]] == 12 + k).all() for k, there in enumerate(pair.arrays[1]))
        return loads

    for checksums in (True, False):
        assert all(load.ok for load in play(main, checksums=checksums))


def test_a_nic_that_sends_stale_bytes_fails_the_load_by_name(monkeypatch):
    """Garbage tokens: the counts are complete, and the cache holds another prompt's KV."""
    plant_stale_reads(monkeypatch)

    async def main(pair):
        first, second = await pair.request("r0", 10), await pair.request("r1", 20)
        return first, second, pair.arrays[1][0][1, 0, 0], pair.receiver.idle

    first, second, byte, idle = play(main)
    assert first.ok
    assert not second.ok
    assert 10 == byte  # the first request's
    assert ((1, 3, 5),) == second.failed_blocks
    assert re.search(
        r"checksums of '0' differ: 3 rows of 64 bytes in region [01] from offset 64 on; written "
        r"0x[0-9a-f]{8}, here 0x[0-9a-f]{8}\. .*tep doctor",
        second.reason,
    )
    assert idle

    _, second, byte, _ = play(main, checksums=False)
    assert second.ok
    assert 10 == byte  # and nobody knows


def test_a_sender_that_tells_no_checksums_is_not_believed():
    """The claim announced them: a load without them would be a load that nobody has checked."""

    async def main(pair):
        tell = pair.sender._tell

        def half(claim):
            claim.sums.pop("1", None)
            tell(claim)

        pair.sender._tell = half
        return await pair.request("r", 1)

    load = play(main)
    assert "checksums of '1' differ" in load.reason
    assert not play(main).ok


def test_rows_that_do_not_fit_are_refused_before_a_byte_is_written():
    """What a sender says is a claim: rows across tokens would be read beyond the region."""

    async def main(pair):
        covered = pair.receiver._covered

        def odd(load, message):
            rows = dict.fromkeys(message.rows, 2 * RUN)
            return covered(load, msgspec.structs.replace(message, rows=rows))

        pair.receiver._covered = odd
        load = pair.receiver.expect("r", [[1]], timeout_s=0.01)
        send = pair.sender.begin("r", [[2]], load.ticket)
        await load.wait_async(WAIT_S)
        return load, send.reason

    load, why = play(main, gap=1)
    assert not load.ok
    assert "1 heads of '0' in rows of 128 bytes" in why


def test_checksums_that_never_come_are_named_at_the_deadline(monkeypatch):
    """A failed load whose immediates are all counted would send its reader to the wrong place."""
    monkeypatch.setattr(KvSender, "_tell", lambda *_: None)

    async def main(pair):
        load = pair.receiver.expect("r", [[1]], timeout_s=0.01)
        send = pair.sender.begin("r", [[2]], load.ticket)
        for layer in range(2):
            send.layer_done(layer)
        while load.state == "open":
            await asyncio.sleep(1e-3)
            pair.receiver.poll()
        return load.reason

    assert "its checksums did not come" in play(main)
