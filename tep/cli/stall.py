"""`tep top`: the running engines of this host, live; `tep stall`: the waits of a hanging process.

Both ask the processes; `tep.host.sight` answers there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.text import Text

from tep.base.errors import UsageError
from tep.base.waiting import system_s
from tep.cli.show import Json, emit_json, make_table, print_table
from tep.host.sight import SWITCH, Found, ask, find

__all__ = ["stall", "top"]

_WAITS_MAX: Final = 10
_NIC_COLUMNS: Final = (
    "pid", "engine", "NIC", "link", "state", "Gb/s", "of link", "rows/s", "in flight"
)  # fmt: skip
_ENGINE_COLUMNS: Final = (
    "pid", "engine", "backend", "peers", "open", "oldest", "done/s", "done", "failed",
    "queued rows", "imms/s", "imms",
)  # fmt: skip

_Sample = dict[tuple[int, str, int], dict[str, Any]]
"""The answer of each engine, by process, name and epoch."""

_States = dict[int, str]


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


def _not_seen(pid: int) -> UsageError:
    if not Path(f"/proc/{pid}").exists():
        return UsageError(f"there is no process {pid}")
    return UsageError(
        f"process {pid} shows no engine: it has none that is open (inline and simulated ones are "
        f"not shown), it is another user's, or it runs with {SWITCH}=off or another {SWITCH} folder"
    )


def stall(
    pid: Annotated[int, typer.Argument(help="Of the process.", min=1)],
    json: Json = False,
    timeout_s: Annotated[
        float, typer.Option("--timeout", help="Seconds to wait for the answer.", min=0.1)
    ] = 5.0,
) -> None:
    """Print what each engine of a process waits for, and where each of its threads is.

    The report is the same as for a wait that has timed out; the process is not disturbed.
    """
    answers = []
    for found in find(pid):
        try:
            answer = ask(found, "stall", timeout_s)
        except TimeoutError:
            raise UsageError(
                f"process {pid} did not answer within {timeout_s:g} s: {_state(pid)}"
            ) from None
        if answer is not None:
            answers.append(answer)
    if not answers:
        raise _not_seen(pid)
    if json:
        emit_json({"processes": answers})
        return
    for answer in answers:
        typer.echo(f"process {answer['pid']}: {answer['command']}")
        for engine in answer["engines"]:
            typer.echo(engine["report"])
        for thread in answer["threads"]:
            typer.echo(f"thread {thread['name']}")
            typer.echo("\n".join(f"  {frame}" for frame in thread["stack"]))


def top(
    pids: Annotated[
        list[int] | None, typer.Argument(help="Only these processes.", show_default=False)
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print it once, and end.")] = False,
    json: Json = False,
    every_s: Annotated[
        float, typer.Option("--every", help="Seconds between two looks.", min=0.1, max=3600)
    ] = 1.0,
) -> None:
    """Show the running engines of this host: NICs, rates, transfers, peers, the oldest wait.

    Rates are those of the time between two looks. Engines of your own processes are shown; inline
    and simulated ones are not. Ctrl-C ends it.
    """
    console = Console()
    if once or json or not console.is_terminal:
        before, _ = _look(pids)
        time.sleep(system_s(every_s))
        engines, silent = _look(pids)
        shown = _with_rates(before, engines)
        if json:
            emit_json({"engines": shown, "silent": {str(pid): why for pid, why in silent.items()}})
            return
        _print(shown, silent)
        return
    try:
        before, silent = _look(pids)
        with Live(_picture(_with_rates(before, before), silent), console=console, screen=True,
                  auto_refresh=False) as live:  # fmt: skip
            while True:
                time.sleep(system_s(every_s))
                engines, silent = _look(pids)
                live.update(_picture(_with_rates(before, engines), silent), refresh=True)
                before = engines
    except KeyboardInterrupt:
        pass


def _look(pids: list[int] | None) -> tuple[_Sample, _States]:
    """Ask every process; return each engine's answer, and the reasons of missing ones."""
    asked: Iterable[Found] = find()
    if pids:
        asked = [each for pid in pids for each in find(pid)]
        for pid in pids:
            if not any(each.pid == pid for each in asked):
                raise _not_seen(pid)
    engines: _Sample = {}
    silent: _States = {}
    for process in asked:
        try:
            answer = ask(process, "top", 1.0)
        except TimeoutError:
            silent[process.pid] = _state(process.pid)
        except OSError as error:
            silent[process.pid] = f"{error}"
        else:
            for engine in (answer or {}).get("engines", ()):
                engine["pid"] = process.pid
                engines[process.pid, engine["name"], engine["epoch"]] = engine
    return engines, silent


