"""Exporters of statistics: to Prometheus (extra `metrics`) and OpenTelemetry (extra `otel`).

One table of metrics for both. Counters and gauges are read from `stats()` when they are collected;
the histograms are filled as transfers settle, outside the engine's step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final, Literal, NamedTuple

from tep.base.distribution import need
from tep.base.errors import UsageError
from tep.core.handles import Handle, Transfer
from tep.core.stats import EngineStats
from tep.engine import TransferEngine

__all__ = ["METRICS", "Metric", "OpenTelemetry", "Prometheus"]

_Values = Iterator[tuple[tuple[str, ...], float]]


class Metric(NamedTuple):
    """One metric, with name and unit in OpenTelemetry's form.

    Attributes:
        labels: attributes beside the engine's name.
        read: gives (values of the labels, number) from statistics; a histogram has none.
        bounds: the upper bounds of a histogram's buckets.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    text: str
    labels: tuple[str, ...] = ()
    read: Callable[[EngineStats], _Values] | None = None
    bounds: tuple[float, ...] = ()

    @property
    def prometheus_name(self) -> str:
        """The name in Prometheus' form: with the unit in full; a counter ends in _total."""
        unit = {"By": "_bytes", "s": "_seconds"}.get(self.unit, "")
        total = "_total" if self.kind == "counter" else ""
        return self.name.replace(".", "_") + unit + total


def _ended(stats: EngineStats) -> _Values:
    yield ("done",), stats.transfers_done
    yield ("failed",), stats.transfers_failed
    yield ("cancelled",), stats.transfers_cancelled


def _moved(what: Literal["rows", "nbytes"]) -> Callable[[EngineStats], _Values]:
    def read(stats: EngineStats) -> _Values:
        for direction, nics in (("write", stats.nics), ("read", stats.reads)):
            for k, nic in enumerate(nics):
                yield (f"{k}", direction), getattr(nic, what)

    return read


def _field(name: str) -> Callable[[EngineStats], _Values]:
    """Read a field: a number, a number for each NIC, or (label, number) pairs."""

    def read(stats: EngineStats) -> _Values:
        found = getattr(stats, name)
        if not isinstance(found, tuple):
            yield (), found
            return
        for k, one in enumerate(found):
            label, value = one if isinstance(one, tuple) else (f"{k}", float(one))
            yield (label,), value

    return read


_SECONDS: Final = tuple(m * 10.0**e for e in range(-6, 2) for m in (1, 2.5, 5))
_BYTES: Final = tuple(float(4**k) for k in range(5, 20))

_DURATION: Final = Metric(
    "tep.transfer.duration", "histogram", "s", "From submit to the return of the last row.",
    ("kind", "state"), None, _SECONDS,
)  # fmt: skip
_LENGTH: Final = Metric(
    "tep.transfer.length", "histogram", "By", "Bytes of a transfer.",
    ("kind", "state"), None, _BYTES,
)  # fmt: skip

METRICS: Final = (
    Metric("tep.transfers", "counter", "{transfer}", "Transfers and messages that ended.",
           ("state",), _ended),
    _DURATION,
    _LENGTH,
    Metric("tep.nic.io", "counter", "By", "Bytes of rows that a NIC has taken.",
           ("nic", "direction"), _moved("nbytes")),
    Metric("tep.nic.rows", "counter", "{row}", "Rows that a NIC has taken.",
           ("nic", "direction"), _moved("rows")),
    Metric("tep.nic.in_flight", "gauge", "{row}", "Rows that a NIC has now.",
           ("nic",), _field("rows_outstanding")),
    Metric("tep.nic.up", "gauge", "1", "1: the NIC is up; 0: it is down.",
           ("nic",), _field("nics_up")),
    Metric("tep.rows.queued", "gauge", "{row}", "Rows that wait for a NIC.",
           (), _field("rows_backlog")),
    Metric("tep.reads.retried", "counter", "{row}", "Rows of reads that were posted again.",
           (), _field("reads_again")),
    Metric("tep.immediates", "counter", "{immediate}", "Immediates that were counted.",
           (), _field("imms_counted")),
    Metric("tep.expectations", "gauge", "{expectation}", "Expectations that are not reached.",
           (), _field("expectations")),
    Metric("tep.peers", "gauge", "{peer}", "Peers that are known.", (), _field("peers")),
    Metric("tep.regions", "gauge", "{region}", "Registered regions.", (), _field("regions")),
    Metric("tep.imms.burnt", "gauge", "{immediate}",
           "Immediates under which something failed.", (), _field("imms_burnt")),
    Metric("tep.quarantine", "gauge", "By",
           "Bytes here that a NIC may touch although nothing is open.",
           (), _field("bytes_quarantined")),
    Metric("tep.faults", "counter", "{fault}", "Faults, and what mended them, by kind.",
           ("kind",), _field("faults")),
    Metric("tep.control.dropped", "counter", "{message}",
           "Control messages of peers that were dropped.",
           ("reason",), _field("control_dropped")),
    Metric("tep.callback.errors", "counter", "{error}", "Callbacks that raised.",
           (), _field("callback_errors")),
)  # fmt: skip
"""Every metric. The engine's name is a label of each."""


