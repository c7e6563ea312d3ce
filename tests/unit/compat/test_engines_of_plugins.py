"""Engines of plug-ins: their patience with a peer that is silent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tep.compat import engines
from tep.compat.nixl import nixl_agent
from tep.integrations.weights.member import Fabric, Member
from tests.support.here import require
from tests.support.inside import nics_of
from tests.tidy.sources import python_files, text

TCP = {"provider": "tcp", "nics": ["127.0.0.1"]}


def patience(engine) -> float:
    return float(nics_of(engine)[0].caps.peer_timeout_s)


def test_tcp_is_patient_in_plugins_unless_told_otherwise() -> None:
    """A peer that unpickles a model holds its lock for seconds: its transfers failed after 4 s."""
    require("tcp")
    with engines.open_engine("libfabric", **TCP) as engine:
        assert 30.0 == patience(engine)
    with engines.open_engine("libfabric", **TCP, peer_timeout_s=7.0) as engine:
        assert 7.0 == patience(engine)


@pytest.mark.parametrize("backend", ["local", "loopback", "auto"])
def test_backends_without_that_option_are_opened_as_they_are(backend) -> None:
    """An option that a backend does not have is refused."""
    with engines.open_engine(backend) as engine:
        assert patience(engine) > 0


def test_auto_is_patient_where_it_chooses_libfabric(monkeypatch) -> None:
    """On an instance with EFA the same peers are as silent."""
    opened = []
    choice = engines.choose()._replace(backend="libfabric")
    monkeypatch.setattr(engines, "choose", lambda: choice)
    monkeypatch.setattr(
        engines.TransferEngine, "open", lambda *args, **options: opened.append((args, options))
    )
    engines.open_engine("auto", name="x")
    assert [(("auto",), {"name": "x", "peer_timeout_s": 30.0})] == opened


def test_nixl_and_weights_are_patient(monkeypatch) -> None:
    """Both said 30 s, or nothing, and took what the backend does by itself: 5 s."""
    require("tcp")
    monkeypatch.setenv("TEP_NIXL_BACKEND", "libfabric")
    monkeypatch.setenv("TEP_NIXL_OPTIONS", json.dumps(TCP))
    agent = nixl_agent("a")
    try:
        assert 30.0 == patience(agent.engine)
    finally:
        agent.close()
    member = Member("m", Fabric("libfabric", TCP))
    try:
        assert 30.0 == patience(member._open())
    finally:
        member.close()


def test_no_plugin_opens_an_engine_another_way() -> None:
    """The next one would be impatient again."""
    found = [
        str(path)
        for path in python_files("tep")
        if path.parts[1] in {"integrations", "compat"}
        and path != Path("tep/compat/engines.py")
        and "TransferEngine.open(" in text(path)
    ]
    assert [] == found
