"""The machines of one timing fabric: what each takes, and what two unlike ones take together.

No clock and no queue. A fabric has one transport: SRD and RC never meet on a wire. Within it nodes
may be of different machines.

Rule 1: what a NIC or a worker does takes what its own machine says. Rule 2: where both ends of a
pair have a part (the way there, the way back), each end gives half of its machine's number. Nothing
published tells the ends apart. Rule 3: a receiver is held for as long as its own NIC would take to
send the same. Rule 4: every draw is a hash of (seed, row), so that one more row shifts no other's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from tep.base.errors import UsageError
from tep.base.hashing import below_array, draw_array, stream_key
from tep.sim.draws import Stream
from tep.sim.profile import FIELDS, Profile, load_profile
from tep.sim.queues import Ints, Rate

__all__ = ["Machine", "Machines", "Pairs", "ack_ps", "latency_ps"]

_TRANSPORT = ("ordered", "imm_eats_recv")
_NETWORK = ("leaf_nodes", "uplink_bps", "spine_ps")
_PAIRED = ("wire_bps", "op_ps", "dma_bps", "latency_ps", "receive_ps", "ack_ps")
"""The numbers for which a pair of unlike machines has numbers of its own, in `Pairs`."""


def latency_ps(source: Profile, target: Profile) -> int:
    """First byte out to first byte in: half of either end's; exactly theirs if they agree."""
    return source.latency_ps // 2 + (target.latency_ps + 1) // 2


