"""A trace by hand: what is kept, drawn and summed up, with every number known."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest

import tep
from tep.base.api import Pages
from tep.base.units import KiB, MiB
from tep.observe.trace import Mark, Span, Trace
from tests.support.inside import machine_of, nics_of
from tests.support.pairs import pair


def batch(track: str, start_us: float, stop_us: float, nbytes: int) -> Span:
    args = {"nic": 0, "rows": 2, "bytes": nbytes, "to": "b"}
    return Span("batch", "a", track, "paged", start_us * 1e-6, stop_us * 1e-6, args)


def imm(at_us: float) -> Mark:
    return Mark("imm", "a", "NIC 0 arrivals", "imm 0x1", at_us * 1e-6, {"imm": 1, "count": 1})


def test_spans_and_marks_share_the_room() -> None:
    """A trace of a long job would grow beyond what it was given."""
    trace = Trace("host", events_max=3)
    for k in range(2):
        trace.mark(imm(k))
    for k in range(3):
        trace.add(batch("NIC 0", k, k + 1, KiB))

    assert (1, 2, 2) == (len(trace.spans), len(trace.marks), trace.missed)


def test_a_table_counts_each_nic_for_itself() -> None:
    """The busiest NIC is what one looks for in it: nested batches count once."""
    trace = Trace("host")
    for span in (batch("NIC 0", 0, 10, 3 * MiB), batch("NIC 0", 2, 4, 0), batch("NIC 1", 0, 5, 40)):
        trace.add(span)
    trace.add(batch("NIC 1", 8, 9, 0))
    first, second = ([*row.values()] for row in trace.table())

    assert ["a", "NIC 0", 2, 4, 3 * MiB, pytest.approx(10), 0] == first
    assert ["a", "NIC 1", 2, 4, 40, pytest.approx(6), pytest.approx(3)] == second
    head, *rows = str(trace).splitlines()
    assert "engine  NIC    batches  rows  bytes    busy, us  gap, us" == head
    assert rows[1].startswith("a       NIC 1  2        4     40       6 ")


def test_a_trace_without_events_begins_at_0_and_an_immediate_is_no_fault() -> None:
    """It is printed all the same, and a fault in it sends people looking."""
    trace = Trace("host")
    assert 0.0 == trace.start_s
    trace.mark(imm(1))
    assert "1 marks, 0 of them faults" in repr(trace)
    assert "" == str(trace)
    trace.mark(Mark("fault", "a", "faults", "a NIC is down", 3e-6, {}))

    assert "2 marks, 1 of them faults" in repr(trace)


def test_a_step_takes_no_more_cpu_than_time() -> None:
    """What its thread had computed before would look like the worker's share."""
    with tep.TransferEngine.open("loopback") as engine:
        mr, desc = engine.reg_mr(np.zeros(64, np.uint8))
        with engine.trace() as trace:
            for _ in range(200):
                engine.submit_single_write(64, (mr, 0), (desc, 0)).wait(20)
        steps = trace.of("step")

    assert steps
    for span in steps:
        assert 0 <= span.args["cpu_us"] <= 1e6 * (span.stop_s - span.start_s) + 1


def test_what_is_written_has_all_kinds_of_events() -> None:
    """Transfers would be missing in the picture, and nobody knows what a batch belongs to."""
    with pair() as p:
        with p.a.trace() as trace:
            p.settle(p.a.submit_single_write(64, (p.mr, 0), (p.desc, 0), 5))
            p.quiet()
        events = trace.events()
        (posted,) = trace.of("batch")

        assert ["single"] == [e["name"] for e in events if e["ph"] == "b"]
        assert 1 == sum(e["ph"] == "e" for e in events)
        assert p.b.name == posted.args["to"]
        assert 0 < len(trace.of("step")) < 50, "steps that found nothing are left out"


def test_rows_that_a_nic_still_has_at_the_end_are_said_to_be_in_flight() -> None:
    """The last span of a trace would look like rows that came back just then."""
    pages = Pages(range(16))
    with pair() as p:
        nothing = mock.patch.object(type(nics_of(p.a)[0]), "poll", return_value=0)
        with p.a.trace() as trace, nothing:
            sent = p.a.submit_paged_writes(4, (p.mr, pages), (p.desc, pages), 5)
            machine_of(p.a).step()
        p.settle(sent)
    (posted,) = trace.of("batch")

    assert (16, 16) == (posted.args["rows"], posted.args["in_flight"])


def test_what_has_settled_when_a_trace_ends_is_in_it() -> None:
    """The last transfer, whose callback had not run yet, was missing."""
    with pair() as p:
        with p.a.trace() as trace:
            p.a.submit_single_write(64, (p.mr, 0), (p.desc, 0))
            while not machine_of(p.a).worker._settled:
                machine_of(p.a).step()
        p.quiet()

    assert ["done"] == [span.args["state"] for span in trace.of("transfer")]


def test_a_flood_of_immediates_is_counted_by_value() -> None:
    """A poll of many entries goes by columns: a picture with other counts than the engine's."""
    pages = Pages(range(16))
    with pair() as p, p.b.trace() as trace:
        for imm in (3, 4, 3):
            p.a.submit_paged_writes(4, (p.mr, pages), (p.desc, pages), imm)
        p.settle(p.b.expect_imm_count(3, 32), p.b.expect_imm_count(4, 16))
    counts = {3: 0, 4: 0}
    for mark in trace.marks:
        counts[mark.args["imm"]] += mark.args["count"]

    assert {3: 32, 4: 16} == counts
