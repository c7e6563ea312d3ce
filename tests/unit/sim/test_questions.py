"""The questions of `tep.sim`: what they answer must be what the machine's numbers say."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

import tep
from tep.base.errors import UsageError
from tep.base.units import KiB, MiB
from tep.sim import questions


@pytest.mark.slow
def test_a_transfer_takes_what_its_links_take() -> None:
    """Twice the NICs take half the time, and no rate is above the links'."""
    table = tep.sim.transfer_time(
        64 * MiB, ["efa_4x100", "cx7_400"], nics=[1, 2], page_bytes=[64 * KiB, 256 * KiB]
    )
    one, *_, two = [r for r in table.rows if "efa_4x100" == r["machine"]]
    assert all(r["time, ms low"] <= r["time, ms"] <= r["time, ms high"] for r in table.rows)
    kinds = {(r["machine"], r["kind"]) for r in table.rows}
    assert {("efa_4x100", "predicted"), ("cx7_400", "fitted")} == kinds

    assert 8 == len(table.rows)
    assert 1.9 < one["time, ms"] / two["time, ms"] < 2.1
    for row in table.rows:
        limit = {"efa_4x100": 100, "cx7_400": 400}[row["machine"]] * row["nics"]
        assert 0.9 * limit < row["rate, Gb/s"] <= limit
        assert row["rate, Gb/s"] == pytest.approx(row["nbytes"] * 8 / row["time, ms"] / 1e6)


def test_a_question_has_columns_for_what_was_asked() -> None:
    """A column "nics" of None says less than none."""
    (plain,) = tep.sim.transfer_time(MiB, "efa_2x200").rows
    (asked,) = tep.sim.transfer_time(MiB, "efa_2x200", nics=1).rows

    assert "nics" not in plain
    assert 1 == asked["nics"]


def test_layers_follow_each_other() -> None:
    """80 transfers of a layer each wait for each other's last page, and move the same bytes."""
    # EFA: the immediates of each layer's end cost the worker time (cpu.poll; without it: 1.6).
    for profile, most in (("cx7_400", 2), ("efa_2x200", 2.1)):
        (whole,) = tep.sim.transfer_time(8 * MiB, profile).rows
        (parts,) = tep.sim.transfer_time(8 * MiB, profile, parts=8).rows

        assert whole["time, ms"] < parts["time, ms"] < most * whole["time, ms"]


@pytest.mark.slow
def test_a_fault_costs_what_the_other_nics_have_to_carry() -> None:
    """The answer stands beside the least that is possible: without it nobody knows whether 1.4 is
    much.
    """
    (row,) = tep.sim.fault_cost(256 * MiB, "efa_4x100", slow=2).rows
    (single,) = tep.sim.fault_cost(64 * MiB, "cx7_400", slow=3).rows

    assert pytest.approx(4 / 3.5) == row["slow NIC, least"]
    assert pytest.approx(0.5 + 0.5 * 4 / 3) == row["dead NIC, least"]
    for what in ("slow NIC", "dead NIC"):
        least = row[f"{what}, least"]
        assert 0.99 * least < row[f"{what}, times"] < 1.3 * least
    assert 3 == pytest.approx(single["slow NIC, times"], rel=0.05)
    assert float("inf") == single["dead NIC, times"] == single["dead NIC, least"]


def to_all_at_once(nbytes: int):
    async def program(cluster: tep.sim.Cluster) -> None:
        root, *others = cluster.engines
        mr, _ = root.reg_mr(np.zeros(nbytes, np.uint8))
        sent = []
        for other in others:
            _, desc = other.reg_mr(np.zeros(nbytes, np.uint8))
            sent.append(root.submit_single_write(nbytes, (mr, 0), (desc, 0)))
        await asyncio.gather(*sent)

    return program


def test_programs_are_compared_on_machines() -> None:
    """Three times the bytes take three times as long, on each machine."""
    programs = {"8 MiB": to_all_at_once(8 * MiB), "24 MiB": to_all_at_once(24 * MiB)}
    table = tep.sim.compare(programs, ["efa_4x100", "cx7_400"], nodes=4)
    ms = {(r["machine"], r["program"]): r["time, ms"] for r in table.rows}

    assert 4 == len(ms)
    for machine in ("efa_4x100", "cx7_400"):
        assert 2.8 < ms[machine, "24 MiB"] / ms[machine, "8 MiB"] < 3.1


def test_an_interrupt_leaves_what_there_is(monkeypatch) -> None:
    """A notebook's stop button threw the finished points away."""
    asked = []

    def interrupted(*args, **kwargs):
        asked.append(args)
        if len(asked) == 5:
            raise KeyboardInterrupt
        return 1000.0, 4096

    monkeypatch.setattr(questions, "_transfer", interrupted)
    table = tep.sim.transfer_time([1, 2, 3], "cx7_400")

    assert (1, 5) == (len(table.rows), table.missing)
    asked[:] = [()] * 4
    with pytest.raises(KeyboardInterrupt):
        tep.sim.transfer_time([1, 2, 3], "cx7_400")


@pytest.mark.parametrize(
    ("ask", "why"),
    [
        (lambda: tep.sim.transfer_time(0, "cx7_400"), "nbytes"),
        (lambda: tep.sim.transfer_time(1, "cx7_400", nics=0), "nics"),
        (lambda: tep.sim.transfer_time(1, "cx7_400", parts=0), "parts"),
        (lambda: tep.sim.transfer_time(1, "cx8"), "cx8"),
        (lambda: tep.sim.compare({}, "cx7_400"), "no point"),
        (lambda: tep.sim.fault_cost([[1]], "cx7_400"), "not an integer"),
        (lambda: tep.sim.fault_cost(None, "cx7_400"), "nbytes=None is not an integer"),
        (lambda: tep.sim.fault_cost(1, None), "names are: .*cx7_400"),
    ],
)
def test_questions_without_an_answer_are_refused(ask, why: str) -> None:
    """A question that is answered for something else is worse than none."""
    with pytest.raises(UsageError, match=why):
        ask()
