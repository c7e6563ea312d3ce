"""Two engines over the loopback with guarded buffers, turned by tests or threads. Not a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from tep.backends.base import Access
from tep.backends.loopback import Hub, open_domains
from tep.base.api import EngineOptions
from tep.core.handles import Handle
from tep.drivers.threads import InlineDriver, Machine, ThreadDriver
from tep.engine import TransferEngine

GUARD = 4096
BLANK = 0x5A
_HUB_TOKEN = 7


class Buffer:
    """Bytes between two guards.

    Attributes:
        data: the registered bytes.
    """

    def __init__(self, content: npt.NDArray[np.uint8]) -> None:
        self._whole = np.full(len(content) + 2 * GUARD, 0xA5, np.uint8)
        self.data = self._whole[GUARD : GUARD + len(content)]
        self.data[:] = content

    def guards_hold(self) -> bool:
        """Whether nobody wrote outside."""
        edges = np.concatenate([self._whole[:GUARD], self._whole[-GUARD:]])
        return bool((edges == 0xA5).all())


class Pair:
    """A sender `a` with a source of noise, a receiver `b` with a blank target.

    Attributes:
        src, dst: the buffers; mr, desc: the source's handle and the target's descriptor.
        more: opens another engine, (name, NICs), on the same hub; closed with the pair.
    """

    def __init__(
        self,
        a: TransferEngine,
        b: TransferEngine,
        nbytes: int,
        seed: int,
        more: Callable[[str, int], TransferEngine],
    ) -> None:
        self.a, self.b, self.more = a, b, more
        noise = np.random.default_rng(seed + 1).integers(0, 255, nbytes, np.uint8)
        noise[noise == BLANK] = 0xFF
        self.src = Buffer(noise)
        self.dst = Buffer(np.full(nbytes, BLANK, np.uint8))
        self.mr, _ = a.reg_mr(self.src.data)
        open_both_ways = Access.SOURCE_AND_TARGET | Access.READABLE
        self.dst_mr, self.desc = b.reg_mr(self.dst.data, access=open_both_ways)

    def turn_until(self, done: Callable[[], bool], turns_max: int = 20_000) -> None:
        """Turn both engines until done() holds."""
        for _ in range(turns_max):
            if done():
                return
            self.a.driver.turn()
        raise AssertionError(
            f"{turns_max} turns in vain\n{self.a.stall_report()}\n{self.b.stall_report()}"
        )

    def settle(self, *handles: Handle) -> None:
        """Turn both engines until these have settled."""
        self.turn_until(lambda: all(handle.finished for handle in handles))

    def quiet(self, turns: int = 60) -> None:
        """Turn until what has not come by now never will."""
        for _ in range(turns):
            self.a.driver.turn()

    def untouched_but(self, ranges: list[tuple[int, int]]) -> bool:
        """Whether all of the target outside (start, stop) ranges, and the guards, are as made."""
        blank = np.ones(len(self.dst.data), np.bool_)
        for start, stop in ranges:
            blank[start:stop] = False
        return bool((self.dst.data[blank] == BLANK).all()) and self.dst.guards_hold()


@contextmanager
def pair(
    nlocal: int = 1,
    nremote: int = 1,
    *,
    nbytes: int = 1 << 16,
    seed: int | None = 0,
    threads: bool = False,
    options: EngineOptions = EngineOptions(),
    sq_depth: int = 1024,
    max_msg_bytes: int = 256,
) -> Iterator[Pair]:
    """Open two engines on a hub of their own; seed None = in order."""
    hub = Hub(_HUB_TOKEN)
    ring: list[Machine] = []
    engines: list[TransferEngine] = []

    def more(name: str, nics: int) -> TransferEngine:
        opened = open_domains(
            nics, hub=hub, seed=seed, name=name, sq_depth=sq_depth, max_msg_bytes=max_msg_bytes
        )
        driver = ThreadDriver(name) if threads else InlineDriver(ring)
        engine = TransferEngine(
            opened.domains, driver=driver, name=name, epoch=opened.epoch, options=options
        )
        engines.append(engine)
        return engine

    a, b = more("a", nlocal), more("b", nremote)
    try:
        yield Pair(a, b, nbytes, seed or 0, more)
    finally:
        for engine in engines:
            engine.close()
