"""The liveness phase of a scenario: all trouble is over, and what lives must be able to go on.

Comes after the judgement of what was posted before. Rule: what is dead stays dead, and a fence
may stay; a write between two live engines that have a way left has to be done in the end.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import repeat
from typing import Final

from tep.backends.base import Access
from tep.base.api import Pages
from tep.base.units import PS_PER_NS, PS_PER_S
from tep.core.handles import State, Transfer
from tep.sim.faults import Drift, Fault
from tests.support.inside import peers_of
from tests.world.lab import Host
from tests.world.specs import SENDER
from tests.world.stage import Stage
from tests.world.tap import Mover

_IMM: Final = 0x7E570000
_BYTES: Final = bytes(range(1, 98))
_PAGE: Final = 8
_EVENTS_MAX: Final = 20_000
_TURNS_MAX: Final = 6
_SHORT_PS: Final = 30_000 * PS_PER_NS


def go_on(stage: Stage) -> None:
    """Heal the fabric and write once more to every receiver. Raises Violation."""
    stage.lab.fabric.heal()
    stage.probing = Mover()  # of every row: nothing is judged by rows any more
    _rest(stage)
    if not stage.sender.live:
        return
    for number, host in enumerate(stage.lab.hosts.values()):
        if host.name != SENDER and host.live:
            _write(stage, host, _IMM + 256 * number)
            stage.seen["went on"] += 1
            # Each path between NICs that live is used again.
            _turn_while(stage, partial(_shut, stage.sender, host))
            _write_everywhere(stage, host, _IMM + 256 * number + 128)


def _write(stage: Stage, host: Host, imm: int) -> None:
    """Write to one receiver, under a new immediate each time, until it is done.

    A NIC that is down costs a write where its rows cannot be written again. So does each path that
    a receiver that has removed the sender keeps fenced until it names it again; the last two more.
    """
    sender = stage.sender
    reachable = _has_way(sender, host)
    ours, theirs = len(sender.taps), len(host.taps)
    target = bytearray(len(_BYTES))
    mr, _ = sender.engine.reg_mr(_BYTES, access=Access.SOURCE)
    _, desc = host.engine.reg_mr(target)
    barred = host in stage.barred
    named = sender.desc.addr if barred else None
    tries = 1 + max(ours + theirs, ours * theirs + 2 if barred else 0)
    for number in range(tries):
        handle: Transfer = sender.engine.submit_single_write(
            len(_BYTES), (mr, 0), (desc, 0), imm + number
        )
        got = host.engine.expect_imm_count(imm + number, handle.rows, sender=named)
        _rest(stage)
        if not handle.finished:
            stage.fail(f"after healing a write to {host.name} never ended: {handle.describe()}")
        if handle.ok:
            if not got.ok or target != _BYTES:
                stage.fail(f"after healing a write to {host.name} is done, but nobody has it")
            return
        if not reachable and handle.state is State.FAILED:
            return
        _turn(stage)
    stage.fail(f"after healing {tries} writes to {host.name} failed: {handle.error}")


def _write_everywhere(stage: Stage, host: Host, imm: int) -> None:
    """Write a page over each lane: all paths are open, so nothing has to be written again.

    Where the sender was removed a path may have been fenced off, and no row was there yet. A row
    that finds no receive fails on any path.
    """
    sender = stage.sender
    excused = host in stage.barred or stage.scenario.chaos.rnr_retries >= 0
    if excused or not all(tap.is_useful for end in (sender, host) for tap in end.taps):
        return
    lanes = Pages(range(len(sender.taps) * len(host.taps)))
    mr, _ = sender.engine.reg_mr(bytes(_PAGE * len(lanes.indices)), access=Access.SOURCE)
    _, desc = host.engine.reg_mr(bytearray(_PAGE * len(lanes.indices)))
    handle = sender.engine.submit_paged_writes(_PAGE, (mr, lanes), (desc, lanes), imm)
    _rest(stage)
    again = handle.stats().rows_again
    if not handle.ok or again:
        why = f"wrote {again} rows again" if handle.ok else f"failed: {handle.error}"
        stage.fail(f"after healing a write over all paths to {host.name} {why}")
    stage.seen["all paths used again"] += bool(stage.broken)


def _shut(sender: Host, host: Host) -> str:
    """The paths that carry no rows, though both NICs live; "" if there is none."""
    link = peers_of(sender.engine).links.get(("sim", host.name))
    if link is None or link.addr != host.desc.addr:
        return ""
    found = [
        (ours, theirs)
        for ours, tap in enumerate(sender.taps)
        for theirs, other in enumerate(host.taps)
        if tap.is_useful
        and other.is_useful
        and not (link.is_up(ours, theirs) and link.alive[theirs])
    ]
    return f"after healing paths to {host.name} were not opened again: {found}" if found else ""


def lasts(fault: Fault) -> bool:
    """Return True if trouble may outlast the tries of a sender with a notice to send."""
    for_ps: int | None = getattr(fault, "for_ps", None)
    return for_ps is None or for_ps > _SHORT_PS


def hear_of_failures(stage: Stage, turns: int = _TURNS_MAX) -> None:
    """Nobody who can be reached waits for what does not come, if its sender is turned so often.

    Raises Violation.
    """
    _turn_while(stage, partial(_untold, stage), turns)


def _turn_while(stage: Stage, wrong: Callable[[], str], turns: int = _TURNS_MAX) -> None:
    """Turn the sender until nothing is wrong any more. Raises Violation if that takes longer."""
    found = wrong()
    while found and turns:
        _turn(stage)
        found, turns = wrong(), turns - 1
    if found:
        stage.fail(found)


def _untold(stage: Stage) -> str:
    """Find an expectation of what failed, whose receiver does not know; "" if there is none."""
    for wait in stage.waits:
        host = wait.host
        if wait.settled or wait.claimed or not (host.live and stage.sender.live):
            continue
        if host.name in stage.removals or not _has_way(stage.sender, host):
            continue  # who lets go of a peer forgets what it has to tell it
        failed = [r for r in stage.failed_under(wait.imm, host) if r.sender is stage.sender]
        if failed:
            return f"{failed[0]} {failed[0].state}, and {host.name} was not told"
    return ""


def _turn(stage: Stage) -> None:
    """Turn the sender once more: it asks for paths that are shut when it is turned."""
    env = stage.lab.env
    faults = [fault for _, fault in stage.scenario.faults]
    ppm = [fault.ppm for fault in faults if isinstance(fault, Drift) and fault.node == SENDER]
    wait_ps = round(stage.lab.options.probe_max_s * PS_PER_S / (1 + min(ppm, default=0) * 1e-6))
    env.call_at(env.now + wait_ps, lambda _: stage.sender.engine.driver.kick())
    _rest(stage)


def _has_way(sender: Host, host: Host) -> bool:
    """Return True if a NIC lives on both sides: fences between them are lifted."""
    return all(any(tap.is_useful for tap in end.taps) for end in (sender, host))


def _rest(stage: Stage) -> None:
    try:
        stage.lab.env.run_until(repeat(False, _EVENTS_MAX).__next__)
    except StopIteration:
        stage.fail(f"after healing still not quiet after {_EVENTS_MAX} events")
