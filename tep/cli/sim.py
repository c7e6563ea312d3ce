"""`tep sim`: run one seed of the swarm, or several, and show what happened; a failing seed is
replayed here.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from tep.cli.show import Json, emit_json, progress

__all__ = ["sim"]


def sim(
    seed: Annotated[
        int, typer.Option("--seed", help="The run: everything in it is drawn from this number.")
    ] = 0,
    runs: Annotated[
        int, typer.Option("--runs", min=1, help="Run this many seeds, from --seed on.")
    ] = 1,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Write a Perfetto trace of the (last) run here.")
    ] = None,
    json: Json = False,
) -> None:
    """Run a drawn scenario on the chaos fabric against the oracle; exit 1 on the first
    violation.
    """
    from tep.sim import Trace  # numpy is loaded when something runs
    from tep.testing.oracle import Violation, run_scenario
    from tep.testing.scenario import Scenario

    violation: str | None = None
    scenario, record = Scenario.draw(seed), Trace()
    with progress("seeds", runs, quiet=json or runs == 1 or not sys.stderr.isatty()) as bar:
        for one in range(seed, seed + runs):
            last = one == seed + runs - 1
            scenario, record = Scenario.draw(one), Trace()
            try:
                run_scenario(scenario, trace=record if last or trace is not None else None)
            except Violation as error:
                violation = str(error)
                break
            bar.advance(bar.task_ids[0])
    if trace is not None:
        record.write_perfetto(trace)
    digest = record.digest() if violation is None else None
    if json:
        emit_json(
            {
                "seed": seed,
                "runs": runs,
                "violation": violation,
                "scenario": repr(scenario),
                "digest": digest,
            }
        )
    else:
        typer.echo(repr(scenario))
        typer.echo(
            f"VIOLATION: {violation}"
            if violation
            else f"{runs} clean; digest of the last: {digest}"
        )
    if violation:
        raise typer.Exit(1)
