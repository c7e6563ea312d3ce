"""Two engines with guarded buffers over the loopback, or over the chaos fabric. Not a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from tep.backends.base import Access
from tep.backends.loopback import Hub, LoopbackDomain
from tep.base.api import EngineOptions
from tep.base.units import PS_PER_US
from tep.core.handles import Handle
from tep.drivers.threads import InlineDriver, Machine, ThreadDriver
from tep.engine import TransferEngine
from tep.sim.chaos import ChaosFabric
from tep.sim.clock import FabricEnv
from tep.sim.driver import SimDriver
from tep.sim.faults import Chaos
from tests.support.loopbacks import open_made

GUARD = 4096
BLANK = 0x5A
_HUB_TOKEN = 7
_QUIET_PS = 20_000 * PS_PER_US  # an engine may be held up for 3 ms


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
        """Return True if nothing was written outside."""
        edges = np.concatenate([self._whole[:GUARD], self._whole[-GUARD:]])
        return bool((edges == 0xA5).all())


class Pair:
    """A sender `a` with a source of noise, a receiver `b` with a blank target.

    Attributes:
        src, dst: the buffers; mr, desc: the source's handle and the target's descriptor.
        more: opens another engine, (name, NICs), on the same fabric; closed with the pair.
        env: the simulated clock, or None on the loopback.
    """

    def __init__(
        self,
        a: TransferEngine,
        b: TransferEngine,
        nbytes: int,
        seed: int,
        more: Callable[[str, int], TransferEngine],
        env: FabricEnv | None = None,
    ) -> None:
        self.a, self.b, self.more, self.env = a, b, more, env
        noise = np.random.default_rng(seed + 1).integers(0, 255, nbytes, np.uint8)
        noise[noise == BLANK] = 0xFF
        self.src = Buffer(noise)
        self.dst = Buffer(np.full(nbytes, BLANK, np.uint8))
        self.mr, _ = a.reg_mr(self.src.data)
        open_both_ways = Access.SOURCE_AND_TARGET | Access.READABLE
        self.dst_mr, self.desc = b.reg_mr(self.dst.data, access=open_both_ways)

    def turn_until(self, done: Callable[[], bool], turns_max: int = 20_000) -> None:
        """Turn both engines until done() holds."""
        if self.env is not None:
            self.env.run_until(done)
        for _ in range(turns_max):
            if done():
                return
            assert self.env is None, self.env.stall_report()
            self.a.driver.turn()
        raise AssertionError(
            f"{turns_max} turns in vain\n{self.a.stall_report()}\n{self.b.stall_report()}"
        )

    def settle(self, *handles: Handle) -> None:
        """Turn both engines until these have settled."""
        self.turn_until(lambda: all(handle.finished for handle in handles))

    def quiet(self, turns: int = 60) -> None:
        """Turn until what has not come by now never will."""
        if self.env is not None:
            self.env.run_until(lambda: False, self.env.now + _QUIET_PS)
            return
        for _ in range(turns):
            self.a.driver.turn()

    def untouched_but(self, ranges: list[tuple[int, int]]) -> bool:
        """Return True if the target outside (start, stop) ranges, and the guards, are unchanged."""
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
    threads: bool = False,
    options: EngineOptions = EngineOptions(),
    sq_depth: int = 1024,
    max_msg_bytes: int = 256,
    make: type[LoopbackDomain] = LoopbackDomain,
) -> Iterator[Pair]:
    """Open two engines on a loopback hub of their own, with NICs of a class."""
    hub = Hub(_HUB_TOKEN)
    ring: list[Machine] = []

    def more(name: str, nics: int) -> TransferEngine:
        opened = open_made(
            make, nics, hub=hub, name=name, sq_depth=sq_depth, max_msg_bytes=max_msg_bytes
        )
        driver = ThreadDriver(name) if threads else InlineDriver(ring)
        return TransferEngine(
            opened.domains, driver=driver, name=name, epoch=opened.epoch, options=options
        )

    with _opened(more, (nlocal, nremote), nbytes, 0, None) as made:
        yield made


@contextmanager
def hostile_pair(
    nlocal: int = 1, nremote: int = 1, *, seed: int, nbytes: int = 1 << 16, **knobs: object
) -> Iterator[Pair]:
    """Open two engines on a chaos fabric that nothing fails on; knobs not named are drawn."""
    chaos = Chaos.draw(seed, **knobs)
    env = FabricEnv()
    fabric = ChaosFabric(env, chaos)

    def more(name: str, nics: int) -> TransferEngine:
        node = fabric.node(name, nics)
        return TransferEngine(
            node.domains, driver=SimDriver(env, node), name=name, epoch=node.epoch
        )

    with _opened(more, (nlocal, nremote), nbytes, seed, env) as made:
        yield made


@contextmanager
def _opened(
    make: Callable[[str, int], TransferEngine],
    nics: tuple[int, int],
    nbytes: int,
    seed: int,
    env: FabricEnv | None,
) -> Iterator[Pair]:
    engines: list[TransferEngine] = []

    def more(name: str, nics: int) -> TransferEngine:
        engines.append(make(name, nics))
        return engines[-1]

    try:
        yield Pair(more("a", nics[0]), more("b", nics[1]), nbytes, seed, more, env)
    finally:
        for engine in engines:
            engine.close()
