"""Clients of NIXL that others wrote, unchanged, on tep over tcp: LMCache's channel, Dynamo's.

Run by scripts/integrations.py in an environment that has LMCache and Dynamo's runtime. It takes the
environment variables from the how-to, with this machine's loopback for the network, and starts two
processes of each client as the how-to does. Bytes are compared, and one process is killed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from vllm_nixl import free_port

ROOT = Path(__file__).resolve().parents[2]
NBYTES, PAGE, WAIT_S = 8 << 20, 4096, 120.0


def exports() -> str:
    """Return the line of the how-to that names the backend, for this machine."""
    page = (ROOT / "tep" / "compat" / "nixl" / "README.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^export TEP_NIXL_BACKEND=libfabric .*$", page, re.MULTILINE)
    return line.replace("10.0.0.0/8", "127.0.0.1")


def say(what: object) -> None:
    """Tell the other process, in a line with a mark."""
    sys.stdout.write(f"@@{json.dumps(what)}\n")
    sys.stdout.flush()


def hear() -> object:
    """Wait for a line of the other process."""
    return json.loads(sys.stdin.readline())


# ------------------------------------------------------------------ LMCache


def lmcache(side: str, ports: list[int]) -> None:
    """One process of LMCache's peer-to-peer channel: the owner offers pages, the reader reads."""
    import torch
    from lmcache.v1.distributed.internal_api import L1MemoryDesc
    from lmcache.v1.distributed.transfer_channel import initialize_transfer_channel_context

    memory = torch.zeros(NBYTES, dtype=torch.uint8)
    if side == "owner":
        memory.copy_(pattern())
    mine, other = (f"127.0.0.1:{port}" for port in (ports if side == "owner" else ports[::-1]))
    desc = L1MemoryDesc(ptr=memory.data_ptr(), size=NBYTES, align_bytes=PAGE)
    context = initialize_transfer_channel_context("nixl", desc, mine, mine)
    say("ready")
    hear()
    if side == "owner":
        hear()
        return
    client = context.get_transfer_channel_client(other)
    spans = [(PAGE * (k * 7 % 2048), PAGE) for k in range(512)]
    places = context.get_transfer_channel_address(spans)
    good, right = read(client, places), pattern()
    say([good, all(torch.equal(memory[s : s + n], right[s : s + n]) for s, n in spans)])
    hear()
    try:
        said = read(client, places)
    except Exception as error:  # noqa: BLE001  # what LMCache passes on
        said = type(error).__name__
    say(said)


def read(client, places) -> bool:
    """Read pages; return whether all came."""
    task, end_s = client.submit_read(places, places), time.monotonic() + WAIT_S
    while not (found := client.query_read_status(task)).finished:
        if time.monotonic() > end_s:
            raise TimeoutError("the read does not end")
    return all(found.succeeded_mask)


def pattern():
    """The bytes of the owner."""
    import torch

    return torch.arange(NBYTES, dtype=torch.int64).mul(31).remainder(251).to(torch.uint8)


# ------------------------------------------------------------------ Dynamo


async def dynamo(side: str) -> None:
    """One process of Dynamo's nixl_connect: the owner offers tensors, the reader reads, writes."""
    import torch
    from dynamo import nixl_connect as nc

    connector, loop = nc.Connector(), asyncio.get_running_loop()
    mine = pattern() if side == "owner" else torch.zeros(NBYTES, dtype=torch.uint8)
    room = torch.zeros(NBYTES, dtype=torch.uint8)
    say("ready")
    await loop.run_in_executor(None, hear)
    if side == "owner":
        for create, tensor in (
            (connector.create_readable, mine),
            (connector.create_writable, room),
        ):
            with await create(nc.Descriptor(tensor)) as op:
                say(op.metadata().model_dump_json())
                await asyncio.wait_for(op.wait_for_completion(), WAIT_S)
        op = await connector.create_readable(nc.Descriptor(mine))
        say([bool(torch.equal(room, mine)), op.metadata().model_dump_json()])
        await loop.run_in_executor(None, hear)
        return
    for begin in ("read", "write"):
        words = nc.RdmaMetadata.model_validate_json(await loop.run_in_executor(None, hear))
        descriptor = nc.Descriptor(mine)
        pair = (words, descriptor) if begin == "read" else (descriptor, words)
        with await getattr(connector, f"begin_{begin}")(*pair) as op:
            await asyncio.wait_for(op.wait_for_completion(), WAIT_S)
    say(bool(torch.equal(mine, pattern())))
    words = nc.RdmaMetadata.model_validate_json(await loop.run_in_executor(None, hear))
    try:  # its owner is dead
        with await connector.begin_read(words, nc.Descriptor(room)) as op:
            await asyncio.wait_for(op.wait_for_completion(), WAIT_S)
        say("it was read")
    except Exception as error:  # noqa: BLE001  # what Dynamo passes on
        say(type(error).__name__)


# ------------------------------------------------------------------ both


class Half:
    """A process of a client, started as the how-to says."""

    def __init__(self, client: str, side: str, ports: list[int], log: Path) -> None:
        words = [sys.executable, __file__, "--client", client, "--side", side]
        words += ["--ports", *map(str, ports)]
        command = f"{exports()}\nexec {sys.executable} -m tep.compat.nixl -- {' '.join(words)}"
        self.process = subprocess.Popen(
            ["/bin/bash", "-euc", command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("ab"),
            text=True,
        )

    def told(self) -> object:
        """Wait for what it says."""
        for line in self.process.stdout:
            if line.startswith("@@"):
                return json.loads(line[2:])
        raise RuntimeError(f"it ended with {self.process.wait()}; see nixl_clients.log")

    def tell(self, what: object = None) -> None:
        """Tell it something."""
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.wait()


def play_lmcache(owner: Half, reader: Half) -> tuple[bool, object]:
    """Read pages, then of a dead owner; return whether they were right, and what was said."""
    reader.tell()
    right = reader.told() == [True, True]
    owner.kill()
    reader.tell()
    return right, reader.told()


def play_dynamo(owner: Half, reader: Half) -> tuple[bool, object]:
    """Do the same with Dynamo's operations."""
    owner.tell()
    reader.tell()
    for _ in "read", "write":
        reader.tell(owner.told())
    right, words = owner.told()
    right = right and reader.told() is True
    owner.kill()
    reader.tell(words)
    return right, reader.told()


def main(argv: list[str]) -> int:
    """Run it all; the last line is a JSON object with what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--client", choices=("lmcache", "dynamo"))
    parser.add_argument("--side", choices=("owner", "reader"))
    parser.add_argument("--ports", type=int, nargs=2, default=[0, 0])
    options = parser.parse_args(argv)
    if options.client == "lmcache":
        lmcache(options.side, options.ports)
    elif options.client == "dynamo":
        asyncio.run(dynamo(options.side))
    if options.client:
        sys.stdout.flush()
        os._exit(0)  # the log of a dead peer is of no interest
    found: dict[str, object] = {"ok": True}
    for client, play in (("lmcache", play_lmcache), ("dynamo", play_dynamo)):
        ports = [free_port(), free_port()]
        log = Path("nixl_clients.log").resolve()
        halves = [Half(client, side, ports, log) for side in ("owner", "reader")]
        try:
            for half in halves:
                half.told()
            right, said = play(*halves)
        finally:
            for half in halves:
                half.kill()
        found[f"{client}: bytes are right"] = right
        found[f"{client}: after kill -9 of the owner"] = said
        found["ok"] = found["ok"] and right and said not in {True, "it was read", "TimeoutError"}
    sys.stdout.write(json.dumps(found) + "\n")
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
