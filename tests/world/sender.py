"""The sender of a scenario: it submits, cancels, and reuses its memory as soon as it may.

Here are the checks that belong to the moment in which a transfer settles.
"""

from __future__ import annotations

import re
from typing import Any, Final

import numpy as np

from tep.backends.base import Access, Status
from tep.base.api import Pages, ScatterDst
from tep.base.errors import BurntImm, BusyError, ClosedError, FabricError, StaleEpoch
from tep.base.wire import NetAddr
from tep.core.handles import State, Transfer
from tep.engine import PeerGroup, Prepared
from tep.sim.faults import Clog, Cut, KillNic, Mute, Pause, Revoke, Slow, Swizzle
from tests.world.lab import REUSED, Host
from tests.world.specs import SENDER, TransferSpec
from tests.world.stage import Run, Stage

_MADE_GOOD: Final = frozenset((Status.NIC_DOWN, Status.UNREACHABLE, Status.FLUSHED))
"""With such an error a row may have landed or not; the engine finds out, and sees to it."""

_DEAD_PATHS: Final = frozenset((Status.NIC_DOWN, Status.UNREACHABLE, Status.STALE_PEER))

_CONTRADICTED: Final = re.compile("which cannot be|has pruned its sums")

_SHARED: Final = re.compile("are of failed requests|of another request|failed on that path before")

_LOST_MAX: Final = 4
"""Limit of lost messages in sixteen. Above it all questions that save a transfer may be lost."""


