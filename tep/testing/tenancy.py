"""The leases of one scenario: receivers lease the bytes of a try to node a, and ask them back.

The owner's part: it grants, asks back, and writes FREED over bytes that are free; from then on
nothing may change there. `sender` uses the leases.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from tep.control.held_leases import MARGIN
from tep.control.leases import Grant, Revocation
from tep.errors import BusyError, ClosedError, LeaseError
from tep.sim.faults_at import Drift
from tep.testing.lab import FREED, Area, Host
from tep.testing.specs import SENDER, TransferSpec
from tep.testing.stage import Run, Stage
from tep.units import PS_PER_NS, PS_PER_S
from tep.wire import Lease

__all__ = ["Leased", "Tenancy"]

_AGAIN_PS: Final = 20_000 * PS_PER_NS
"""How long after its end in quarantine a lease is asked back once more."""


@dataclass(frozen=True, slots=True)
class Leased:
    """The bytes of one try at one receiver, leased to node a.

    Attributes:
        holder: the incarnation of node a that it was given to.
        lease: what node a was given.
        grant: the owner's end.
    """

    host: Host
    holder: Host
    lease: Lease
    grant: Grant


class Tenancy:
    """All leases of one run."""

    def __init__(self, stage: Stage) -> None:
        self._stage: Final = stage
        self._of: dict[tuple[int, int], tuple[Leased, ...]] = {}
        self._granted_ps: dict[tuple[int, int], int] = {}
        for place, spec in enumerate(stage.scenario.transfers):
            if spec.leased:
                granted_ps = max(1, spec.start_ps - spec.lead_ps)
                stage.lab.env.call_at(granted_ps, self.leases, (place, 0))

    def leases(self, which: tuple[int, int]) -> tuple[Leased, ...]:
        """The leases of one try of a transfer, granted when first asked for; () = an owner is gone.

        Args:
            which: place of the transfer, and number of the try.
        """
        if which not in self._of:
            stage = self._stage
            self._granted_ps[which] = stage.lab.env.now
            hosts = stage.receivers(stage.scenario.transfers[which[0]])
            try:
                self._of[which] = tuple(self._grant(which, host) for host in hosts)
            except ClosedError:
                if all(host.live for host in hosts):
                    stage.fail(f"a lease of transfer {which[0]} was refused by an open engine")
                self._of[which] = ()
        return self._of[which]

    def _grant(self, which: tuple[int, int], host: Host) -> Leased:
        stage = self._stage
        spec, area = stage.scenario.transfers[which[0]], stage.lab.areas[which[0]][which[1]]
        grant = host.engine.lease(
            host.mr,
            stage.sender.engine.main_address,
            for_s=(spec.lease_ps or 0) / PS_PER_S,
            offset=area.start,
            nbytes=area.stop - area.start,
            fence=not spec.unfenced,
        )
        stage.seen["leased"] += 1
        grant.over.add_done_callback(lambda end: self._over(which, host, area, end))
        env = stage.lab.env
        if spec.revoke_ps is not None:
            env.call_at(env.now + spec.revoke_ps, lambda _: grant.revoke())
        if spec.renew_ps is not None:
            env.call_at(env.now + spec.renew_ps, lambda _: self._renew(host, grant, spec))
        try:
            host.engine.deregister(host.mr)
        except BusyError:
            pass
        else:
            stage.fail(f"{host.name} deregistered its region under {grant}")
        return Leased(host, stage.sender, Lease.from_bytes(grant.lease.to_bytes()), grant)

    def _renew(self, host: Host, grant: Grant, spec: TransferSpec) -> None:
        """Make a lease last once more as long; only one that is asked back cannot be renewed."""
        stage, ended = self._stage, grant.ending or grant.over.finished
        try:
            grant.renew((spec.lease_ps or 0) / PS_PER_S)
        except LeaseError as error:
            if not ended:
                stage.fail(f"{grant} was not asked back, and cannot be renewed: {error}")
        else:
            stage.seen["lease renewed"] += 1
            if ended:
                stage.fail(f"{grant} was renewed after it was asked back")

    def _ask_back(self, which: tuple[int, int], host: Host, area: Area, old: Revocation) -> None:
        """Try once more to end a lease that is in quarantine."""
        end = old.grant.revoke()
        if end is not old:
            self._stage.seen["asked back once more"] += 1
            end.add_done_callback(lambda end: self._over(which, host, area, end, last=True))

    def _over(
        self, which: tuple[int, int], host: Host, area: Area, end: Revocation, *, last: bool = False
    ) -> None:
        """A lease is over: if its bytes are free, their owner writes over them."""
        stage, run = self._stage, self._stage.runs.get(which)
        if not end.ok:
            stage.seen["lease in quarantine"] += 1
            if not stage.harmed:
                stage.blame(f"{end.grant} ended in quarantine without a cause: {end.error}")
            if not last:
                again_ps = stage.lab.env.now + _AGAIN_PS
                stage.lab.env.call_at(again_ps, lambda _: self._ask_back(which, host, area, end))
            return
        stage.seen["lease fenced" if end.grant.why else "lease free"] += 1
        answered = host.live and not end.grant.why
        if answered and run is not None and run.is_open:
            stage.blame(f"{end.grant} is over, and {run} under it is not")
        host.memory[area.start : area.stop] = FREED * (area.stop - area.start)
        host.freed.append((area.start, area.stop))
        if run is not None and run.snapshot:
            stage.seen["free after a failure"] += 1
            k = run.hosts.index(host)
            before = bytes(host.memory[area.start : area.stop])
            run.snapshot = (*run.snapshot[:k], before, *run.snapshot[k + 1 :])

    # ------------------------------------------------------------------ what an error may say

    def check_accepted(self, run: Run) -> None:
        """A write was accepted: a holder that said that it had stopped may not go on."""
        for leased in self._of.get((run.place, run.number), ()):
            if leased.host.live and leased.grant.over.ok and not leased.grant.why:
                self._stage.fail(f"{run} was accepted, and {leased.grant} is over")

    def may_refuse(self, run: Run) -> bool:
        """Whether a lease of it was asked back, has nearly run out, or its owner is gone."""
        ran_ps = (run.spec.lease_ps or 0) * (1 - MARGIN) - 1000  # seconds are no whole ps
        faults = (fault for _, fault in self._stage.scenario.faults)
        drifts = any(isinstance(fault, Drift) and fault.node == SENDER for fault in faults)
        late = (
            drifts
            or self._stage.lab.env.now >= self._granted_ps.get((run.place, run.number), 0) + ran_ps
        )
        leases = self._of.get((run.place, run.number), ())
        gone = any(not (each.host.live and each.holder.live) for each in leases)
        return late or gone or any(each.grant.ending for each in leases)

    def have_fenced(self, hosts: tuple[Host, ...]) -> bool:
        """Whether a lease may have made one of these fence node a off."""
        owners = {each.host for each in self._all() if each.grant.ending}
        return any(tap.fenced_off for host in owners.intersection(hosts) for tap in host.taps)

    def _all(self) -> Iterator[Leased]:
        for found in self._of.values():
            yield from found
