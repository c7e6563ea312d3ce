"""The exporters: each metric of the table, named by the conventions, with the engine's numbers."""

from __future__ import annotations

import gc
import math
import re
from pathlib import Path

import pytest

import tep
from tep.observe.metrics import METRICS, OpenTelemetry, Prometheus
from tests.support.inside import machine_of, worker_of
from tests.support.pairs import pair

prometheus_client = pytest.importorskip("prometheus_client", reason="extra `metrics`")
sdk = pytest.importorskip("opentelemetry.sdk.metrics", reason="extra `otel`")
export = pytest.importorskip("opentelemetry.sdk.metrics.export", reason="extra `otel`")


def busy(p) -> None:
    """Two writes, one of them cancelled, and an immediate."""
    got = p.b.expect_imm_count(7, 1)
    sent = p.a.submit_single_write(4096, (p.mr, 0), (p.desc, 0), 7)
    p.settle(sent)
    p.settle(got)
    late = p.a.submit_single_write(64, (p.mr, 0), (p.desc, 0))
    late.cancel()
    p.settle(late)
    worker_of(p.a).journal.say("nic_down", "a NIC is down")


def test_names_follow_the_conventions() -> None:
    """A dashboard finds `_total`, `_bytes` and `_seconds`, or nothing."""
    for metric in METRICS:
        assert re.fullmatch(r"tep(\.[a-z][a-z_]*)+", metric.name)
        assert metric.unit in {"By", "s", "1"} or re.fullmatch(r"\{[a-z]+\}", metric.unit)
        assert metric.text.endswith(".")
        name = metric.prometheus_name
        assert re.fullmatch(r"tep_[a-z_]+", name)
        assert name.endswith("_total") == (metric.kind == "counter")
        assert ("_bytes" in name) == (metric.unit == "By")
        assert ("_seconds" in name) == (metric.unit == "s")
        assert (metric.read is None) == (metric.kind == "histogram") == bool(metric.bounds)
        assert list(metric.bounds) == sorted(metric.bounds)
    assert len(METRICS) == len({metric.name for metric in METRICS})


def test_durations_are_told_apart_from_a_microsecond_to_a_minute() -> None:
    """Buckets that all transfers fall into, or none, show nothing."""
    (metric,) = (metric for metric in METRICS if metric.name == "tep.transfer.duration")
    decades = [10.0**e for e in range(-6, 2)]

    assert [m * d for d in decades for m in (1, 2.5, 5)] == pytest.approx(metric.bounds)


def test_the_page_lists_every_metric() -> None:
    """A dashboard is built from the names on that page."""
    page = Path("docs/howto/sight.md").read_text("utf-8")
    rows = [f"| `{m.name}` | `{m.prometheus_name}` | {m.text} |" for m in METRICS]

    assert rows == re.findall(r"^\| `tep\..*$", page, re.MULTILINE)


def test_prometheus_has_the_numbers_of_stats() -> None:
    """An alert on numbers that are not the engine's wakes somebody for nothing, or nobody."""
    registry = prometheus_client.CollectorRegistry()
    with pair() as p:
        exporter = Prometheus(registry)
        exporter.add(p.a)
        exporter.add(p.b)
        busy(p)
        text = prometheus_client.generate_latest(registry).decode()
        stats, a, b = p.a.stats(), {"engine": p.a.name}, {"engine": p.b.name}

        def value(name: str, **labels: str) -> float | None:
            return registry.get_sample_value(name, labels)

        assert stats.transfers_done == value("tep_transfers_total", state="done", **a)
        assert 1 == value("tep_transfers_total", state="cancelled", **a)
        moved = sum(
            value("tep_nic_io_bytes_total", nic=f"{k}", direction="write", **a)
            for k in range(len(stats.nics))
        )
        assert sum(nic.nbytes for nic in stats.nics) == moved
        assert p.b.stats().imms_counted == value("tep_immediates_total", **b)
        assert 1 == value("tep_nic_up", nic="0", **a)
        assert 1 == value("tep_faults_total", kind="nic_down", **a)
        took = {"kind": "single", "state": "done", **a}
        assert 1 == value("tep_transfer_duration_seconds_count", **took)
        assert 0 < value("tep_transfer_duration_seconds_sum", **took) < 60
        assert 4096 == value("tep_transfer_length_bytes_sum", **took)
        assert 0 == value("tep_transfer_length_bytes_bucket", le="1024.0", **took)
        assert 1 == value("tep_transfer_length_bytes_bucket", le="4096.0", **took)
        assert 1 == value("tep_transfer_length_bytes_bucket", le="+Inf", **took)
        with pytest.raises(tep.UsageError, match="exported already"):
            exporter.add(p.a)
        exporter.remove(p.a)
        exporter.remove(p.a)
        busy(p)  # and nobody hears of it
        assert 1 == value("tep_transfer_duration_seconds_count", **took)
        exporter.close()
        exporter.close()
    for metric in METRICS:
        assert f"# HELP {metric.prometheus_name} {metric.text}" in text
    assert b"" == prometheus_client.generate_latest(registry).strip()


def test_opentelemetry_has_the_numbers_of_stats() -> None:
    """OpenTelemetry must show the same numbers, by its own names and units."""
    reader = export.InMemoryMetricReader()
    provider = sdk.MeterProvider([reader])
    with pair() as p:
        exporter = OpenTelemetry(provider)
        exporter.add(p.a)
        busy(p)
        data = reader.get_metrics_data()
        [scope] = data.resource_metrics[0].scope_metrics
        found = {metric.name: metric for metric in scope.metrics}
        stats = p.a.stats()
        exporter.close()
        busy(p)
    provider.shutdown()
    assert {(m.name, m.unit) for m in METRICS if m.name != "tep.control.dropped"} == {
        (metric.name, metric.unit)
        for metric in found.values()
        if metric.name != "tep.control.dropped"
    }
    moved = [point.value for point in found["tep.nic.io"].data.data_points]
    assert sum(nic.nbytes for nic in (*stats.nics, *stats.reads)) == sum(moved)
    points = {
        point.attributes["tep.state"]: point
        for point in found["tep.transfer.duration"].data.data_points
    }
    assert {"done", "cancelled"} == points.keys()
    assert 1 == points["done"].count
    assert {"tep.engine": p.a.name, "tep.kind": "single", "tep.state": "done"} == dict(
        points["done"].attributes
    )
    assert math.isclose(1e-6, points["done"].explicit_bounds[0])


def test_an_exporter_keeps_no_engine_alive() -> None:
    """An exporter is made once; engines come and go."""
    registry = prometheus_client.CollectorRegistry()
    exporter = Prometheus(registry)

    def live() -> str:
        with pair() as p:
            exporter.add(p.a)
            busy(p)
        return prometheus_client.generate_latest(registry).decode()

    assert 'tep_peers{engine="a"}' in live()
    gc.collect()
    assert 'tep_peers{engine="a"}' not in prometheus_client.generate_latest(registry).decode()
    live()  # another engine of the same name
    exporter.close()


def test_a_mistake_of_an_exporter_ends_no_engine() -> None:
    """A fault in the counting must not stop the engine that is counted."""
    with pair() as p:
        machine_of(p.a).observe(lambda _: 1 // 0)
        busy(p)
        assert "ZeroDivisionError" in str(p.a.callback_errors[-1])
