"""Planted bugs: peers that are lost, come back, restart and leave.

Most are looked for in those of the oracle's runs that watch or remove a peer: one in eight. Three
are about one NIC that flaps under steady traffic, which has lives of its own.
"""

from __future__ import annotations

from collections.abc import Callable

from tep.control.membership import Membership, PeerChange, PeerState
from tep.core.group import DomainGroup
from tep.core.path import FarEnds
from tep.core.peers import PeerBook
from tests.gate.registry import Bug, Change
from tests.support.lives import FATES

LIVES: dict[str, tuple[Bug, tuple[str, ...], dict[str, object]]] = {}
"""Each bug, with the fates among which it is looked for, and the fabric's knobs that it needs."""

BUDGET = 80

COMPANY: dict[str, Bug] = {}
"""Each bug that is looked for in the oracle's runs."""


def company(plant: Callable[[], list[Change]]) -> Callable[[], list[Change]]:
    """Register a bug; few of the seeds have a peer that is watched or removed."""
    COMPANY[plant.__name__] = Bug(plant.__name__, plant, budget=20_000)
    return plant


def life(
    *fates: str, **knobs: object
) -> Callable[[Callable[[], list[Change]]], Callable[[], list[Change]]]:
    """Register a bug, to be looked for in lives with these fates, or any."""

    def register(plant: Callable[[], list[Change]]) -> Callable[[], list[Change]]:
        LIVES[plant.__name__] = Bug(plant.__name__, plant, BUDGET), fates or FATES, knobs
        return plant

    return register


# ---------------------------------------------------------------------- hearts


@company
def own_pause_is_silence() -> list[Change]:
    """An engine that was held up takes the time for silence of its peers."""
    beat = Membership._beat

    def hasty(self, peer, watch, now_ns):
        watch._due_ns = now_ns
        beat(self, peer, watch, now_ns)

    return [(Membership, "_beat", hasty)]


@company
def lost_at_every_beat() -> list[Change]:
    """A peer is told to be lost for as long as it is."""
    beat = Membership._beat

    def again(self, peer, watch, now_ns):
        if peer.state is PeerState.LOST:
            self._lose(peer, "still no answer")
        beat(self, peer, watch, now_ns)

    return [(Membership, "_beat", again)]


@company
def only_the_first_nic_is_asked() -> list[Change]:
    """A peer whose first NIC is cut off is lost, though its others would answer."""
    ping = Membership._ping

    def first(self, peer, number, now_ns):
        if number == 0:
            ping(self, peer, number, now_ns)

    return [(Membership, "_ping", first)]


@company
def a_question_is_an_answer() -> list[Change]:
    """A heart that was asked counts as one that beats."""
    ping = Membership._ping

    def heard(self, peer, number, now_ns):
        ping(self, peer, number, now_ns)
        peer.heard_ns = now_ns

    return [(Membership, "_ping", heard)]


# ---------------------------------------------------------------------- events


def tells(wanted: Callable[[PeerChange], bool]) -> list[Change]:
    """Tell only those changes for which wanted(kind) says so."""
    emit = Membership._emit

    def some(self, peer, kind, reason, nic=None):
        if wanted(kind):
            emit(self, peer, kind, reason, nic)

    return [(Membership, "_emit", some)]


@company
def nobody_hears_of_a_return() -> list[Change]:
    """A peer is back, and only its losses are told."""
    return tells(lambda kind: kind is not PeerChange.BACK)


@company
def restart_is_a_loss() -> list[Change]:
    """A later incarnation answers, and the peer is taken for lost."""
    return [(Membership, "met_later", lambda *_: None)]


# ---------------------------------------------------------------------- NICs


@life("flap")
def shunned_for_good() -> list[Change]:
    """A NIC that is back is told of, and not used."""
    return [(DomainGroup, "mark_up", lambda *_: None)]


@life("flap")
def back_over_a_fenced_path() -> list[Change]:
    """A NIC that answers control messages is used again, though no row gets there."""

    def every(self, link, number):
        return [(nic, number) for nic, alive in enumerate(self._group.alive) if alive]

    def route(self, domain, link, nic):
        alive, there = self.alive, link.alive
        here = next(i for k in range(len(alive)) if alive[i := (domain + k) % len(alive)])
        return here, next(j for k in range(len(there)) if there[j := (nic + k) % len(there)])

    return [(Membership, "_paths", every), (DomainGroup, "route", route)]


@life("flap", ordered=True, flush_on_error=True, dead_after_ps=300_000)
def notes_take_rows_along() -> list[Change]:
    """A heartbeat fails and flushes the rows on its path, which fail for no reason of their own."""
    return [(FarEnds, "control_heard", lambda *_, **__: None)]


# ---------------------------------------------------------------------- leaving


@company
def removed_at_once() -> list[Change]:
    """A removal does not wait for the transfers that refer to the peer."""
    return [("tep.control.membership", "_refers", lambda *_: False)]


@company
def removed_after_the_first() -> list[Change]:
    """A removal waits for one transfer of many."""
    leave = Membership.leave

    def short(self, removal):
        leave(self, removal)
        del removal.waits[1:]

    return [(Membership, "leave", short)]


@company
def requests_during_removal() -> list[Change]:
    """A peer that is being removed takes requests as before."""

    def open_still(self, addr):
        return self.links.get((addr.backend, addr.name))

    return [(PeerBook, "leave", open_still)]


@company
def removed_but_remembered() -> list[Change]:
    """The link is gone, its regions are not."""
    drop = PeerBook.drop

    def keep(self, link):
        remotes = dict(self._remotes)
        drop(self, link)
        self._remotes.update(remotes)

    return [(PeerBook, "drop", keep)]
