"""Variables that people have set for NCCL: how they are read, and what they change."""

from __future__ import annotations

import pytest

import tep
from tep.backends import auto, open_backend
from tep.backends.verbs import facts, open_domains
from tep.base.errors import BackendUnavailable, UsageError
from tep.host.nics import HCA, read_list, read_number, said
from tep.host.topology import detect
from tests.support.trees import dgx_h100

GIVEN = "NCCL_IB_HCA", "NCCL_IB_GID_INDEX", "NCCL_IB_TC", "NCCL_IB_SL"


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    """Nothing of NCCL's is set by whoever runs the tests."""
    for name in GIVEN:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ("", {"mlx5_1", "mlx5_10", "irdma0"}),
        ("mlx5_1", {"mlx5_1", "mlx5_10"}),
        ("=mlx5_1", {"mlx5_1"}),
        ("=mlx5_1:1,irdma0", {"mlx5_1", "irdma0"}),
        ("^mlx5_1", {"irdma0"}),
        ("^=mlx5_1:1", {"mlx5_10", "irdma0"}),
    ],
)
def test_a_list_means_what_it_means_to_nccl(text, taken):
    """A beginning is enough without "=": whoever writes mlx5_1 may get mlx5_10 as well."""
    found = read_list(HCA, {HCA: text}.get)

    assert taken == {name for name in ("mlx5_1", "mlx5_10", "irdma0") if found.takes(name)}


@pytest.mark.parametrize(
    ("text", "value"),
    [("", None), ("3", 3), ("0x6a", 106), ("-1", None), ("x", None), ("256", None)],
)
def test_a_number_is_read_or_said_to_be_impossible(text, value):
    """A misspelt one that is skipped in silence sends packets into another class."""
    found = read_number("NCCL_IB_TC", {"NCCL_IB_TC": text}.get, (0, 255))
    told = said([found], {"NCCL_IB_TC": "traffic_class"})

    assert value == found.value
    assert (text in {"x", "256"}) == ("not used" in told)
    assert (value is not None) == ("(traffic_class)" in told)


def opened(stub, monkeypatch, variables, nics=None, **options):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TEP_LIBIBVERBS", stub.path)
    return open_domains(nics, **options)


def test_what_is_set_for_nccl_counts_for_verbs_too_and_explain_names_it(stub, monkeypatch):
    """A cluster's own choices are in its job scripts already; asked twice, they differ one day."""
    variables = {"NCCL_IB_HCA": "=stub1,stub3", "NCCL_IB_TC": "160", "NCCL_IB_SL": "3"}
    found = opened(stub, monkeypatch, variables | {"NCCL_IB_GID_INDEX": "0"})
    (device, other) = (domain.device for domain in found.domains)
    route = device.route(bytes(16), 0)
    for domain in found.domains:
        domain.close()

    assert ["stub1", "stub3"] == [device.name, other.name]
    assert (160, 3, 0) == (route.grh.traffic_class, route.sl, device.gid.entry)
    for name in GIVEN:
        assert f"{name}=" in found.about
    assert {"stub1", "stub3"} == set(facts()["nics"])
    with tep.TransferEngine.open("verbs", driver=tep.InlineDriver()) as engine:
        assert "from the environment: NCCL_IB_HCA==stub1,stub3" in engine.explain()


def test_an_option_of_ours_counts_before_the_environment(stub, monkeypatch):
    """Whoever writes it into the program means this engine."""
    variables = {"NCCL_IB_HCA": "stub1", "NCCL_IB_TC": "160", "NCCL_IB_SL": "3"}
    options = {"traffic_class": 8, "service_level": 0}
    found = opened(stub, monkeypatch, variables, ["stub2"], **options)
    (domain,) = found.domains
    route = domain.device.route(bytes(16), 0)
    domain.close()

    assert ("stub2", 8, 0) == (domain.caps.nic, route.grh.traffic_class, route.sl)
    assert "" == found.about


def test_a_variable_that_leaves_nothing_is_named_in_the_error(stub, monkeypatch):
    """A list for another cluster would read as a machine without NICs."""
    with pytest.raises(BackendUnavailable, match="NCCL_IB_HCA=mlx5 leaves it out"):
        opened(stub, monkeypatch, {"NCCL_IB_HCA": "mlx5"})
    with pytest.raises(UsageError, match="NCCL_IB_GID_INDEX=77 is empty on stub1"):
        opened(stub, monkeypatch, {"NCCL_IB_GID_INDEX": "77"}, ["stub1"])


@pytest.mark.parametrize(
    ("text", "nics"),
    [("=mlx5_1,mlx5_2", {"mlx5_1", "mlx5_2"}), ("^=mlx5_0", {f"mlx5_{k}" for k in (3, 4, 5)})],
)
def test_a_machines_topology_knows_the_list(monkeypatch, text, nics):
    """Listed NICs are the user's own choice, storage ports or not; a list of exceptions is none."""
    built = dgx_h100()
    built.variables["NCCL_IB_HCA"] = text
    seen = detect(built.capture())

    assert nics <= {nic.name for nic in seen.nics}
    assert any("NCCL_IB_HCA" in why for _, why in seen.left)
    asked = {}

    def open_loopback(backend, /, **options):
        asked.update(options)
        return open_backend("loopback")

    monkeypatch.setattr(auto, "open_backend", open_loopback)
    monkeypatch.setattr(auto, "LiveFiles", built.capture)
    found = auto.open_at("verbs", "cuda:0", {})
    for domain in found.domains:
        domain.close()

    assert set(asked["nics"]) <= {nic.name for nic in seen.nics}
    assert f"NCCL_IB_HCA={text} (which NICs are taken)" in found.about