def ack_ps(source: Profile, target: Profile) -> int:
    """Last byte in to the sender's completion: the same, but not before the bytes can be seen."""
    return max(source.ack_ps // 2 + (target.ack_ps + 1) // 2, target.receive_ps)


class Machine:
    """One kind of machine.

    Args:
        profile: its numbers.
        kind: its number among those that differ in what a pair takes.
        seed: of the draws.

    Attributes:
        profile, kind: as given.
        wire, dma: its rates.
    """

    def __init__(self, profile: Profile, kind: int, seed: int) -> None:
        self.profile = profile
        self.kind = kind
        self.wire = Rate(profile.wire_bps)
        self.dma = Rate(profile.dma_bps)
        self._key = stream_key(seed, Stream.TIMING)

    def service_ps(self, nbytes: Ints, first: npt.NDArray[np.bool_] | None = None) -> Ints:
        """The time that one of its NICs takes for each quantum.

        Args:
            nbytes: of each.
            first: whether each is the first of its row, which brings the NIC's own time for a row
                with it; None: all are.
        """
        own = self.profile.op_ps if first is None else np.where(first, self.profile.op_ps, 0)
        found: Ints = np.maximum(self.wire.ps(nbytes), own + self.dma.ps(nbytes))
        return found

    def jitter_ps(self, numbers: Ints) -> Ints | int:
        """Draw by how much each row lands later than its bytes took."""
        if not self.profile.jitter_ps:
            return 0
        return below_array(
            draw_array(self._key, 0, numbers.view(np.uint64)), self.profile.jitter_ps
        )


class Machines:
    """All machines of a fabric; a machine is found by its profile.

    Args:
        profiles: of the fabric; a node that names none has the first.
        seed: of the draws.

    Attributes:
        first: the machine of a node that names no profile.
        shortest_ps: the least latency of any pair: the lookahead.
        pairs: numbers of pairs; None: all machines are alike in these.

    Raises:
        UsageError: two transports, or two networks.
    """

    def __init__(self, profiles: Profile | str | Sequence[Profile | str], seed: int) -> None:
        given = [profiles] if isinstance(profiles, Profile | str) else profiles
        if not given:
            raise UsageError("a timing fabric needs one profile at the least")
        self._seed = seed
        self._known: list[Machine] = []
        for profile in map(load_profile, given):
            if all(profile != machine.profile for machine in self._known):
                self._known.append(Machine(profile, self._kind_of(profile), seed))
        self.first = self._known[0]
        mixed = any(machine.kind for machine in self._known)
        self.pairs = Pairs(self._known) if mixed else None
        least_ps = min(profile.latency_ps for profile in self.profiles)
        self.shortest_ps = least_ps if self.pairs is None else self.pairs.shortest_ps

    @property
    def profiles(self) -> list[Profile]:
        """The profiles of all machines."""
        return [machine.profile for machine in self._known]

    @property
    def names(self) -> str:
        """The names of all profiles, for people."""
        return ", ".join(profile.name for profile in self.profiles)

    def seen_and_acked_ps(self, source: Ints, target: Ints, landed: Ints) -> tuple[Ints, Ints]:
        """The times when receivers see rows that land then, and when senders learn of them."""
        if self.pairs is None:
            profile = self.first.profile
            return landed + profile.receive_ps, landed + profile.ack_ps
        seen = landed + self.pairs.receive_ps(target)
        return seen, landed + self.pairs.ack_ps(source, target)

    def find(self, profile: Profile | str | None) -> Machine:
        """Return the machine of a profile; None: the first.

        One that the fabric was not opened with is taken if it is like one of those in all that a
        pair takes: another number of NICs, another CPU.

        Raises:
            UsageError: it is not.
        """
        if profile is None:
            return self.first
        profile = load_profile(profile)
        for machine in self._known:
            if machine.profile == profile:
                return machine
        kind = self._kind_of(profile)
        if kind > max(machine.kind for machine in self._known):
            raise UsageError(
                f"profile {profile.name} is none of this fabric's: {self.names}; open the fabric "
                "with all machines that there will be"
            )
        self._known.append(Machine(profile, kind, self._seed))
        return self._known[-1]

    def _kind_of(self, profile: Profile) -> int:
        """The number of a profile's kind, or the next one."""
        if not self._known:
            return 0
        other = self._known[0].profile
        for name in (*_TRANSPORT, *_NETWORK):
            mine, its = getattr(profile, name), getattr(other, name)
            if mine != its:
                raise UsageError(_unlike(name, profile.name, mine, other.name, its))
        for machine in self._known:
            if all(getattr(profile, n) == getattr(machine.profile, n) for n in _PAIRED):
                return machine.kind
        return 1 + max(machine.kind for machine in self._known)


class Pairs:
    """The numbers of pairs of NICs, where there are unlike machines.

    Attributes:
        kind: of each NIC by its number.
        shortest_ps: the least latency of any pair.
    """

    def __init__(self, machines: Iterable[Machine]) -> None:
        kinds: dict[int, Machine] = {}
        for machine in machines:
            kinds.setdefault(machine.kind, machine)
        self._kinds = list(kinds.values())
        profiles = [machine.profile for machine in self._kinds]
        self._latency = np.array([[latency_ps(a, b) for b in profiles] for a in profiles])
        self._receive = np.array([profile.receive_ps for profile in profiles])
        self._ack = np.array([[ack_ps(a, b) for b in profiles] for a in profiles])
        self.shortest_ps = int(self._latency.min())
        self.kind = np.zeros(16, np.int64)

    def place(self, number: int, kind: int) -> None:
        """Set the kind of a NIC."""
        if number >= len(self.kind):
            more = np.zeros(max(len(self.kind), number), np.int64)
            self.kind = np.concatenate((self.kind, more))
        self.kind[number] = kind

    def latency_ps(self, source: Ints, target: Ints) -> Ints:
        """First byte out to first byte in."""
        found: Ints = self._latency[self.kind[source], self.kind[target]]
        return found

    def receive_ps(self, target: Ints) -> Ints:
        """Last byte in to the immediate."""
        found: Ints = self._receive[self.kind[target]]
        return found

    def ack_ps(self, source: Ints, target: Ints) -> Ints:
        """Last byte in to the sender's completion."""
        found: Ints = self._ack[self.kind[source], self.kind[target]]
        return found

    def holds_ps(
        self, target: Ints, nbytes: Ints, first: npt.NDArray[np.bool_] | None = None
    ) -> Ints:
        """The time that each quantum holds its receiver: `Machine.service_ps` of that end."""
        kinds = self.kind[target]
        found = np.empty(len(target), np.int64)
        for kind in np.unique(kinds).tolist():
            mine = kinds == kind
            starts = None if first is None else first[mine]
            found[mine] = self._kinds[kind].service_ps(nbytes[mine], starts)
        return found


def _unlike(name: str, mine: str, value: object, its: str, other: object) -> str:
    """Why two machines cannot be on one fabric."""
    if name in _TRANSPORT:
        return (
            f"profiles {mine} and {its} are of two transports ({name}: {value}, {other}), whose "
            "NICs cannot speak to each other; open a Cluster for each of them inside one "
            "tep.sim.run(), and join them by a program that copies from one to the other"
        )
    return (
        f"profiles {mine} and {its} differ in {FIELDS[name].path} ({value}, {other}), but they "
        "stand in one network"
    )
