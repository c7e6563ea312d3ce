"""The chaos fabric: nodes whose NICs break every promise that the contract does not make.

For correctness: every byte real, one event a fragment, time arbitrary. Here are the fabric and its
nodes; one NIC is `chaos_nic`, the knobs are `faults`. A crash takes a host with all its NICs.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Final

from tep.backends.base import Status
from tep.base.checks import check_int
from tep.base.errors import BadDescriptor, UsageError
from tep.base.hashing import below
from tep.sim.chaos_nic import ChaosNic
from tep.sim.chaos_parts import Nic, NicState
from tep.sim.clock import FabricEnv, in_one_process
from tep.sim.draws import Draws
from tep.sim.driver import SimNode
from tep.sim.faults import (
    Chaos,
    Clog,
    Cut,
    Drift,
    Fault,
    Faults,
    KillNic,
    Mute,
    Pause,
    Restart,
    Revoke,
    Slow,
    Swizzle,
)
from tep.sim.row_log import RowLog

__all__ = ["ChaosFabric", "ChaosNode"]

_ADDRESS: Final = re.compile(rb"sim:([^\0]{1,200})/(\d{1,3})#(\d{1,18})")
_NICS_MAX: Final = 64


class ChaosNode(SimNode):
    """One incarnation of one host.

    A worker is never charged for its time, and every completion wakes it.

    Attributes:
        epoch: 1 for the first incarnation, then 2, ...
        uid: number of the host on its fabric; part of every draw.
    """

    def __init__(self, fabric: ChaosFabric, name: str, uid: int, nics: int, epoch: int) -> None:
        super().__init__(name, epoch)
        self.fabric = fabric
        self.uid = uid
        self._paused_ps = 0
        self._steps = uid << 32  # of this incarnation; part of every draw
        self._next_step = fabric.draws.steps(self._steps + 1)
        self._delay_ps, self._pause_ps = fabric.chaos.poll_delay_ps, fabric.chaos.pause_ps
        self._first_key = uid << 24
        if not fabric.chaos.key_reuse:
            self._first_key += (epoch & 0xFF) << 16
        self.domains: tuple[ChaosNic, ...] = tuple(
            ChaosNic(fabric, self, number) for number in range(nics)
        )

    def next_key(self) -> int:
        """Number the next region; with `key_reuse` each incarnation starts from the first."""
        self._first_key += 1
        return self._first_key

    def step_delay_ps(self) -> int:
        """Draw how long this kick takes to become a step."""
        self._steps = entity = self._steps + 1
        bits = self._next_step()
        delay_ps = 1 + below(bits, self._delay_ps)
        if self._pause_ps and bits & 0x3F == 0 and not self.fabric.healed:
            delay_ps += below(self.fabric.draws.step(entity, 1), self._pause_ps)
        if self._paused_ps:
            return max(delay_ps, self._paused_ps - self.fabric.env.now)
        return delay_ps

    def has_more(self) -> bool:
        """Whether a poll has left entries behind, for which there was no room."""
        for nic in self.domains:  # noqa: SIM110  # any() takes three times as long
            if nic.entries:
                return True
        return False

    def pause(self, for_ps: int) -> None:
        """Have the worker's next steps wait; 0 ends a pause."""
        self._paused_ps = self.fabric.env.now + for_ps


