"""Parcels: one node hands the same bytes to others, and knows in the end who has them.

A parcel is one write with an immediate. If it fails it is sent again, to the same place, under the
next immediate: a write that failed may have landed all the same, so its immediate is used up.
"""

from __future__ import annotations

import asyncio
import contextlib

import tep

TRIES = 3
PATIENCE_S = 0.6  # a receiver outlasts the slowest error of the fabrics it is tested on


class Shelf:
    """The place where a receiver keeps its parcel."""

    def __init__(self, engine: tep.TransferEngine, nbytes: int) -> None:
        self.engine = engine
        self.memory = bytearray(nbytes)
        _, self.desc = engine.reg_mr(self.memory)

    async def take(self, first_imm: int, sender_nics: int) -> bytes | None:
        """Wait for a parcel, whichever try brings it; None if none comes."""
        nics = len(self.desc.addr.domains)
        count = tep.count_imms(tep.Single(len(self.memory)), sender_nics, nics)
        tries = [self.engine.expect_imm_count(first_imm + number, count) for number in range(TRIES)]
        waits = [asyncio.ensure_future(_came(one)) for one in tries]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S * TRIES):
                for wait in asyncio.as_completed(waits):
                    if await wait:  # else this try has failed, and others follow
                        break
        found = bytes(self.memory) if any(one.ok for one in tries) else None
        for one in tries:
            one.cancel()
        return found


async def _came(handle: tep.Expectation) -> bool:
    with contextlib.suppress(tep.TepError):
        await handle
    return handle.ok


async def hand_over(
    engine: tep.TransferEngine, mr: tep.MrHandle, to: tep.MrDesc, first_imm: int
) -> bool:
    """Send a parcel until it is there, or TRIES have failed."""
    for number in range(TRIES):
        try:
            await engine.submit_single_write(to.nbytes, (mr, 0), (to, 0), imm=first_imm + number)
        except tep.FabricError:
            continue
        return True
    return False
