"""The machines of one timing fabric: what each takes, and what two unlike ones take together.

Also by how much rows land later than their bytes took: jitter, tails of sprayed paths, losses. No
clock and no queue. A fabric has one transport: SRD and RC never meet on a wire. Within it nodes may
be of different machines.

Rule 1: what a NIC or a worker does takes what its own machine says. Rule 2: where both ends of a
pair have a part (the way there, the way back), each end gives half of its machine's number. Nothing
published tells the ends apart. Rule 3: a receiver is held for as long as its own NIC would take to
send the same. Rule 4: every draw is a hash of (seed, row), so that one more row shifts no other's.
Rule 5: where rows are ordered, none lands before one that was posted to the same NIC before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from tep.base.errors import UsageError
from tep.base.hashing import below_array, draw_array, stream_key
from tep.sim.draws import Stream
from tep.sim.profile import FIELDS, Profile, load_profile
from tep.sim.queues import Ints, Rate

__all__ = [
    "PACKET_BYTES", "InOrder", "Late", "Machine", "Machines", "Pairs", "ack_ps", "latency_ps",
]  # fmt: skip

_CONGESTION = tuple(name for name in FIELDS if name.startswith(("pause_", "ecn_")))
_NETWORK = tuple(name for name, field in FIELDS.items() if field.path.startswith("network."))
_PAIRED = ("wire_bps", "op_ps", "dma_bps", "latency_ps", "receive_ps", "ack_ps", "bus_bps")
"""The numbers for which a pair of unlike machines has numbers of its own, in `Pairs`."""


def latency_ps(source: Profile, target: Profile) -> int:
    """First byte out to first byte in: half of either end's; exactly theirs if they agree."""
    return source.latency_ps // 2 + (target.latency_ps + 1) // 2


def ack_ps(source: Profile, target: Profile) -> int:
    """Last byte in to the sender's completion: the same, but not before the bytes can be seen."""
    return max(source.ack_ps // 2 + (target.ack_ps + 1) // 2, target.receive_ps)


class Machine:
    """One kind of machine.

    Attributes:
        kind: its number among those that differ in what a pair takes.
        late: delays of its NICs' rows.
    """

    def __init__(self, profile: Profile, kind: int, seed: int) -> None:
        self.profile = profile
        self.kind = kind
        self.wire = Rate(profile.wire_bps)
        self.dma = Rate(profile.dma_bps)
        self.late = Late(profile, seed)

    def service_ps(self, nbytes: Ints, first: npt.NDArray[np.bool_] | None = None) -> Ints:
        """The time that one of its NICs takes for each quantum.

        The first quantum of a row brings the NIC's own time for a row with it; `first` says which
        these are, None: all are.
        """
        own = self.profile.op_ps if first is None else np.where(first, self.profile.op_ps, 0)
        found: Ints = np.maximum(self.wire.ps(nbytes), own + self.dma.ps(nbytes))
        return found


class Machines:
    """All machines of a fabric; a machine is found by its profile.

    Attributes:
        first: the machine of a node that names no profile.
        shortest_ps: the least latency of any pair: the lookahead.
        pairs: numbers of pairs; None: all machines are alike in these.

    Raises:
        UsageError: two transports, or two networks.
    """

    def __init__(
        self,
        profiles: Profile | str | Sequence[Profile | str],
        seed: int,
    ) -> None:
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
        return [machine.profile for machine in self._known]

    @property
    def names(self) -> str:
        return ", ".join(profile.name for profile in self.profiles)

    def latency_ps(self, source: Ints, target: Ints) -> Ints | int:
        """First byte out to first byte in."""
        return self.shortest_ps if self.pairs is None else self.pairs.latency_ps(source, target)

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
        for name in ("ordered", *_CONGESTION, *_NETWORK):
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
        self._scale = np.array([one.wire.scale for one in self._kinds])
        self.shortest_ps = int(self._latency.min())
        self.kind = np.zeros(16, np.int64)

    def place(self, number: int, kind: int) -> None:
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

    def scale(self, target: Ints) -> Ints:
        """The scale of each receiver's wire, as of Rate."""
        found: Ints = self._scale[self.kind[target]]
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
    """Say why two machines cannot be on one fabric."""
    if name == "ordered":
        return (
            f"profiles {mine} and {its} are of two transports ({name}: {value}, {other}), whose "
            "NICs cannot speak to each other; open a Cluster for each of them inside one "
            "tep.sim.run(), and join them by a program that copies from one to the other"
        )
    what = "they stand in one network"
    if name in _CONGESTION:
        what = "both ends of a pair take part in it"
    return f"profiles {mine} and {its} differ in {FIELDS[name].path} ({value}, {other}), but {what}"


PACKET_BYTES: Final = 4096
_PPM: Final = 1e-6


class Late:
    """The delays of the rows that the NICs of one machine send."""

    def __init__(self, profile: Profile, seed: int) -> None:
        self._profile = profile
        self._key = stream_key(seed, Stream.TIMING)
        self._wire = Rate(profile.wire_bps)

    def extra_ps(self, numbers: Ints, nbytes: Ints) -> Ints | int:
        """Draw the delay of each row's landing.

        A lost packet costs its row the time until it is missed, and the bytes from there on once
        more; where the packet stands is drawn. Of several losses in a row one is counted.
        """
        profile = self._profile
        extra: Ints | int = 0
        if profile.jitter_ps:
            extra = below_array(self._bits(numbers, 0), profile.jitter_ps)
        if profile.tail_ppm:
            share = profile.tail_ppm * _PPM
            drawn = self._fractions(numbers, 1)
            late = -profile.tail_ps * np.log(np.minimum(drawn, share) / share)
            extra = extra + late.astype(np.int64)
        if profile.loss_ppm:
            packets = np.maximum(1, -(-nbytes // PACKET_BYTES))
            hit = self._fractions(numbers, 2) < 1 - (1 - profile.loss_ppm * _PPM) ** packets
            again = (nbytes * self._fractions(numbers, 3)).astype(np.int64)
            extra = extra + np.where(hit, profile.retry_ps + self._wire.ps(again), 0)
        return extra

    def _bits(self, numbers: Ints, index: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        return draw_array(self._key, index, numbers.view(np.uint64))

    def _fractions(self, numbers: Ints, index: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Even between 0 and 1, 0 left out."""
        return (self._bits(numbers, index).astype(np.float64) + 1) / 2.0**64


class InOrder:
    """The latest landing of each pair, where rows are ordered: a late one holds up others."""

    def __init__(self) -> None:
        self._last: dict[tuple[int, int], int] = {}

    def settle(self, source: Ints, target: Ints, numbers: Ints, landed: Ints) -> Ints:
        """Landings where none overtakes: rows of one pair of NICs in the order of their numbers."""
        order = np.lexsort((numbers, target, source))
        pairs = list(zip(source[order].tolist(), target[order].tolist(), strict=True))
        found = landed.copy()
        before, last = None, 0
        for place, pair in zip(order.tolist(), pairs, strict=True):
            last = max(int(landed[place]), last if pair == before else self._last.get(pair, 0))
            found[place], before = last, pair
        return found

    def keep(self, source: Ints, target: Ints, landed: Ints) -> None:
        """Record the landings of rows."""
        for pair, time_ps in zip(
            zip(source.tolist(), target.tolist(), strict=True), landed.tolist(), strict=True
        ):
            self._last[pair] = max(self._last.get(pair, 0), time_ps)
