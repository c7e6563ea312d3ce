"""Count what one transfer costs an engine while 10^3, 10^4 or 10^5 of them are open.

    python -m tests.bench.bench_open

Counts are Python calls for each transfer, from the submit to the settled handle; they do not depend
on the machine, so a test holds them flat. Seconds show what no count shows: searches in C.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import numpy as np

from tep.backends.base import Completions, Kind, WriteBatch
from tep.base.api import Pages
from tep.drivers.threads import InlineDriver, Machine
from tep.engine import TransferEngine
from tests.support.inside import worker_of
from tests.support.null import NullDomain

__all__ = ["KINDS", "Cost", "measure"]

_DEPTH: Final = 64
_PAGES: Final = 8
_WRITE: Final = int(Kind.WRITE)


class _Narrow(NullDomain):
    """A NIC that has room for few rows; all others wait in the engine's queues."""

    out = 0

    def post(self, batch: WriteBatch, start: int, stop: int) -> int:
        taken = min(stop - start, _DEPTH - self.out)
        self.out += taken
        return super().post(batch, start, start + taken) if taken else 0

    def poll(self, out: Completions) -> int:
        n = super().poll(out)
        self.out -= int(out[:n]["count"][out[:n]["kind"] == _WRITE].sum()) if n else 0
        return n


class Cost(NamedTuple):
    """The cost of one transfer: Python calls, and microseconds of CPU."""

    calls: float
    cpu_us: float


class _Rig:
    def __init__(self, kind: type[NullDomain]) -> None:
        self.ring: list[Machine] = []
        wire: list[NullDomain] = []
        self.a, self.b = (self._engine(name, kind, wire) for name in ("a", "b"))
        (self.mr, _), (_, self.desc) = (e.reg_mr((1 << 40, 1 << 20, "cpu")) for e in self.both)

    @property
    def both(self) -> tuple[TransferEngine, TransferEngine]:
        return self.a, self.b

    def _engine(self, name: str, kind: type[NullDomain], wire: list[NullDomain]) -> TransferEngine:
        nic = kind(len(wire), wire)
        return TransferEngine([nic], driver=InlineDriver(self.ring), name=name, epoch=1)

    def finish(self) -> None:
        """Turn both engines until nothing is open."""
        workers = [worker_of(engine) for engine in self.both]
        while any(worker.open or worker.commands for worker in workers):
            for machine in self.ring:
                machine.step()
                machine.deliver()


def _singles(rig: _Rig, n: int) -> None:
    a, mr, desc = rig.a, rig.mr, rig.desc
    for _ in range(n):
        a.submit_single_write(8, (mr, 0), (desc, 0), imm=1)


def _paged(rig: _Rig, n: int) -> None:
    a, pages = rig.a, Pages(range(_PAGES))
    ends = (rig.mr, pages), (rig.desc, pages)
    for _ in range(n):
        a.submit_paged_writes(64, *ends, imm=1)


def _expected(rig: _Rig, n: int) -> None:
    for imm in range(n):
        rig.b.expect_imm_count(imm, 1)
    for imm in np.random.default_rng(0).permutation(n).tolist():
        rig.a.submit_single_write(8, (rig.mr, 0), (rig.desc, 0), imm=imm)


KINDS: Final[dict[str, tuple[Callable[[_Rig, int], None], type[NullDomain]]]] = {
    "single writes": (_singles, NullDomain),
    "single writes, a narrow NIC": (_singles, _Narrow),
    "8 pages each, a narrow NIC": (_paged, _Narrow),
    "immediates of their own, in any order": (_expected, NullDomain),
}
"""What is open at once, and on which NICs."""


def measure(what: str, n: int) -> Cost:
    """Measure n transfers that are all open before the engines are turned."""
    make, kind = KINDS[what]
    rig = _Rig(kind)
    make(rig, 1)
    rig.finish()
    start_s = time.process_time()
    make(rig, n)
    rig.finish()
    cpu_s = time.process_time() - start_s
    calls = 0

    def count(_: object, event: str, __: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        make(rig, n)
        rig.finish()
    finally:
        sys.setprofile(None)
    for engine in rig.both:
        engine.close()
    return Cost(calls / n, cpu_s / n * 1e6)


def main() -> None:
    """Print a table."""
    for what in KINDS:
        costs = [measure(what, n) for n in (10**3, 10**4, 10**5)]
        cells: Iterator[str] = (f"{cost.calls:6.1f} {cost.cpu_us:7.2f} us" for cost in costs)
        sys.stdout.write(f"{what:40} {' | '.join(cells)}\n")


if __name__ == "__main__":
    main()
