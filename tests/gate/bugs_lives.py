"""Planted bugs: peers that are lost, come back, restart and leave.

They are looked for in the oracle's runs that watch or remove a peer: one in eight.
"""

from __future__ import annotations

from collections.abc import Callable

from tep.control.membership import Membership, PeerChange, PeerState
from tep.core.regions import PeerBook
from tests.gate.registry import Bug, Change

COMPANY: dict[str, Bug] = {}
"""Each bug that is looked for in the oracle's runs."""


def company(plant: Callable[[], list[Change]]) -> Callable[[], list[Change]]:
    """Register a bug; few of the seeds have a peer that is watched or removed."""
    COMPANY[plant.__name__] = Bug(plant.__name__, plant, budget=20_000)
    return plant


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

    def keep(self, link, *, fenced):
        remotes = dict(self._remotes)
        drop(self, link, fenced=fenced)
        self._remotes.update(remotes)

    return [(PeerBook, "drop", keep)]
