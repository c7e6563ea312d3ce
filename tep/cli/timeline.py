"""The printed form of a simulated run: its drawn settings, and its events in time."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from tep.cli.show import print_table

if TYPE_CHECKING:
    from tep.sim.row_log import Record, RowLog
    from tep.testing.scenario import Scenario

__all__ = ["print_scenario", "print_timeline"]

_PS_PER_US = 1_000_000


def print_scenario(scenario: Scenario, title: str) -> None:
    """Print a seed's scenario: engines, transfers, faults, and knobs that are not at default."""
    rows = [{"what": "NICs of each engine", "drawn": ", ".join(map(str, scenario.nics))}]
    for k, transfer in enumerate(scenario.transfers):
        rows.append({"what": f"transfer {k}", "drawn": _changed(transfer)})
    for k, read in enumerate(scenario.reads):
        rows.append({"what": f"read {k}", "drawn": _changed(read)})
    for at_ps, fault in scenario.faults:
        text = f"{type(fault).__name__} {_changed(fault)}, at {at_ps / _PS_PER_US:.3f} us"
        rows.append({"what": "fault", "drawn": text})
    rows.append({"what": "fabric", "drawn": _changed(scenario.chaos)})
    rows += [
        {"what": field.name, "drawn": str(getattr(scenario, field.name))}
        for field in dataclasses.fields(scenario)
        if field.name not in {"nics", "transfers", "reads", "faults", "chaos"}
    ]
    print_table(title, ("what", "drawn"), rows)


def _changed(value: object) -> str:
    """Return the fields of a dataclass that differ from their defaults; times in us."""
    parts = []
    assert dataclasses.is_dataclass(value)
    for field in dataclasses.fields(value):
        found = getattr(value, field.name)
        if found == field.default:
            continue
        name, unit = field.name, ""
        if name.endswith("_ps") and isinstance(found, int):
            name, found, unit = name.removesuffix("_ps"), f"{found / _PS_PER_US:g}", " us"
        parts.append(f"{name} {found}{unit}")
    return ", ".join(parts)


def print_timeline(row_log: RowLog, lines: int) -> None:
    """Print the first events of a run in the order of their times."""
    records = sorted(row_log.records(), key=lambda one: one.t_ps)
    print_table("What happened", ("us", "where", "what"), _rows(records[:lines]))
    if len(records) > lines:
        typer.echo(f"{lines} of {len(records)} events; --lines shows more, --row_log FILE has all")


def _rows(records: Sequence[Record]) -> list[dict[str, str]]:
    return [
        {
            "us": f"{one.t_ps / _PS_PER_US:.3f}",
            "where": f"{one.node}/{one.nic}" if one.nic >= 0 else one.node,
            "what": one.sentence(),
        }
        for one in records
    ]
