"""The program of one rank in one of two guests: pages both ways, each byte compared. Not a test.

    python -m tests.support.two_kernels BACKEND [endless | rounds]

BACKEND is "tcp", "verbs", or both with a comma between. Each rank writes to the other, and what has
arrived is compared. With "endless" rank 0 writes for as long as it goes well, and says how it
ended; a transfer that failed is tried again a few times, since engines connect anew. With "rounds"
both write again and again, and say of each round whether all bytes came or what failed. "kvcache"
in place of a backend: rank 0 is a KvCache's launcher, the others are its prefiller and its decoder,
over tcp.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

import numpy as np

import tep
from tep.rendezvous.launch import own_address, place_here

PAGE_BYTES, PAGES = 4096, 512
TRIES = 6
ROUNDS, LONG_PAGE_BYTES = 16, 65536
SLOW: dict[str, Any] = {"peer_timeout_s": 20.0}  # a busy host stops both guests


def main(argv: list[str]) -> int:
    """Meet, exchange, compare."""
    place = place_here()
    assert place is not None
    if argv[0] == "kvcache":
        return _kvcache(place)
    with tep.rendezvous.join(place, timeout_s=200) as ranks:
        for backend in argv[0].split(","):
            with _opened(backend, place, timeout=14 if argv[1:] else 18) as engine:
                _say(f"met: {engine.explain()}")
                _play(engine, ranks, argv[1:])
    return 0


def _opened(backend, place, timeout) -> tep.TransferEngine:
    if backend == "verbs":
        return tep.TransferEngine.open("verbs", nics=2, timeout=timeout)
    address = own_address(place)
    return tep.TransferEngine.open("libfabric", provider="tcp", nics=[address] * 2, **SLOW)


def _play(engine, ranks, how) -> None:
    memory = np.zeros((2, PAGES, PAGE_BYTES), np.uint8)
    memory[0] = _bytes(ranks.rank, memory[0].shape)
    mr, desc = engine.reg_mr(memory)
    raw = ranks.all_gather(desc.to_bytes(), timeout_s=200)
    other = tep.MrDesc.from_bytes(raw[1 - ranks.rank])
    if how == ["rounds"]:
        _rounds(engine, ranks)
    elif how:
        if ranks.rank:
            ranks.barrier(timeout_s=1000)
        _write_on(engine, mr, other)
    else:
        _exchange(engine, mr, other, memory, ranks.rank)
        ranks.barrier(timeout_s=200)
        _say("all bytes are right")


def _exchange(engine, mr, other, memory, rank) -> None:
    places = np.random.default_rng(7).permutation(PAGES)
    got = engine.expect_imm_count(42, PAGES)
    source = tep.Pages(range(PAGES))
    target = tep.Pages(PAGES + places)
    sent = engine.submit_paged_writes(PAGE_BYTES, (mr, source), (other, target), imm=42)
    got.wait(200)
    sent.wait(200)
    assert (memory[1, places] == _bytes(1 - rank, memory[0].shape)).all(), "pages differ"


def _rounds(engine, ranks) -> None:
    """Write pages of many packets each way; a failure ends its own round only."""
    pages = PAGES * PAGE_BYTES // LONG_PAGE_BYTES
    memory = np.zeros((2, pages, LONG_PAGE_BYTES), np.uint8)
    mr, desc = engine.reg_mr(memory)
    raw = ranks.all_gather(desc.to_bytes(), timeout_s=500)
    other = tep.MrDesc.from_bytes(raw[1 - ranks.rank])
    here, there = tep.Pages(range(pages)), tep.Pages(range(pages, 2 * pages))
    for number in range(ROUNDS):
        mine, theirs = 2 * number + ranks.rank, 2 * number + 1 - ranks.rank
        memory[0], memory[1] = _bytes(mine, memory[0].shape), 0
        ranks.barrier(timeout_s=500)
        got = engine.expect_imm_count(theirs, pages)
        sent = engine.submit_paged_writes(LONG_PAGE_BYTES, (mr, here), (other, there), imm=mine)
        failures = []
        for handle in (sent, got):
            try:
                handle.wait(300)
            except tep.FabricError as error:
                failures.append(f"FabricError: {error}")
        whole = bool((memory[1] == _bytes(theirs, memory[1].shape)).all())
        assert failures or whole, f"round {number} was counted, and bytes of it are missing"
        _say(f"round {number}: {', '.join(failures) or 'all bytes are right'}")
    ranks.barrier(timeout_s=500)


def _kvcache(place) -> int:
    from tep.apps.kvcache.cluster import RankedCluster, Shape, work_as_rank
    from tep.apps.kvcache.toy import ToyModel

    options = {"provider": "tcp", "nics": [own_address(place)], **SLOW}
    shape = Shape(prefillers=1, decoders=1, options=options, silent_s=60.0, start_s=500.0)
    if place.rank:
        work_as_rank(shape, place)
        return 0
    prompts = [np.arange(n, dtype=np.int32) for n in (1, 40)]

    async def run():
        async with RankedCluster(shape, place) as cluster:
            return list(await cluster.generate(prompts, 8))

    model = ToyModel(seed=shape.seed)
    for prompt, done in zip(prompts, asyncio.run(run()), strict=True):
        assert done.ok, done
        assert list(done.tokens) == model.alone(prompt, 8)
    _say("as one process says alone")
    return 0


def _write_on(engine, mr, other) -> None:
    pages = tep.Pages(range(PAGES)), tep.Pages(range(PAGES, 2 * PAGES))
    rounds = failed = 0
    while failed < TRIES:
        began_s = time.monotonic()
        try:
            engine.submit_paged_writes(PAGE_BYTES, (mr, pages[0]), (other, pages[1])).wait(100)
        except tep.FabricError as error:
            failed += 1
            took_s = time.monotonic() - began_s
            _say(f"failed after {rounds} rounds, in {took_s:.1f} s: FabricError: {error}")
            continue
        rounds, failed = rounds + 1, 0
        if rounds % 3 == 0:
            _say(f"{rounds} rounds")


def _bytes(seed, shape):
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