class _Exporter:
    def __init__(self) -> None:
        self._engines: dict[str, weakref.ref[TransferEngine]] = {}
        self._observers: dict[str, Callable[[list[Handle]], None]] = {}

    def add(self, engine: TransferEngine) -> None:
        """Export an engine from now on; this does not keep it alive.

        Raises:
            UsageError: another engine of this name is exported; names tell them apart.
        """
        name = engine.name
        if self._engine(name) is not None:
            raise UsageError(f"add: an engine {name!r} is exported already; remove it first")

        def observe(handles: list[Handle]) -> None:
            for handle in handles:
                if type(handle) is Transfer:
                    stats = handle.stats()
                    labels = name, stats.kind, stats.state
                    self._record(labels, stats.elapsed_s, stats.nbytes)

        self._engines[name] = weakref.ref(engine)
        self._observers[name] = observe
        engine._machine.observe(observe)

    def remove(self, engine: TransferEngine) -> None:
        """Stop exporting an engine; its histograms stay. It may be one that is not exported."""
        if self._engine(engine.name) is engine:
            del self._engines[engine.name]
            engine._machine.unobserve(self._observers.pop(engine.name))

    def close(self) -> None:
        """Stop exporting all engines."""
        for name in tuple(self._engines):
            engine = self._engine(name)
            if engine is not None:
                self.remove(engine)

    def _engine(self, name: str) -> TransferEngine | None:
        found = self._engines.get(name)
        return None if found is None else found()

    def _stats(self) -> list[tuple[str, EngineStats]]:
        found = [(name, self._engine(name)) for name in tuple(self._engines)]
        return [(name, engine.stats()) for name, engine in found if engine is not None]

    def _record(self, labels: tuple[str, str, str], seconds: float, nbytes: int) -> None:
        """Record a settled transfer; called on the thread that steps its engine."""
        raise NotImplementedError


class Prometheus(_Exporter):
    """Exports engines to a Prometheus registry: `exporter = Prometheus(); exporter.add(engine)`.

    Args:
        registry: prometheus_client's; None: its default one.

    Raises:
        BackendUnavailable: prometheus_client is not installed.
    """

    def __init__(self, registry: Any = None) -> None:
        super().__init__()
        client = need("prometheus_client", "metrics", "the Prometheus exporter")
        self._core = need("prometheus_client.core", "metrics", "the Prometheus exporter")
        self._registry = client.REGISTRY if registry is None else registry
        self._histograms = {
            one: client.Histogram(
                one.prometheus_name, one.text, ("engine", *one.labels),
                registry=self._registry, buckets=one.bounds,
            )
            for one in (_DURATION, _LENGTH)
        }  # fmt: skip
        self._registry.register(self)

    def close(self) -> None:
        """Stop exporting all engines, and leave the registry."""
        super().close()
        if self._registry is not None:
            for one in (self, *self._histograms.values()):
                self._registry.unregister(one)
            self._registry = None

    def _record(self, labels: tuple[str, str, str], seconds: float, nbytes: int) -> None:
        for metric, value in ((_DURATION, seconds), (_LENGTH, nbytes)):
            self._histograms[metric].labels(*labels).observe(value)

    def collect(self) -> Iterator[Any]:
        """Yield every counter and gauge of every engine; the registry has the histograms itself."""
        families = self._core
        stats = self._stats()
        for metric in METRICS:
            if metric.read is None:
                continue
            counts = metric.kind == "counter"
            made = families.CounterMetricFamily if counts else families.GaugeMetricFamily
            family = made(metric.prometheus_name, metric.text, labels=("engine", *metric.labels))
            for engine, one in stats:
                for values, number in metric.read(one):
                    family.add_metric((engine, *values), number)
            yield family


class OpenTelemetry(_Exporter):
    """Exports engines by OpenTelemetry: `exporter = OpenTelemetry(); exporter.add(engine)`.

    Instruments cannot be taken back: make one exporter for each meter provider.

    Args:
        provider: a meter provider; None: the one that OpenTelemetry was set up with.

    Raises:
        BackendUnavailable: opentelemetry-api is not installed.
    """

    def __init__(self, provider: Any = None) -> None:
        super().__init__()
        api = need("opentelemetry.metrics", "otel", "the OpenTelemetry exporter")
        meter = api.get_meter("tep", meter_provider=provider)
        self._made: dict[Metric, Any] = {}
        for metric in METRICS:
            if metric.kind == "histogram":
                self._made[metric] = meter.create_histogram(
                    metric.name, metric.unit, metric.text,
                    explicit_bucket_boundaries_advisory=metric.bounds,
                )  # fmt: skip
                continue
            made = (
                meter.create_observable_counter
                if metric.kind == "counter"
                else meter.create_observable_gauge
            )
            read = self._reader(metric, api.Observation)
            self._made[metric] = made(metric.name, [read], metric.unit, metric.text)

    def _reader(self, metric: Metric, observation: Any) -> Callable[[object], list[Any]]:
        assert metric.read is not None
        function = metric.read

        def read(_: object) -> list[Any]:
            return [
                observation(number, self._attributes(metric, (engine, *values)))
                for engine, stats in self._stats()
                for values, number in function(stats)
            ]

        return read

    @staticmethod
    def _attributes(metric: Metric, values: tuple[str, ...]) -> dict[str, str]:
        names = ("tep.engine", *(f"tep.{label}" for label in metric.labels))
        return dict(zip(names, values, strict=True))

    def _record(self, labels: tuple[str, str, str], seconds: float, nbytes: int) -> None:
        for metric, value in ((_DURATION, seconds), (_LENGTH, nbytes)):
            self._made[metric].record(value, self._attributes(metric, labels))
