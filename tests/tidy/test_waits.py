"""No time that a user gives overflows a system call: each passes through the one clamp."""

from __future__ import annotations

import ast
import functools
import math
import re
import select
from collections.abc import Iterator
from pathlib import Path

import pytest

from tep.backends.ffi.libc import Timer
from tests.tidy.sources import python_files, tree

WAITS = {"acquire", "communicate", "join", "poll", "select", "settimeout", "sleep", "wait"}
"""Functions and methods that wait in the kernel; timers are in `libc.Timer`."""

TIME = re.compile(r"(_s|_ms|timeout|deadline|delay|pause|left|until)$")
CONSTANT = re.compile(r"_*[A-Z][A-Z0-9_]*")

OWN = {
    "tep/compat/mooncake/__init__.py": "an agent's wait, which sleeps a second at a time",
    "tep/compat/nixl/api.py: one.wait": "a handle, whose driver clamps the time",
    "tep/compat/nixl/api.py: self._news.wait": "at most a second at a time",
    "tep/core/handles.py": "a handle gives its time to its driver, which clamps it",
    "tep/drivers/threads.py: self.wait": "a driver's own wait, begun again after a signal",
    "tep/drivers/threads.py: thread.join": "at most 1e9 s, by check_seconds(); a join takes more",
    "tep/integrations/ray/pulling.py": "a transfer gives its time to its driver, which clamps it",
    "tep/integrations/ray/transport.py": "a pull's wait, which ends in waits of its transfers",
    "tep/drivers/turning.py: super().wait": "a driver's own wait, in the class above",
    "tep/testing/contract_engine.py": "waits of handles, whose drivers clamp them",
}
"""Waits that are no system calls, by file or by file and call, with the reason."""


def names(expression: ast.AST) -> set[str]:
    """Every name and attribute in an expression."""
    found = {node.id for node in ast.walk(expression) if isinstance(node, ast.Name)}
    return found | {n.attr for n in ast.walk(expression) if isinstance(n, ast.Attribute)}


def times(call: ast.Call) -> Iterator[ast.expr]:
    """The arguments that are times and may be anything: no literals and no constants."""
    given = [word.value for word in call.keywords if TIME.search(word.arg or "")]
    given += [each for each in call.args if any(TIME.search(name) for name in names(each))]
    for each in given:
        seconds = each.left if isinstance(each, ast.BinOp) else each  # poll() takes milliseconds
        clamped = isinstance(seconds, ast.Call) and ast.unparse(seconds.func) == "system_s"
        if not clamped and not all(CONSTANT.fullmatch(name) for name in names(each)):
            yield each


def unclamped(module: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, function) of each wait with a time that nobody has clamped.

    asyncio clamps its own sleeps to a day; what is awaited is asyncio's.
    """
    awaited = {id(node.value) for node in ast.walk(module) if isinstance(node, ast.Await)}
    for node in ast.walk(module):
        if not isinstance(node, ast.Call) or id(node) in awaited:
            continue
        if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Constant):
            continue  # ", ".join(...)
        function = ast.unparse(node.func)
        if function.rpartition(".")[2] in WAITS and not function.startswith("asyncio."):
            yield from ((node.lineno, function) for _ in times(node))


@functools.cache
def found() -> list[tuple[Path, int, str]]:
    """Every such wait of the project."""
    paths = [path for path in python_files("tep") if path != Path("tep/base/waiting.py")]
    return [(path, *each) for path in paths for each in unclamped(tree(path))]


@pytest.mark.slow
def test_every_wait_takes_its_time_from_the_clamp() -> None:
    """poll() overflows at 24.8 days, a lock at 292 years: a long time-out ended the worker."""
    wrong = [
        f"{path}:{line}: {function}() waits for a time that is not clamped by system_s()"
        for path, line, function in found()
        if not {str(path), f"{path}: {function}"} & set(OWN)
    ]
    assert [] == wrong


@pytest.mark.slow
def test_no_exception_is_left_over() -> None:
    """An exception for what is gone would let the next mistake through."""
    there = {text for path, _, call in found() for text in (str(path), f"{path}: {call}")}
    assert set(OWN) <= there


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("gate.acquire(timeout=left_s)", True),
        ("poller.poll(timeout_s * 1000)", True),
        ("select.select([fd], [], [], until_s - now)", True),
        ("sock.settimeout(options.timeout_s)", True),
        ("poller.poll(system_s(left_s) * 1000)", False),
        ("gate.wait(system_s(min(left, _LOOK_S)))", False),
        ("process.wait(_END_S)", False),
        ("nic.poll(out)", False),
        ("await asyncio.sleep(left_s)", False),
    ],
)
def test_the_rule_itself(line: str, wrong: bool) -> None:
    """A rule that sees nothing finds nothing."""
    module = ast.parse(f"async def f():\n    {line}\n")
    assert wrong == bool(list(unclamped(module)))


@pytest.mark.parametrize("delay_s", [math.inf, math.nan, -1.0, 0.0, 1e-300, 1e9, 1e30, 1e300])
def test_a_timer_takes_any_time(delay_s: float) -> None:
    """timerfd refuses what is longer than 64 bits of seconds, and the sleeper was never woken."""
    timer = Timer()
    try:
        timer.set(3600.0)
        timer.set(delay_s)
        soon = not delay_s > 1
        assert soon == bool(select.select([timer.fd], [], [], 5 if soon else 0)[0])
    finally:
        timer.close()
