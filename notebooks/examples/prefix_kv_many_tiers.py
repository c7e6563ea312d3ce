"""Fetch the KV of a prompt's prefix that lies in many tiers: peers' memory, disks, a remote store.

Idea of LMCache (a KV cache of several tiers) and ShadowServe (compressed KV, fetched and
decompressed in a pipeline beside the GPU).

Measures: time until the last page of the prefix has arrived, when tiers are asked one after the
other, when all are asked at once, and when pages are stored compressed and decompressed on arrival.
Leaves out: lookup, eviction, what decompression takes from the GPU, the loss by compression.
A tier is a rate and a delay in front of a simulated NIC; all numbers of tiers are guesses.

    python notebooks/examples/prefix_kv_many_tiers.py [--pages N] [--profile cx7_400]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from dataclasses import dataclass

import tep

PAGE_BYTES = 64 * 1024
CHUNK_PAGES = 64  # a tier reads so many pages, then writes them while it reads the next
RATIO = 2.0  # a compressed page is so many times smaller
DECOMPRESS_BYTES_S = 30e9  # of decompressed bytes, at the receiver


@dataclass(frozen=True)
class Tier:
    """Where pages lie: the share of the prefix, the delay of a read, bytes a second."""

    name: str
    share: float
    delay_s: float
    bytes_s: float


TIERS = (
    Tier("a peer's memory", 0.5, 0.0, 100e9),
    Tier("a peer's disk", 0.3, 100e-6, 12e9),
    Tier("a remote store", 0.2, 1e-3, 5e9),
)


async def serve(owner, mr, desc, tier: Tier, pages: range, ratio: float, imm: int) -> None:
    """Read a tier chunk by chunk, and write each chunk to the receiver while the next is read."""
    nbytes = int(PAGE_BYTES / ratio)
    await asyncio.sleep(tier.delay_s)
    sent = []
    for start in range(pages.start, pages.stop, CHUNK_PAGES):
        chunk = range(start, min(start + CHUNK_PAGES, pages.stop))
        await asyncio.sleep(len(chunk) * nbytes / tier.bytes_s)
        where = tep.Pages(list(chunk))
        sent.append(owner.submit_paged_writes(nbytes, (mr, where), (desc, where), imm=imm))
    for transfer in sent:
        await transfer


async def receive(engine, npages: int, ratio: float, imm: int, unit: asyncio.Lock) -> None:
    """Count a tier's pages, chunk by chunk; one unit decompresses the chunks of all tiers."""
    left = npages
    while left:
        chunk = min(left, CHUNK_PAGES)
        await engine.expect_imm_count(imm, chunk)
        if ratio > 1.0:
            async with unit:
                await asyncio.sleep(chunk * PAGE_BYTES / DECOMPRESS_BYTES_S)
        left -= chunk


def fetch(npages: int, profile: str, *, at_once: bool, ratio: float = 1.0) -> float:
    """Microseconds until the whole prefix is here."""
    with tep.sim.Cluster(1 + len(TIERS), profile=profile, move_bytes=False) as cluster:
        receiver, *owners = cluster.engines
        memory = (1 << 40, npages * PAGE_BYTES, "cpu")
        regions = [engine.reg_mr(memory) for engine in cluster.engines]
        desc = regions[0][1]
        unit = asyncio.Lock()

        async def tier_of(k: int, pages: range) -> None:
            imm = 1 + k
            mr = regions[1 + k][0]
            await asyncio.gather(
                serve(owners[k], mr, desc, TIERS[k], pages, ratio, imm),
                receive(receiver, len(pages), ratio, imm, unit),
            )

        async def main() -> float:
            start, jobs = 0, []
            for k, tier in enumerate(TIERS):
                end = npages if k == len(TIERS) - 1 else start + int(npages * tier.share)
                jobs.append(tier_of(k, range(start, end)))
                start = end
            if at_once:
                await asyncio.gather(*jobs)
            else:
                for job in jobs:
                    await job
            return cluster.now_us

        return cluster.run(main())


def measure(npages: int = 4096, profile: str = "cx7_400") -> dict[str, float]:
    """Microseconds by way of fetching."""
    return {
        "one tier after the other": fetch(npages, profile, at_once=False),
        "all tiers at once": fetch(npages, profile, at_once=True),
        "all at once, compressed": fetch(npages, profile, at_once=True, ratio=RATIO),
    }


def main(argv: list[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pages", type=int, default=4096)
    parser.add_argument("--profile", default="cx7_400")
    args = parser.parse_args(argv)
    total = args.pages * PAGE_BYTES
    print(f"{args.pages:,} pages of {PAGE_BYTES // 1024} KiB, {args.profile}")
    for tier in TIERS:
        print(f"  {tier.share:4.0%} in {tier.name}: {tier.bytes_s / 1e9:.0f} GB/s")
    for way, us in measure(args.pages, args.profile).items():
        print(f"{way:26} {us / 1e3:8.2f} ms  {total / us / 1e3:6.1f} GB/s of KV")
    return 0


if __name__ == "__main__":
    sys.exit(main())
