"""Traces of real and simulated runs: all that begins ends, no overlap, the bytes of stats()."""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from itertools import pairwise
from numbers import Real

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tep
from tep.base.units import KiB
from tep.observe.trace import Mark, Span, Trace, lanes_of
from tep.sim import Chaos, Cluster
from tests.support.effort import effort
from tests.support.here import need_stub, require


def check_format(trace: Trace) -> list[dict]:
    """The fields that the trace event format asks of each kind of event; all events."""
    events = json.loads(json.dumps(trace.events()))
    pids = {event["pid"] for event in events}
    opened: dict[tuple, float] = {}
    lanes = defaultdict(list)
    for event in events:
        assert isinstance(event["name"], str)
        assert event["ph"] in set("MXbei")
        assert isinstance(event["pid"], int)
        if event["ph"] == "M":
            assert event["name"] in {"process_name", "thread_name"}
            assert isinstance(event["args"]["name"], str)
            continue
        assert isinstance(event["ts"], Real)
        assert event["ts"] >= 0
        assert event["tid"] not in {0, *pids}, "Perfetto takes it for a process's main thread"
        assert isinstance(event["cat"], str)
        key = event["pid"], event["cat"], event.get("id2", {}).get("local")
        if event["ph"] == "X":
            assert event["dur"] >= 0
            times_ns = [1e3 * us for us in (event["ts"], event["dur"])]
            start_ns, length_ns = map(round, times_ns)
            assert [start_ns, length_ns] == pytest.approx(times_ns, abs=1e-3), "Perfetto's step"
            lanes[event["pid"], event["tid"]].append((start_ns, start_ns + length_ns))
        elif event["ph"] == "b":
            assert key not in opened
            opened[key] = event["ts"]
        elif event["ph"] == "e":
            assert opened.pop(key) <= event["ts"]
        else:
            assert event["s"] in set("gpt")
    assert {} == opened, "begun and not ended"
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name" and e["ph"] == "M"}
    assert {(e["pid"], e["tid"]) for e in events if e["ph"] != "M"} <= named
    for bars in lanes.values():
        bars.sort()
        for (_, stop), (start, _) in pairwise(bars):
            assert stop <= start, "two bars of a lane overlap: Perfetto drops one"
    return events


def check_engine(trace: Trace, engine: tep.TransferEngine) -> None:
    """Check that the trace of an engine agrees with its statistics."""
    stats, batches = engine.stats(), trace.of("batch", engine.name)
    moved = [[0, 0] for _ in stats.nics]
    for span in batches:
        assert span.start_s <= span.stop_s
        moved[span.args["nic"]][0] += span.args["rows"]
        moved[span.args["nic"]][1] += span.args["bytes"]
    both = zip(stats.nics, stats.reads, strict=True)
    assert [[w.rows + r.rows, w.nbytes + r.nbytes] for w, r in both] == moved
    imms = [m.args["count"] for m in trace.marks if m.kind == "imm" and m.engine == engine.name]
    assert stats.imms_counted == sum(imms)
    transfers = trace.of("transfer", engine.name)
    assert stats.transfers_submitted <= len(transfers)  # which has those that no step has taken
    assert stats.transfers_done == sum(span.args["state"] == "done" for span in transfers)


def memory(engine: tep.TransferEngine, nbytes: int, **rights: tep.Access) -> tuple:
    return engine.reg_mr(np.zeros(nbytes, np.uint8), **rights)


@given(
    seed=st.integers(0, 2**16),
    writes=st.lists(st.tuples(st.integers(1, 40), st.sampled_from([64, 4 * KiB])), max_size=6),
    kill=st.booleans(),
    nics=st.lists(st.integers(1, 3), min_size=2, max_size=2),
)
@settings(max_examples=effort(25, 6))
def test_a_trace_of_any_run_agrees_with_the_statistics(
    seed: int, writes: list[tuple[int, int]], kill: bool, nics: list[int]
) -> None:
    """A picture with missing rows, or bars that never end, would explain another run."""
    with Cluster(nics=nics, seed=seed) as cluster:
        a, b = cluster.engines
        (src, _), (_, dst) = memory(a, 160 * KiB), memory(b, 160 * KiB)
        with cluster.trace() as trace:
            for npages, page_bytes in writes:
                pages = tep.Pages(range(npages))
                a.submit_paged_writes(page_bytes, (src, pages), (dst, pages), imm=7)
            b.expect_imm_count(7, sum(npages for npages, _ in writes))
            if kill and nics[0] > 1:
                cluster.at(cluster.now_us + 0.5, lambda: cluster.kill_nic(0, 0))
            cluster.env.run_until(lambda: False, cluster.env.now + 10**9)
        check_engine(trace, a)
        check_engine(trace, b)
        again = a.trace().stop()

    assert len(writes) == len(trace.of("transfer", "a"))
    check_format(trace)
    assert repr(trace).startswith(f"Trace({len(trace.engines)} engines")
    batches = trace.of("batch")
    assert sum(span.args["bytes"] for span in batches) == sum(r["bytes"] for r in trace.table())
    left = {span.args["state"] for span in again.of("transfer")}
    assert left <= {"pending"}, "what ended before a trace began is not in it"


def test_the_same_seed_gives_the_same_trace() -> None:
    """A simulated trace with a host's times in it could not be compared."""

    def run() -> list[dict]:
        with Cluster(nics=2, seed=5) as cluster, cluster.trace() as trace:
            a, b = cluster.engines
            (src, _), (_, dst) = memory(a, 64 * KiB), memory(b, 64 * KiB)
            a.submit_single_write(64 * KiB, (src, 0), (dst, 0), imm=1).wait()
        return trace.events()

    assert run() == run()


