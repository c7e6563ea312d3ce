"""The chaos fabric: nodes whose NICs break every promise that the contract does not make.

For correctness: every byte real, one event a fragment, time arbitrary. Here are the fabric and its
nodes; one NIC is `chaos_nic`, the knobs are `faults`. A crash takes a host with all its NICs.
"""

from __future__ import annotations

from typing import Final

from tep.backends.base import Status
from tep.base.checks import check_int
from tep.base.errors import UsageError
from tep.sim.chaos_nic import ChaosNic
from tep.sim.chaos_target import ChaosNode, Fabric, is_address
from tep.sim.clock import FabricEnv, in_one_process
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

_NICS_MAX: Final = 64


class ChaosFabric(Fabric):
    """Nodes on one clock, with the chaos of one record; see `Fabric` for its attributes.

    Args:
        env: the clock; `chaos.tie_shuffle` is switched on there.
        chaos: the knobs.
        row_log: where to record; None: nowhere.
    """

    def __init__(self, env: FabricEnv, chaos: Chaos, *, row_log: RowLog | None = None) -> None:
        super().__init__(env, chaos, row_log)
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
        made = self._make(name, len(self.nodes) + 1, nics, 1)
        if not is_address(made.nics[0].address):
            raise UsageError(f"node name {name!r}: 1 to 200 bytes of UTF-8 without NUL")
        self.nodes[name] = made
        return made

    def _make(self, name: str, uid: int, nics: int, epoch: int) -> ChaosNode:
        made = ChaosNode(self, name, uid, epoch)
        own = tuple(ChaosNic(self, made, number) for number in range(nics))
        made.domains = made.nics = own
        return made

    def watch(self, row_log: RowLog) -> None:
        """Record from now on; for a fabric that was made without a row log."""
        self.row_log = row_log
        for node in self.nodes.values():
            for nic in node.nics:
                nic.watch(row_log)

    def crash(self, name: str) -> None:
        """End a host as a pulled plug does; restart() can bring it back later."""
        for nic in self._node(name).nics:
            nic.vanish(Status.UNREACHABLE)

    def restart(self, name: str) -> ChaosNode:
        """Crash a host and start it again: same name, next epoch, no regions, no connections."""
        old = self._node(name)
        new = self._make(name, old.uid, len(old.nics), old.epoch + 1)
        self.nodes[name] = new
        for nic in old.nics:
            nic.vanish(Status.STALE_PEER)
        return new

    def kill_nic(self, name: str, nic: int) -> None:
        """Kill one NIC for good."""
        self._nic(name, nic).kill()

    def revoke(self, name: str, nic: int | None = None) -> None:
        """Lose the registrations of one NIC, or of all NICs of a node."""
        for number in range(len(self._node(name).nics)) if nic is None else (nic,):
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
                there.trouble(here, for_ps)
                if not one_way:
                    here.trouble(there, for_ps)
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
            for nic in node.nics:
                nic.link.heal()

    def script(self, faults: Faults) -> None:
        """Book every fault at its time; with engines on top use Cluster.at, which renews them."""
        for t_ps, fault in faults.events:
            self.env.call_at(t_ps, self._inflict_later, fault)

    def _node(self, name: str) -> ChaosNode:
        if name not in self.nodes:
            raise UsageError(f"no node {name!r}; there are: {', '.join(self.nodes)}")
        return self.nodes[name]

    def _nic(self, name: str, nic: int) -> ChaosNic:
        nics = self._node(name).nics
        if not 0 <= nic < len(nics):
            raise UsageError(f"node {name!r} has NICs 0 to {len(nics) - 1}, not {nic}")
        found = nics[nic]
        assert isinstance(found, ChaosNic), "the fabric makes no others"
        return found
