"""`tep stall`: the waits of the engines of running processes, which `tep.host.sight` tells."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from tep.base.errors import UsageError
from tep.cli.show import Json, emit_json
from tep.host.sight import SWITCH, ask, find

__all__ = ["stall"]


def _state(pid: int) -> str:
    """Return the kernel's state of a process that does not answer, in words."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8")
    except OSError:
        return "it has ended, or /proc does not show it"
    letter = text.rpartition(")")[2].split()[0]
    states = {
        "T": "it is stopped: `kill -CONT` lets it go on",
        "t": "a debugger holds it",
        "D": "it is in a system call that cannot be interrupted",
        "Z": "it has ended, and its parent has not asked how",
    }
    return states.get(letter, "it is busy, or a C function in it holds the Python interpreter")


def _not_seen(pid: int | None) -> UsageError:
    if pid is None:
        return UsageError(f"no process of user {os.geteuid()} shows an engine")
    if not Path(f"/proc/{pid}").exists():
        return UsageError(f"there is no process {pid}")
    return UsageError(
        f"process {pid} shows no engine: it has none that is open (inline and simulated ones are "
        f"not shown), it is another user's, or it runs with {SWITCH}=off or another {SWITCH} folder"
    )


def stall(
    pid: Annotated[
        int | None, typer.Argument(help="Of the process; none: all of yours.", min=1)
    ] = None,
    json: Json = False,
    timeout_s: Annotated[
        float, typer.Option("--timeout", help="Seconds to wait for an answer.", min=0.1)
    ] = 5.0,
) -> None:
    """Print what each engine of a process waits for, and where each of its threads is.

    The report is the same as for a wait that has timed out; the process is not disturbed.
    """
    answers, silent = [], []
    for found in find(pid):
        try:
            answer = ask(found, timeout_s)
        except TimeoutError:
            late = f"did not answer within {timeout_s:g} s: {_state(found.pid)}"
            silent.append(f"process {found.pid} {late}")
        except OSError as error:
            silent.append(f"process {found.pid}: {error}")
        else:
            answers += [answer] if answer is not None else []
    if not answers and not silent:
        raise _not_seen(pid)
    if json:
        emit_json({"processes": answers})
    else:
        for answer in answers:
            typer.echo(f"process {answer['pid']}: {answer['command']}")
            for engine in answer["engines"]:
                typer.echo(engine["report"])
            for thread in answer["threads"]:
                typer.echo(f"thread {thread['name']}")
                typer.echo("\n".join(f"  {frame}" for frame in thread["stack"]))
    if silent:
        raise UsageError("\n".join(silent))
