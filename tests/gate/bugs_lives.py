"""Planted bugs: peers that are lost, come back, restart and leave.

They are looked for in the oracle's runs that watch or remove a peer: one in eight.
"""

from __future__ import annotations

from tep.control.membership import Membership
from tep.core.regions import PeerBook
from tests.gate.registry import MEMBERSHIP, Bug, Change, bug, mistake

COMPANY: dict[str, Bug] = {}
"""Each bug that is looked for in the oracle's runs."""


company = bug(20_000, COMPANY)
"""Register a bug; few of the seeds have a peer that is watched or removed."""

# ---------------------------------------------------------------------- hearts


@company
def own_pause_is_silence() -> list[Change]:
    """An engine that was held up takes the time for silence of its peers."""
    return mistake(
        MEMBERSHIP, "peer.heard_ns = min(now_ns, peer.heard_ns + now_ns - watch._due_ns)", "pass"
    )


@company
def lost_at_every_beat() -> list[Change]:
    """A peer is told to be lost for as long as it is."""
    return mistake(
        MEMBERSHIP,
        "if peer.state is PeerState.ALIVE and silent_ns",
        "if peer.state is not PeerState.RESTARTED and silent_ns",
    )


@company
def only_the_first_nic_is_asked() -> list[Change]:
    """A peer whose first NIC is cut off is lost, though its others would answer."""
    return mistake(
        MEMBERSHIP,
        "        if paths:\n            self._say(",
        "        if paths and number == 0:\n            self._say(",
    )


@company
def a_question_is_an_answer() -> list[Change]:
    """A heart that was asked counts as one that beats."""
    return mistake(
        MEMBERSHIP,
        "        if paths:\n            self._say(",
        "        peer.heard_ns = now_ns\n        if paths:\n            self._say(",
    )


# ---------------------------------------------------------------------- events


@company
def nobody_hears_of_a_return() -> list[Change]:
    """A peer is back, and only its losses are told."""
    return mistake(MEMBERSHIP, 'self._emit(peer, PeerChange.BACK, "it answers again")', "pass")


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
        remotes = dict(self.remotes)
        drop(self, link, fenced=fenced)
        self.remotes.update(remotes)

    return [(PeerBook, "drop", keep)]
