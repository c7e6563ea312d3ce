"""Fetch compressed KV over a slow network: decompressed on the GPU that decodes, or beside it.

Idea of ShadowServe: a prefix's KV is stored compressed; a SmartNIC fetches and decompresses it, so
that no decompression disturbs the tokens of running requests, nor they it.

Measures: time per output token while prefixes keep coming (TPOT, loaded) and time to the first
token (TTFT), at 10, 20 and 40 Gb/s. gpu: chunks are decompressed on the GPU, which does all that is
asked of it at once, each at its share. nic: a unit of the SmartNIC does it, slower, and disturbs
nobody. Published (arXiv 2509.16857, abstract): TPOT up to 2.2 times lower, TTFT up to 1.38 times
shorter at 20 Gb/s or less. Leaves out: how the KV is compressed and what is lost by it, the NIC's
memory, lookup. Guessed: even shares on the GPU, both rates of decompression, the time of a token.

    python notebooks/examples/compressed_prefix_kv.py [--requests N]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from dataclasses import replace

import tep
from tep.sim import load_profile

KV_TOKEN_BYTES = 128 * 1024  # Llama-3.1-8B: 32 layers, K and V of 8 heads of 128, bf16
TOKENS, CHUNK_TOKENS = 8192, 256
RATIO = 4.0  # a compressed chunk is so many times smaller
TOKEN_S = 0.02  # one step of the running batch
GPU_BYTES_S, NIC_BYTES_S = 15e9, 11e9  # of decompressed bytes
SLICE_S = 0.5e-3
PUBLISHED = {"TPOT": 2.2, "TTFT": 1.38}


class Gpu:
    """Does all jobs at once, each at its share of the time."""

    def __init__(self) -> None:
        self.jobs = 0

    async def work(self, seconds: float) -> None:
        """Take so many seconds of the whole GPU."""
        self.jobs += 1
        while seconds > 1e-9:
            part = min(seconds, SLICE_S)
            await asyncio.sleep(part * self.jobs)
            seconds -= part
        self.jobs -= 1


class Server:
    """A GPU that decodes without end, and prefixes that come over one NIC."""

    def __init__(self, cluster: tep.sim.Cluster, where: str) -> None:
        self.cluster, self.where, self.gpu = cluster, where, Gpu()
        self.store, self.host = cluster.engines
        memory = (1 << 40, 1 << 40, "cpu")
        self.mr, self.desc = self.store.reg_mr(memory)[0], self.host.reg_mr(memory)[1]
        self.nic = asyncio.Lock()  # one unit on the SmartNIC
        self.token_s: list[float] = []
        self.first_s: list[float] = []

    async def decode(self) -> None:
        """Make tokens of the running requests, one after the other."""
        while True:
            begun_us = self.cluster.now_us
            await self.gpu.work(TOKEN_S)
            self.token_s.append((self.cluster.now_us - begun_us) / 1e6)

    async def unpack(self) -> None:
        """Decompress one chunk."""
        nbytes = CHUNK_TOKENS * KV_TOKEN_BYTES
        if self.where == "gpu":
            await self.gpu.work(nbytes / GPU_BYTES_S)
        else:
            async with self.nic:
                await asyncio.sleep(nbytes / NIC_BYTES_S)

    async def serve(self, imm: int) -> None:
        """Fetch a prefix, each chunk decompressed while the next one comes; then a first token."""
        begun_us, nbytes = self.cluster.now_us, int(CHUNK_TOKENS * KV_TOKEN_BYTES / RATIO)
        for _ in range(TOKENS // CHUNK_TOKENS):
            self.store.submit_single_write(nbytes, (self.mr, 0), (self.desc, 0), imm=imm)
        for _ in range(TOKENS // CHUNK_TOKENS):
            await self.host.expect_imm_count(imm, 1)
            await self.unpack()
        await self.gpu.work(TOKEN_S)
        self.first_s.append((self.cluster.now_us - begun_us) / 1e6)


def run(gbps: int, where: str, requests: int) -> tuple[float, float]:
    """Mean seconds of a token while prefixes come, and mean seconds to a first token."""
    bps = gbps * 10**9
    profile = replace(load_profile("cx7_400"), link_bps=bps, wire_bps=bps)
    with tep.sim.Cluster(2, profile=profile, move_bytes=False) as cluster:
        server = Server(cluster, where)

        async def main() -> None:
            decoding = asyncio.ensure_future(server.decode())
            for request in range(requests):  # one behind the other: the network is never idle
                await server.serve(1 + request)
            decoding.cancel()

        cluster.run(main())
        tokens, firsts = server.token_s, server.first_s
        return sum(tokens) / len(tokens), sum(firsts) / len(firsts)


def measure(requests: int = 4) -> dict[int, dict[str, tuple[float, float]]]:
    """Gb/s -> where it is decompressed -> seconds of a token, seconds to the first token."""
    return {
        gbps: {where: run(gbps, where, requests) for where in ("gpu", "nic")}
        for gbps in (10, 20, 40)
    }


def main(argv: list[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=4)
    args = parser.parse_args(argv)
    print(f"{TOKENS:,} tokens of {KV_TOKEN_BYTES // 1024} KiB, {RATIO:g} times compressed")
    print(f"{'':10}{'TPOT ms, gpu':>14}{'nic':>8}{'times':>8}", end="")
    print(f"{'TTFT ms, gpu':>16}{'nic':>8}{'times':>8}")
    for gbps, found in measure(args.requests).items():
        (token, first), (token_nic, first_nic) = found["gpu"], found["nic"]
        row = f"{gbps:3} Gb/s  {1e3 * token:14.1f}{1e3 * token_nic:8.1f}{token / token_nic:8.2f}"
        print(f"{row}{1e3 * first:16.0f}{1e3 * first_nic:8.0f}{first / first_nic:8.2f}")
    print(f"published, up to, at 20 Gb/s or less: {PUBLISHED['TPOT']} and {PUBLISHED['TTFT']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