class Sender:
    """Node a."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self._groups: dict[tuple[int, ...], PeerGroup] = {}
        self._epochs: dict[str, int] = {}
        self._prepared: dict[object, tuple[Prepared, int]] = {}
        for place, spec in enumerate(stage.scenario.transfers):
            stage.lab.env.call_at(spec.start_ps, self._begin, (place, 0, 0))

    def restarted(self) -> None:
        """Node a is back, and goes on with what it had not begun before; receivers hear of it."""
        stage = self.stage
        self._groups.clear()
        self._epochs.clear()
        self._prepared.clear()
        for place, _ in stage.runs:
            stage.give_up(place)
        for host in stage.lab.hosts.values():
            if host.live and host is not stage.sender:
                join(host, [stage.sender.desc.addr])

    def _begin(self, which: tuple[int, int, int]) -> None:
        stage = self.stage
        place, number, round_ = which
        spec = stage.scenario.transfers[place]
        if place in stage.over or (number > round_ and (place, round_) in stage.reached):
            stage.give_up(place)
            return
        if number:
            hosts = stage.runs[place, 0].hosts
        else:
            hosts = stage.receivers(spec)
            if spec.stale:
                hosts = tuple(stage.lab.first[host.name] for host in hosts)
        area = stage.lab.areas[place][number]
        run = Run(place, number, round_, spec, area, stage.sender, hosts)
        stage.runs[place, number] = stage.latest[place] = run
        try:
            run.handle = self._submit(run)
        except BurntImm as error:
            if not self._is_burnt(run):
                stage.fail(f"{run} was refused, and nothing under its immediate failed: {error}")
            stage.seen["refused: its immediate is burnt"] += 1
            stage.give_up(place)
            return
        except StaleEpoch:
            if all(host.live for host in hosts):
                stage.fail(f"{run}: fresh descriptors refused")
            stage.seen["stale descriptor refused"] += 1
            stage.give_up(place)
            return
        except ClosedError:
            if not stage.may_refuse(hosts):
                stage.fail(f"{run}: refused by an engine that is open")
            stage.seen["refused during a removal"] += stage.sender.live
            stage.give_up(place)
            return
        self._accepted(run)
        if spec.probe and spec.kind != "barrier":
            self._probe(run)
        run.handle.add_done_callback(lambda handle: self._ended(run, handle))
        if spec.cancel_ps is not None and number == 0:
            env = stage.lab.env
            env.call_at(env.now + spec.cancel_ps, self._cancel, run)

    def _accepted(self, run: Run) -> None:
        """The engine took it: it must be open, and the descriptors no older than it knows."""
        if not self.stage.sender.live or self.stage.must_refuse(run.hosts):
            self.stage.fail(f"{run}: accepted by an engine that is closed, or removes a peer")
        self.stage.seen["met again"] += bool(self.stage.removals)
        if self._is_burnt(run) and not self.stage.removals:
            self.stage.fail(f"{run} was accepted, and an earlier one under its immediate failed")
        for host in run.hosts:
            epoch = host.desc.addr.epoch
            newest = self._epochs.get(host.name, 0)
            if epoch < newest and host.name not in self.stage.removals:
                self.stage.fail(f"{run}: {host.name} is known in epoch {newest} already")
            self._epochs[host.name] = epoch
        self.stage.sender.ledger.turns.submitted(run)

    def _is_burnt(self, run: Run) -> bool:
        """Return True if an earlier run with one of its immediates and receivers failed."""
        stage = self.stage
        dues = stage.dues
        return not run.spec.silent and any(
            failed is not run and failed.sender is run.sender
            for host in run.hosts
            for imm, _, _ in dues(run.place, run.number, host.name)
            for failed in stage.failed_under(imm, host)
        )

    def _probe(self, run: Run) -> None:
        """Try to give back the memory that a transfer reads from."""
        stage, sender = self.stage, self.stage.sender
        try:
            sender.engine.deregister(sender.mr)
        except BusyError:
            stage.seen["deregister refused"] += 1
            return
        if run.handle is None or not run.handle.finished:  # it failed at once: no path is open
            stage.fail(f"the source was deregistered right after {run} was submitted")
        sender.mr, _ = sender.register(sender.memory, Access.SOURCE)

    def _submit(self, run: Run) -> Transfer:
        spec, area, hosts, stage = run.spec, run.area, run.hosts, self.stage
        targets = [host.desc for host in hosts]
        engine, mr = stage.sender.engine, stage.sender.mr
        imm: Any = None if spec.silent else stage.scenario.imm(run.place, run.number)
        how: dict[str, Any] = {"routing": stage.routings[run.place]}
        what: tuple[Any, ...]
        verb: Any
        prepare: Any
        match spec.kind:
            case "single":
                verb, prepare = engine.submit_single_write, None
                what = spec.size, (mr, area.start), (targets[0], area.start)
            case "paged" | "per_page":
                verb, prepare = engine.submit_paged_writes, engine.prepare_paged_writes
                stride = spec.size + spec.gap
                if imm is not None and spec.kind == "per_page":
                    each = [spec.page_imm(imm, page) for page in range(spec.pages)]
                    imm = np.array(each, np.uint32)
                src = Pages(area.src_indices, stride=stride, offset=area.start)
                dst = Pages(area.dst_indices, stride=stride, offset=area.start)
                what = spec.size, (mr, src), (targets[0], dst)
            case "scatter":
                verb, prepare = engine.submit_scatter, engine.prepare_scatter
                slices = [
                    ScatterDst(n, src_offset, (target, dst_offset))
                    for target, ((src_offset, dst_offset, n),) in zip(targets, area.pieces)
                ]
                what = mr, slices
                how["group"] = self._group(spec, hosts)
            case "barrier":
                verb, prepare = engine.submit_barrier, engine.prepare_barrier
                what = ([host.desc for host in hosts],)
                how["group"] = self._group(spec, hosts)
        if prepare is None or not spec.prepared:
            sent: Transfer = verb(*what, imm, **how)
            return sent
        key = run.place, mr, area.src_indices, area.dst_indices, len(stage.removals)
        if key not in self._prepared:
            self._prepared[key] = prepare(*what, **how), area.start
        prepared, start = self._prepared[key]
        moved = 0 if spec.kind == "barrier" else area.start - start
        return prepared.submit(imm, src_offset=moved, dst_offset=moved)

    def _group(self, spec: TransferSpec, hosts: tuple[Host, ...]) -> PeerGroup | None:
        """The peer group of these incarnations, made when first asked for."""
        if not spec.grouped:
            return None
        epochs = *(host.desc.addr.epoch for host in hosts), len(self.stage.removals)
        if epochs not in self._groups:
            peers = [host.desc.addr for host in hosts]
            self._groups[epochs] = join(self.stage.sender, peers)
        return self._groups[epochs]

    def _cancel(self, run: Run) -> None:
        assert run.handle is not None
        if not run.settled:
            run.cancelled = True
            run.handle.cancel()

    # ------------------------------------------------------------------ when a transfer settles

    def _ended(self, run: Run, handle: Transfer) -> None:
        """Check that it may end so, and do what an application may do then."""
        stage, area = self.stage, run.area
        run.settled += 1
        if run.settled != 1:
            stage.blame(f"{run} settled twice")
        if run.posted != run.back:
            out = run.posted - run.back
            stage.blame(f"{run} ended {handle.state.value} while NICs hold {out} of its rows")
        if handle.state is State.DONE:
            self._check_done(run, handle)
        else:
            if handle.state is State.CANCELLED:
                self._check_cancelled(run, handle)
            else:
                self._check_failed(run, handle)
            if not self._may_land(run):
                run.take_snapshot()
        stage.sender.memory[area.start : area.stop] = REUSED * (area.stop - area.start)
        env, number = stage.lab.env, run.number + 1
        if handle.ok and run.round + 1 < run.spec.rounds:
            env.call_at(env.now + run.spec.pace_ps, self._begin, (run.place, number, run.round + 1))
        elif not handle.ok and number - run.round <= run.spec.again:
            stage.seen["tried again"] += 1
            env.call_at(env.now + run.spec.again_ps, self._begin, (run.place, number, run.round))
        elif not handle.ok:
            stage.give_up(run.place)

    def _may_land(self, run: Run) -> bool:
        """Return True if its failed rows may still land: their path had died, or was flushed."""
        found = {status for status, _ in run.faults}
        late = self.stage.scenario.chaos.late_land > 0
        return not _DEAD_PATHS.isdisjoint(found) or (late and Status.FLUSHED in found)

    def _check_done(self, run: Run, handle: Transfer) -> None:
        stage = self.stage
        for number, _ in run.faults:
            if not (stage.scenario.failover and Status(number) in _MADE_GOOD):
                stage.blame(f"{run} is done, but {run.failed} of its rows failed")
        if run.faults:
            stage.seen["failover"] += 1
        if not handle.rows <= run.posted or (run.posted != handle.rows and not run.failed):
            stage.blame(f"{run} of {handle.rows} rows is done, but {run.posted} were posted")
        for host, pieces in zip(run.hosts, run.area.pieces):
            if host.live and not stage.lab.landed(host, pieces):
                stage.blame(f"{run} is done, but bytes at {host.name} differ")

    def _check_cancelled(self, run: Run, handle: Transfer) -> None:
        self.stage.seen["cancelled in the queue"] += 1
        if not run.cancelled:
            self.stage.blame(f"{run} ended cancelled, but nobody cancelled it")
        made_good = self.stage.scenario.failover
        if any(not made_good or Status(status) not in _MADE_GOOD for status, _ in run.faults):
            self.stage.blame(f"{run} ended cancelled, but {run.failed} of its rows failed")
        if run.posted >= handle.rows and not run.failed:
            self.stage.blame(f"{run} ended cancelled, but all its rows were posted")

    def _was_fenced_off(self, run: Run) -> bool:
        """Return True if every path to one of its receivers has been fenced off, now or before."""
        taps = self.stage.sender.taps
        return any(
            all(its.is_closed_to(ours) for ours in taps for its in host.taps) for host in run.hosts
        )

    def _check_failed(self, run: Run, handle: Transfer) -> None:
        sender = self.stage.sender
        hopeless = not sender.live or all(tap.down for tap in sender.taps)
        hopeless = hopeless or sender.unconnected > 0
        burnt = isinstance(handle.error, BurntImm)
        if burnt and not self._is_burnt(run):
            self.stage.blame(f"{run} failed, and nothing under its immediate did: {handle.error}")
        if not (run.failed or hopeless or burnt or self._was_fenced_off(run)):
            self.stage.blame(f"{run} failed, but none of its rows did: {handle.error}")
        for number, nic in run.faults:
            status = Status(number)
            if not self._has_cause(run, status, nic):
                self.stage.blame(f"{run} failed without a cause: {status.name} on NIC {nic}")
        excuse = "its immediate is burnt" if burnt else self._excuse(run)
        if _CONTRADICTED.search(str(handle.error)):
            self.stage.blame(f"{run} failed, since sums of both ends contradict: {handle.error}")
        self.stage.seen[f"excused: {excuse}" if excuse else "failed without excuse"] += 1
        if not excuse:
            self.stage.blame(f"{run} failed, though other NICs live at both ends: {handle.error}")

    def _excuse(self, run: Run) -> str:
        """Why a transfer may fail here; "" if it has to be done: another path was there all along.

        Slow links and pauses excuse nothing; NICs that died, or were cut off for a while, and cuts
        of pairs only that no path is left.
        """
        stage, chaos = self.stage, self.stage.scenario.chaos
        if not stage.scenario.failover:
            return "no failover"
        if stage.closed:
            return "an engine was closed"
        if stage.removals:
            return "a peer was removed"
        if not stage.barred.isdisjoint(run.hosts):
            return "its receiver removed node a"
        if chaos.rnr_retries >= 0:
            return "no receive"  # no NIC makes up for a receive that is not there
        if stage.lab.fabric.seen["row PROVIDER"]:
            return "an error of the provider's"
        if stage.lab.fabric.seen["fence failed"]:
            return "a fence failed"
        if any(spec.cancel_ps is not None for spec in stage.scenario.transfers):
            # What nobody knows of a cancelled request's rows nobody knows of others under its imm.
            return "a transfer was cancelled"
        if _SHARED.search(str(run.handle and run.handle.error)) and self._has_failed(run):
            return "another under its immediate failed"
        hurt = {(f.node, f.nic) for f in stage.broken if isinstance(f, KillNic | Clog | Mute)}
        cut = [{(f.node, f.nic), (f.peer, f.peer_nic)} for f in stage.broken if isinstance(f, Cut)]
        others = [
            fault
            for fault in stage.broken
            if not isinstance(fault, KillNic | Clog | Cut | Mute | Slow | Pause)
        ]
        often = chaos.message_loss > _LOST_MAX
        trouble = len(hurt) + len(cut) + (chaos.post_fails > 0)
        if often or (chaos.message_loss and (others or trouble > 1)):
            return "messages are lost"
        if others:
            return type(others[0]).__name__
        for host in run.hosts:
            left = [
                {ours, theirs}
                for ours in sorted({(SENDER, nic) for nic in range(len(stage.sender.taps))} - hurt)
                for theirs in sorted({(host.name, nic) for nic in range(len(host.taps))} - hurt)
            ]
            if not left:
                return "all NICs of one end were in trouble"
            whole = [pair for pair in left if pair not in cut]
            if not whole:
                return "Cut"
            if chaos.message_loss and trouble and len(whole) == 1:
                return "messages are lost"  # each try of a question, or its answer, on that path
        return "no connection" if stage.sender.unconnected else ""

    def _has_failed(self, run: Run) -> bool:
        """Return True if another transfer under the immediate of this one has an error."""
        mates = set(self.stage.scenario.mates(run.place)) - {run.place}
        return any(self.stage.latest[k].is_failing() for k in mates & self.stage.latest.keys())

    def _has_cause(self, run: Run, status: Status, nic: int) -> bool:
        """Return True if any fault so far explains an error."""
        broken, chaos = self.stage.broken, self.stage.scenario.chaos
        peers = {host.name for host in run.hosts}
        match status:
            case Status.NIC_DOWN:
                return KillNic(SENDER, nic) in broken
            case Status.UNREACHABLE:
                killed = {fault.node for fault in broken if isinstance(fault, KillNic)}
                troubled = any(isinstance(f, Clog | Cut | Mute | Swizzle) for f in broken)
                troubled = troubled or not self.stage.barred.isdisjoint(run.hosts)
                return troubled or not peers.isdisjoint(killed | self.stage.closed)
            case Status.STALE_PEER:
                return not all(host.live for host in run.hosts)
            case Status.REMOTE_KEY:
                return any(isinstance(f, Revoke) and f.node in peers for f in broken)
            case Status.LOCAL_KEY:
                return any(isinstance(f, Revoke) and f.node == SENDER for f in broken)
            case Status.FLUSHED:
                harmed = self.stage.harmed or not self.stage.barred.isdisjoint(run.hosts)
                flushed = chaos.ordered and chaos.flush_on_error and harmed
                return flushed or not self.stage.sender.live
            case Status.RNR:
                return chaos.rnr_retries >= 0
            case Status.PROVIDER:
                return chaos.odd_errors > 0
            case _:
                return False


def join(host: Host, peers: list[NetAddr]) -> PeerGroup:
    """Make a peer group, and try again as often as a NIC cannot connect."""
    while True:
        before = host.unconnected
        try:
            return host.engine.add_peer_group(peers)
        except FabricError:
            if host.unconnected == before:
                raise
