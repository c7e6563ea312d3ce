"""Play drawn runs of the engine: `python -m tests.world SEED`, the line that a finding prints.

    python -m tests.world 7                          what was drawn, and what happened when
    python -m tests.world 1000 --runs 500            many seeds, until one breaks a promise
    python -m tests.world 7 --shrink                 the simplest run that shows the finding

scripts/search_seeds.py plays millions of seeds, and remembers them.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence

from tep.backends.base import Status
from tep.cli.show import print_table
from tep.sim.row_log import Record, RowLog
from tep.testing import Violation, shrink, story
from tests.world.oracle import replay
from tests.world.scenario import Scenario

_PS_PER_US = 1_000_000


def main(argv: Sequence[str] | None = None) -> int:
    """Play the seeds, show the last run; status 1 at the first violation."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.world",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("seed", type=int, help="the run: all in it is drawn from this number")
    parser.add_argument("--runs", type=int, default=1, help="play this many seeds, from SEED on")
    parser.add_argument("--lines", type=int, default=40, help="events of the run that are shown")
    parser.add_argument("--shrink", action="store_true", help="reduce a finding; tell its story")
    given = parser.parse_args(argv)
    found = None
    for seed in range(given.seed, given.seed + given.runs):
        row_log = RowLog()
        try:
            replay(seed, row_log=row_log)
        except Violation as violation:
            found = violation
            break
    print_scenario(Scenario.draw(seed), f"seed {seed}")
    if given.lines:
        print_timeline(row_log, given.lines)
    said = f"{given.runs} clean; digest of the last: {row_log.digest()}"
    if found is not None:
        said = f"VIOLATION: {found}"
        if given.shrink:
            simplest = shrink(found)
            said += f"\nshrunk to\n{story(simplest)}"
    sys.stdout.write(f"{said}\n")
    return int(found is not None)


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
        sys.stdout.write(f"{lines} of {len(records)} events; --lines {len(records)} shows all\n")


def _rows(records: Sequence[Record]) -> list[dict[str, str]]:
    return [
        {
            "us": f"{one.t_ps / _PS_PER_US:.3f}",
            "where": f"{one.node}/{one.nic}" if one.nic >= 0 else one.node,
            "what": _sentence(one),
        }
        for one in records
    ]


def _sentence(one: Record) -> str:
    """Describe the event for people."""
    row, size, peer = f"row {one.row}", f"{one.nbytes} B", one.peer
    match one.what:
        case "post":
            return f"posts {row} to {peer}, {size} from byte {one.offset}"
        case "place":
            return f"{size} of {row} from {peer} land at byte {one.offset}"
        case "imm":
            return f"immediate {one.value} of {row} from {peer} is handed out"
        case "done":
            return f"{row} to {peer} is acknowledged"
        case "fail":
            return f"{row} to {peer} fails: {Status(one.value).name}"
        case "send":
            return f"sends message {one.row} to {peer}, {size}"
        case "recv":
            return f"message {one.row} from {peer} is here, {size}"
        case "sent":
            return f"message {one.row} to {peer} has ended: {Status(one.value).name}"
        case "fault":
            return f"fault: {peer}"


if __name__ == "__main__":
    sys.exit(main())