def _real(backend: str, name: str) -> tep.TransferEngine:
    if backend == "verbs":
        stub = {"ana": "stub0", "bob": "stub1"}[name]
        return tep.TransferEngine.open("verbs", nics=[stub], name=name, library=need_stub().path)
    return tep.TransferEngine.open(backend, name=name, nics=1 if backend == "libfabric" else 2)


@pytest.mark.parametrize("backend", ["local", "libfabric", "loopback", "verbs"])
def test_real_engines_and_simulated_ones_trace_alike(backend: str, tmp_path) -> None:
    """A tool made for one file would not read the other."""
    if backend == "libfabric":
        require("tcp")
    with _real(backend, "ana") as ana, _real(backend, "bob") as bob:
        (src, _), (_, dst) = memory(ana, 64 * KiB), memory(bob, 64 * KiB)
        with ana.trace() as here, bob.trace() as there:
            got = bob.expect_imm_count(3, 16)
            pages = tep.Pages(range(16))
            ana.submit_paged_writes(4 * KiB, (src, pages), (dst, pages), imm=3).wait(60)
            got.wait(60)
        check_engine(here, ana)
        check_engine(there, bob)
    with Cluster(nics=2, seed=1) as cluster, cluster.trace() as simulated:
        a, b = cluster.engines
        (src, _), (_, dst) = memory(a, 64 * KiB), memory(b, 64 * KiB)
        got = b.expect_imm_count(3, 16)
        a.submit_paged_writes(4 * KiB, (src, pages), (dst, pages), imm=3).wait()
        got.wait()

    def shape(events: list[dict]) -> set[tuple]:
        found = {(e["ph"], e["cat"], *sorted(e.get("args", ()))) for e in events if e["ph"] != "M"}
        return {tuple(part for part in each if part != "cpu_us") for each in found}

    real = check_format(here) + check_format(there)
    assert shape(check_format(simulated)) == shape(real)
    path = tmp_path / "run.json"
    here.write(path)
    document = json.loads(path.read_text())
    assert {"clock": "host", "missed": 0} == {
        key: document["otherData"][key] for key in ("clock", "missed")
    }
    assert all(span.args["cpu_us"] >= 0 for span in here.of("step"))


def test_reads_messages_faults_and_restarts_are_in_it(caplog: pytest.LogCaptureFixture) -> None:
    """A failover that leaves no mark could not be found in the picture."""
    calm = Chaos(seed=3)
    with caplog.at_level(logging.CRITICAL, "tep"), Cluster(nics=2, chaos=calm) as cluster:
        a, b = cluster.engines
        with cluster.trace() as trace:
            (sink, _), (_, src) = memory(a, 64 * KiB), memory(b, 64 * KiB, access=tep.Access(7))
            a.submit_single_read(64 * KiB, (src, 0), (sink, 0)).wait()
            b.submit_recvs(64, 4, lambda _: None)
            a.submit_send(b.main_address, b"hello").wait()
            check_engine(trace, a)
            cluster.kill_nic(0, 1)
            a.submit_barrier([src], 9).wait()
            reborn = cluster.restart(1)
            reborn.submit_send(a.main_address, b"again").cancel()
            with pytest.raises(tep.UsageError, match="traced already"):
                a.trace()
    kinds = {mark.args["kind"] for mark in trace.marks if mark.kind == "fault"}

    assert "nic_down" in kinds
    assert {"single read", "message", "barrier"} <= {s.name for s in trace.of("transfer")}
    check_format(trace)


def test_a_full_trace_counts_what_it_leaves_out() -> None:
    """A picture that stops in the middle would be taken for an engine that did."""
    with Cluster(nics=1, seed=1) as cluster, cluster.trace(events_max=5) as trace:
        a, b = cluster.engines
        (src, _), (_, dst) = memory(a, KiB), memory(b, KiB)
        for _ in range(10):
            a.submit_single_write(KiB, (src, 0), (dst, 0)).wait()

    assert 5 == len(trace.spans) + len(trace.marks)
    assert trace.missed > 10
    assert repr(trace).endswith(f"; {trace.missed} more were not kept)")
    with pytest.raises(tep.BadRequest, match="events_max"):
        cluster.trace(events_max=0)


@given(st.lists(st.tuples(st.floats(0, 9), st.floats(0.001, 3)), max_size=60))
def test_lanes_never_overlap_and_none_is_wasted(times: list[tuple[float, float]]) -> None:
    """Bars on top of each other hide one another; a lane for each bar is no picture."""
    spans = sorted(
        (Span("batch", "a", "NIC 0", "x", t, t + n, {"to": "b"}) for t, n in times),
        key=lambda span: (span.start_s, span.stop_s),
    )
    lanes = lanes_of(spans)
    for lane in set(lanes):
        mine = [span for span, at in zip(spans, lanes, strict=True) if at == lane]
        assert all(one.stop_s <= two.start_s for one, two in pairwise(mine))
    deepest = max((sum(o.start_s <= s.start_s < o.stop_s for o in spans) for s in spans), default=0)
    assert len(set(lanes)) <= max(deepest, 1)


def test_the_picture_has_a_row_for_each_lane(tmp_path) -> None:
    """A timeline whose labels belong to other bars would blame the wrong NIC."""
    pytest.importorskip("matplotlib").use("agg")
    trace = Trace("simulated")
    for k, (start, stop) in enumerate([(0, 4), (1, 2), (5, 6)]):
        trace.add(Span("batch", "a", f"NIC {k // 2}", "w", start, stop, {"nic": 0, "to": "b"}))
    trace.mark(Mark("fault", "a", "faults", "NIC 0 is down", 3, {}))
    axes = trace.plot()
    axes.figure.savefig(tmp_path / "a.png")

    assert ["a NIC 0", "", "a NIC 1"] == [label.get_text() for label in axes.get_yticklabels()]
