"""The parts of an engine, for tests of one part, which look at what no public word tells."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tep.core.path import Link
from tep.core.regions import PeerBook
from tep.engine import TransferEngine
from tep.engine.machine import Machine
from tep.engine.worker import Worker


def machine_of(engine: TransferEngine) -> Machine:
    """What the engine's driver turns."""
    return engine._machine


def worker_of(engine: TransferEngine) -> Worker:
    """What posts, polls and counts."""
    return engine._machine.worker


def nics_of(engine: TransferEngine) -> Sequence[Any]:
    """Its NICs, as the backend made them."""
    return engine._machine.domains


def peers_of(engine: TransferEngine) -> PeerBook:
    """The peers that the engine has met."""
    return engine._machine.peers


def link_of(engine: TransferEngine, peer: TransferEngine) -> Link:
    """The engine's link to a peer, met now if it was not before."""
    return peers_of(engine).link(peer.main_address, "test")