def _with_rates(before: _Sample, now: _Sample) -> list[dict[str, Any]]:
    """Add to each engine its rates since the last look; 0 if it is new."""
    for key, engine in now.items():
        was = before.get(key, engine)
        gone_s = engine["now_s"] - was["now_s"]
        per_s = 1 / gone_s if gone_s > 0 else 0.0
        for name in ("transfers_done", "imms_counted"):
            engine[f"{name}_per_s"] = (engine[name] - was[name]) * per_s
        for nic, then in zip(engine["nics"], was["nics"]):
            moved = sum(nic[name] - then[name] for name in ("bytes_written", "bytes_read"))
            nic["bits_per_s"] = moved * 8 * per_s
            nic["rows_per_s"] = (nic["rows"] - then["rows"]) * per_s
    return list(now.values())


def _nics(engines: list[dict[str, Any]]) -> list[dict[str, object]]:
    return [
        {
            "pid": engine["pid"],
            "engine": escape(engine["name"]),
            "NIC": escape(nic["nic"]),
            "link": f"{nic['link_bps'] / 1e9:g} Gb/s" if nic["link_bps"] else "",
            "state": "up" if nic["alive"] else "DOWN",
            "Gb/s": f"{nic['bits_per_s'] / 1e9:.3f}",
            "of link": f"{100 * nic['bits_per_s'] / nic['link_bps']:.0f}%"
            if nic["link_bps"]
            else "",
            "rows/s": f"{nic['rows_per_s']:.0f}",
            "in flight": nic["rows_outstanding"],
        }
        for engine in engines
        for nic in engine["nics"]
    ]


def _engines(engines: list[dict[str, Any]]) -> list[dict[str, object]]:
    rows = []
    for engine in engines:
        down = sum(peer["nics_alive"] < peer["nics"] for peer in engine["peers"])
        oldest = f"{engine['oldest'][0]['for_s']:.1f} s" if engine["oldest"] else ""
        rows.append({
            "pid": engine["pid"],
            "engine": escape(engine["name"]) + (" (stopped by a bug)" if engine["crashed"] else ""),
            "backend": engine["backend"],
            "peers": f"{len(engine['peers'])}" + (f" ({down} with NICs down)" if down else ""),
            "open": engine["open"],
            "oldest": oldest,
            "done/s": f"{engine['transfers_done_per_s']:.0f}",
            "done": engine["transfers_done"],
            "failed": engine["transfers_failed"],
            "queued rows": engine["rows_backlog"],
            "imms/s": f"{engine['imms_counted_per_s']:.0f}",
            "imms": engine["imms_counted"],
        })  # fmt: skip
    return rows


def _waits(engines: list[dict[str, Any]]) -> list[str]:
    """List the oldest waits of all engines, longest first."""
    waits = [(wait["for_s"], engine, wait) for engine in engines for wait in engine["oldest"]]
    waits.sort(key=lambda each: -each[0])
    return [
        f"{for_s:8.1f} s  {engine['name']} (pid {engine['pid']}): {wait['what']}"
        for for_s, engine, wait in waits[:_WAITS_MAX]
    ]


def _last_lines(engines: list[dict[str, Any]], silent: _States) -> list[str]:
    waits = _waits(engines)
    lines = ["oldest waits", *waits] if waits else []
    lines += [f"process {pid} does not answer: {why}" for pid, why in silent.items()]
    return (
        lines if lines or engines else [f"no engine is shown by processes of user {os.geteuid()}"]
    )


def _print(engines: list[dict[str, Any]], silent: _States) -> None:
    if engines:
        print_table("engines", _ENGINE_COLUMNS, _engines(engines))
        print_table("NICs", _NIC_COLUMNS, _nics(engines))
    for line in _last_lines(engines, silent):
        typer.echo(line)


def _picture(engines: list[dict[str, Any]], silent: _States) -> RenderableType:
    parts: list[RenderableType] = [Text(f"tep top, {time.strftime('%H:%M:%S')}", style="bold")]
    if engines:
        parts += [make_table(_ENGINE_COLUMNS, _engines(engines))]
        parts += [make_table(_NIC_COLUMNS, _nics(engines))]
    return Group(*parts, Text("\n".join(_last_lines(engines, silent))))
