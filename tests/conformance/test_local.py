"""The contract on the local backend, both ends in this process: as people get it, and cramped.

What needs another process (deaths, permissions, sleep) is in tests/e2e/test_local_two_processes.py;
the way into mapped memory in tests/unit/backends/test_local_copies.py.
"""

from __future__ import annotations

from unittest import mock

import pytest

import tep
from tep.backends import local
from tep.backends.base import Opened
from tep.backends.local import LocalDomain, open_domains
from tep.testing.contract import DomainContract
from tep.testing.contract_engine import EngineContract, OpenEngines
from tep.testing.world import Ability, Node, OpenWorld

pytestmark = pytest.mark.slow  # real libraries and clocks: not in the fast minute


def open_deep(nics: int, sq_depth: int) -> Opened:
    """Open NICs with another depth of their queues."""
    with mock.patch.object(local, "_SQ_DEPTH", sq_depth):
        return open_domains(nics)


class LocalWorld(OpenWorld):
    """Nodes of one process, each with sockets and shared memory of its own."""

    def __init__(self, sq_depth: int = 4096) -> None:
        abilities = frozenset({Ability.KILL, Ability.RESTART, Ability.FORK})
        super().__init__(lambda nics: open_deep(nics, sq_depth), abilities)

    def kill(self, node: Node) -> None:
        for domain in node.domains:
            assert isinstance(domain, LocalDomain)
            domain.die()

    def restart(self, node: Node) -> Node:
        reborn = open_domains(len(node.domains), name=node.name)
        self.nodes.append(reborn)
        return reborn


class TestLocal(DomainContract):
    """The contract on `local` with default options."""

    @pytest.fixture
    def world(self):
        with LocalWorld() as world:
            yield world


class TestShallowQueue(DomainContract):
    """Queues of three rows: nearly every post is refused in part."""

    @pytest.fixture
    def world(self):
        with LocalWorld(sq_depth=3) as world:
            yield world


class TestSmallHelpings(DomainContract):
    """A helping of 100 bytes: nearly every row is cut, and carried out over several polls."""

    @pytest.fixture
    def world(self, monkeypatch):
        monkeypatch.setattr("tep.backends.local.sender.HELPING_BYTES", 100)
        with LocalWorld() as world:
            world.turns_max = 400_000
            yield world


def local_engines(make_driver):
    """Engines of one process, two NICs each."""

    def opened(name=None):
        return tep.TransferEngine.open("local", nics=2, name=name, driver=make_driver())

    return OpenEngines(opened, opened)


class TestEngines(EngineContract):
    """The engine's share: callers turn, as people get it; and a worker thread alone."""

    @pytest.fixture(params=["default", "thread"])
    def engines(self, request):
        make_driver = {"default": lambda: None, "thread": tep.ThreadDriver}[request.param]
        with local_engines(make_driver) as engines:
            yield engines
