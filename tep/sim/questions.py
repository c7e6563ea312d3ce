"""Questions to a machine that nobody has: a transfer's time, a fault's cost, programs compared.

Each simulates on the timing fabric, moves no bytes, and returns a `Table`. Where an argument may be
a list, there is a row for each of its values. A figure has an interval, "NAME low" to "NAME high":
what is `guessed` of the machine so many times as slow, and as fast; 1: no interval.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final

from tep.base.api import Pages
from tep.base.checks import check_int
from tep.base.units import KiB
from tep.sim.cluster import Cluster
from tep.sim.profile import Profile, load_profile
from tep.sim.sweeps import GUESSED, Table, sweep

__all__ = ["compare", "fault_cost", "transfer_time"]

Machine = Profile | str
AsyncProgram = Callable[[Cluster], Coroutine[Any, Any, object]]
"""An async function of a cluster; its end is the end of what is timed."""

_MS: Final = 1e3


def transfer_time(
    nbytes: int | Sequence[int],
    machine: Machine | Sequence[Machine],
    *,
    page_bytes: int | Sequence[int] = 64 * KiB,
    nics: int | Sequence[int] | None = None,
    parts: int | Sequence[int] = 1,
    guessed: float = GUESSED,
) -> Table:
    """Answer how long pages take from one node to another.

    Args:
        nbytes: of all pages; or a list.
        machine: a name of `tep.sim.profiles()`, a path or a Profile; or a list.
        page_bytes: of one page, each a write of its own; or a list.
        nics: of each node, in place of the machine's; or a list.
        parts: paged writes that share the pages, one after the other, as a model's layers do; or a
            list.
        guessed: see above.

    Raises:
        UsageError: a number below 1, or no such machine.
    """

    def time(**point: Any) -> dict[str, float]:
        us, moved = _transfer(**point)
        return {"time, ms": us / _MS, "rate, Gb/s": moved * 8 / us / 1e3}

    sizes: dict[str, Any] = {"nbytes": nbytes, "page_bytes": page_bytes}
    return _ask(time, guessed, machine=machine, **sizes, nics=nics, parts=parts)


def fault_cost(
    nbytes: int | Sequence[int],
    machine: Machine | Sequence[Machine],
    *,
    page_bytes: int | Sequence[int] = 64 * KiB,
    nics: int | Sequence[int] | None = None,
    parts: int | Sequence[int] = 1,
    slow: float = 2.0,
    guessed: float = GUESSED,
) -> Table:
    """Answer what a transfer loses when one NIC of the sender is slow, and when it dies half-way.

    Beside each factor stands the least that is possible: the other NICs, all busy, carry what the
    lost one would have carried. Where it was the only one, the factor is infinite.

    Args:
        nbytes: as of `transfer_time`, and so are the next four.
        machine: a name, a path or a Profile; or a list.
        page_bytes: of one page; or a list.
        nics: of each node; or a list.
        parts: paged writes; or a list.
        slow: the slow NIC takes so many times as long for each byte.
        guessed: see above.

    Raises:
        UsageError: as `transfer_time`.
    """

    def cost(machine: Machine, nics: int | None = None, **sizes: Any) -> dict[str, float]:
        def slow_down(cluster: Cluster) -> None:
            cluster.slow_down(0, 0, slow)

        profile = _with_nics(machine, nics)
        n = profile.nics
        # This one first: it checks the sizes, and the cache of the others takes only what hashes.
        slow_us, _ = _transfer(machine=profile, **sizes, mortal=True, fault=slow_down)
        sound_us, dead_us = _sound_and_dead_us(profile, **sizes)
        return {
            "sound, ms": sound_us / _MS,
            "slow NIC, times": slow_us / sound_us,
            "slow NIC, least": n / (n - 1 + 1 / slow),
            "dead NIC, times": dead_us / sound_us,
            "dead NIC, least": float("inf") if n == 1 else 0.5 + 0.5 * n / (n - 1),
        }

    sizes: dict[str, Any] = {"nbytes": nbytes, "page_bytes": page_bytes}
    return _ask(cost, guessed, machine=machine, **sizes, nics=nics, parts=parts)


def compare(
    programs: Mapping[str, AsyncProgram],
    machine: Machine | Sequence[Machine],
    *,
    nodes: int | Sequence[int] = 2,
    seeds: int = 1,
    guessed: float = GUESSED,
    **cluster: Any,
) -> Table:
    """Answer which of some programs is the fastest, and where.

    Args:
        programs: name -> an async function of a Cluster; its time ends when it returns.
        machine: a name, a path or a Profile; or a list.
        nodes: of the cluster; or a list.
        seeds: of machines that draw: so many, from 0 on; the table has medians.
        guessed: see above.
        cluster: further arguments of `Cluster`. No bytes are moved unless `move_bytes=True`.

    Raises:
        UsageError: no program, or as `Cluster`.
    """

    def time(program: str, machine: Machine, nodes: int, seed: int) -> dict[str, float]:
        options = {"profile": machine, "seed": seed, "move_bytes": False} | cluster
        with Cluster(nodes, **options) as made:
            made.run(programs[program](made))
            return {"time, ms": made.now_us / _MS}

    return _ask(time, guessed, seeds, program=list(programs), machine=machine, nodes=nodes)


def _ask(
    function: Callable[..., dict[str, float]], guessed: float, seeds: int = 1, **grid: Any
) -> Table:
    lists = {
        name: value if isinstance(value, list | tuple | range) else [value]
        for name, value in grid.items()
        if not (name == "nics" and value is None)  # None: as many as the machine has
    }
    return sweep(function, lists, seeds=seeds, guessed=guessed, processes=1)


def _with_nics(machine: Machine, nics: int | None) -> Profile:
    profile = load_profile(machine)
    return profile if nics is None else replace(profile, nics=check_int("nics", nics, 1, 64))


@lru_cache(maxsize=64)  # both are the same for every `slow`
def _sound_and_dead_us(profile: Profile, **sizes: Any) -> tuple[float, float]:
    """Return the times of a transfer that nothing happens to, and of one that loses a NIC."""

    def kill(cluster: Cluster) -> None:
        cluster.at(sound_us / 2, lambda: cluster.kill_nic(0, 0))

    sound_us, _ = _transfer(machine=profile, **sizes, mortal=True)
    if profile.nics == 1:
        return sound_us, float("inf")
    return sound_us, _transfer(machine=profile, **sizes, mortal=True, fault=kill)[0]


def _transfer(
    *,
    nbytes: int,
    machine: Machine,
    page_bytes: int,
    parts: int,
    seed: int,
    nics: int | None = None,
    mortal: bool = False,
    fault: Callable[[Cluster], object] = lambda _: None,
) -> tuple[float, int]:
    """Return simulated microseconds, to the last count, and the bytes of whole pages."""
    page_bytes = check_int("page_bytes", page_bytes, 1)
    parts = check_int("parts", parts, 1)
    npages = -(-check_int("nbytes", nbytes, 1) // (page_bytes * parts))
    profile = _with_nics(machine, nics)
    with Cluster(2, profile=profile, seed=seed, move_bytes=False, mortal=mortal) as cluster:
        a, b = cluster.engines
        memory = (1 << 40, npages * page_bytes, "cpu")  # no byte of it is touched
        (mr, _), (_, desc) = a.reg_mr(memory), b.reg_mr(memory)
        fault(cluster)
        pages, start_us = Pages(range(npages)), cluster.now_us
        for part in range(parts):
            got = b.expect_imm_count(part, npages)
            a.submit_paged_writes(page_bytes, (mr, pages), (desc, pages), imm=part)
            got.wait()
        return cluster.now_us - start_us, npages * page_bytes * parts