class ChaosFabric:
    """Nodes on one clock, with the chaos of one record.

    Attributes:
        nodes: the incarnation of each host that runs now.
        rows: rows and messages posted so far.
        failed: (NIC, ctx, row, status) of every row and message that ended in an error.
        violations: things that no correct engine does, in words.
        happened: faults that nobody asked for: those that the fabric's own load brought about.
        seen: name -> count of events that a suite should have met.
        healed: whether heal() was called: nothing of the fabric's own will goes wrong any more.

    Args:
        env: the clock; `chaos.tie_shuffle` is switched on there.
        chaos: the knobs.
        row_log: where to record; None: nowhere.
    """

    def __init__(self, env: FabricEnv, chaos: Chaos, *, row_log: RowLog | None = None) -> None:
        self.env = env
        self.chaos = chaos
        self.row_log = row_log if row_log is not None and row_log.on else None
        self.draws = Draws.of(chaos.seed, chaos.kept)
        self.nodes: dict[str, ChaosNode] = {}
        self.rows = 0
        self.failed: list[tuple[str, int, int, Status]] = []
        self.violations: list[str] = []
        self.happened: list[Fault] = []
        self.seen: Counter[str] = Counter()
        self.healed = False
        env.passes_places = True  # a drawn run is the same whether idle turns are made or not
        if chaos.tie_shuffle:
            env.shuffle_ties(chaos.seed)

    __reduce__ = in_one_process

    def __repr__(self) -> str:
        nodes = ", ".join(self.nodes)
        return f"ChaosFabric(nodes {nodes or 'none'}; {self.rows} rows, {len(self.failed)} failed)"

    def node(self, name: str, nics: int) -> ChaosNode:
        """Add a host.

        Raises:
            UsageError: the name is taken, or cannot stand in an address, or so many NICs cannot be.
        """
        if name in self.nodes:
            raise UsageError(f"node {name!r} is there already; restart() makes a new incarnation")
        if not 1 <= nics <= _NICS_MAX:
            raise UsageError(f"node {name!r}: nics={nics}; 1 to {_NICS_MAX} are possible")
        made = ChaosNode(self, name, len(self.nodes) + 1, nics, 1)
        if _ADDRESS.fullmatch(made.domains[0].address) is None:
            raise UsageError(f"node name {name!r}: 1 to 200 bytes of UTF-8 without NUL")
        self.nodes[name] = made
        return made

    def watch(self, row_log: RowLog) -> None:
        """Record from now on; for a fabric that was made without a row log."""
        self.row_log = row_log
        for node in self.nodes.values():
            for nic in node.domains:
                nic.watch(row_log)

    def crash(self, name: str) -> None:
        """End a host as a pulled plug does; restart() can bring it back later."""
        for nic in self._node(name).domains:
            nic.vanish(Status.UNREACHABLE)

    def restart(self, name: str) -> ChaosNode:
        """Crash a host and start it again: same name, next epoch, no regions, no connections."""
        old = self._node(name)
        new = ChaosNode(self, name, old.uid, len(old.domains), old.epoch + 1)
        self.nodes[name] = new
        for nic in old.domains:
            nic.vanish(Status.STALE_PEER)
        return new

    def kill_nic(self, name: str, nic: int) -> None:
        """Kill one NIC for good."""
        self._nic(name, nic).kill()

    def revoke(self, name: str, nic: int | None = None) -> None:
        """Lose the registrations of one NIC, or of all NICs of a node."""
        for number in range(len(self._node(name).domains)) if nic is None else (nic,):
            self._nic(name, number).revoke()

    def inflict(self, fault: Fault) -> None:
        """Carry out a fault, now."""
        match fault:
            case KillNic(name, nic):
                self.kill_nic(name, nic)
            case Revoke(name, nic):
                self.revoke(name, nic)
            case Restart(name):
                self.restart(name)
            case Drift(name, ppm, ahead_ps):
                check_int("Drift: ppm", ppm, -999_999)
                self._node(name).on_drift(
                    1_000_000 + ppm, check_int("Drift: ahead_ps", ahead_ps, 0)
                )
            case Pause(name, for_ps):
                self._node(name).pause(for_ps)
            case Slow(name, nic, factor, for_ps):
                self._nic(name, nic).link.slow(factor, for_ps)
            case Clog(name, nic, for_ps, inward):
                self._nic(name, nic).link.trouble("deaf" if inward else "clog", for_ps)
            case Cut(name, nic, peer, peer_nic, for_ps, one_way):
                here, there = self._nic(name, nic).link, self._nic(peer, peer_nic).link
                there.cut(here, for_ps)
                if not one_way:
                    here.cut(there, for_ps)
            case Mute(name, nic, for_ps):
                self._nic(name, nic).link.trouble("mute", for_ps)
            case Swizzle():
                for delay_ps, one in fault.clogs():
                    self.env.call_at(self.env.now + delay_ps, self._inflict_later, one)

    def _inflict_later(self, fault: Fault) -> None:
        if not self.healed:
            self.inflict(fault)

    def heal(self) -> None:
        """End every trouble of links and workers, for good; the dead stay dead."""
        self.healed = True
        for node in self.nodes.values():
            node.pause(0)
            for nic in node.domains:
                nic.link.heal()

    def script(self, faults: Faults) -> None:
        """Book every fault at its time; with engines on top use Cluster.at, which renews them."""
        for t_ps, fault in faults.events:
            self.env.call_at(t_ps, self._inflict_later, fault)

    # ------------------------------------------------------------------ for the NICs

    def parse(self, address: bytes) -> tuple[str, int, int]:
        """Read an address: name, NIC, epoch. Raises BadDescriptor."""
        found = _ADDRESS.fullmatch(address)
        try:
            if found is not None:
                return found[1].decode(), int(found[2]), int(found[3])
        except UnicodeDecodeError:
            pass
        raise BadDescriptor(f"{address[:80]!r} is not the address of a simulated NIC")

    def find(self, name: str, nic: int, epoch: int) -> ChaosNic | None:
        """The NIC of an address, if that incarnation is the one that runs."""
        node = self.nodes.get(name)
        if node is None or node.epoch != epoch or nic >= len(node.domains):
            return None
        return node.domains[nic]

    def why_lost(self, name: str, epoch: int) -> Status:
        """Why an address cannot be reached."""
        node = self.nodes.get(name)
        return Status.STALE_PEER if node and node.epoch > epoch else Status.UNREACHABLE

    def lost(self, target: Nic, status: Status, *, acks_lost: bool) -> None:
        """Notify every other NIC that one is gone."""
        for node in self.nodes.values():
            for nic in node.domains:
                if nic is not target and nic.state in (NicState.UP, NicState.DEAD):
                    nic.peer_lost(target, status, acks_lost=acks_lost)

    def _node(self, name: str) -> ChaosNode:
        if name not in self.nodes:
            raise UsageError(f"no node {name!r}; there are: {', '.join(self.nodes)}")
        return self.nodes[name]

    def _nic(self, name: str, nic: int) -> ChaosNic:
        domains = self._node(name).domains
        if not 0 <= nic < len(domains):
            raise UsageError(f"node {name!r} has NICs 0 to {len(domains) - 1}, not {nic}")
        return domains[nic]
