"""The path of a new user, in a fresh clone: demo, first program, notebook, own protocol, bench.

    python tests/bench/bench_newcomer.py [--reuse] [--json]

The programs are taken from README.md and docs/howto/protocol.md, as they stand. Each step prints
its time. CPU time is the step's processes': on a busy machine it says more than wall time.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 600
NOTEBOOK = "notebooks/01-one-write-many-pages.ipynb"
NOT_THEIRS = ("PYTEST", "PYTHON", "VIRTUAL_ENV", "TEP_", "COV_")
"""Variables that a newcomer's shell does not have."""


def block(page: Path, number: int) -> str:
    """The n-th Python program of a page."""
    found = re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    return found[number]


def shell(folder: Path, *words: str, status: int = 0) -> str:
    """Run a command as somebody in a new shell would; return what it printed.

    Raises:
        SystemExit: it ended with another status; shows its last lines.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith(NOT_THEIRS)}
    done = subprocess.run(
        words, cwd=folder, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    if done.returncode != status:
        tail = (done.stdout + done.stderr)[-2000:]
        raise SystemExit(f"{' '.join(words)} ended with {done.returncode}:\n{tail}")
    return done.stdout


def borrow(home: Path) -> None:
    """Make .venv with the packages of this Python at hand, pip too: none is installed again."""
    venv.create(home / ".venv", with_pip=False)
    (there,) = (home / ".venv").glob("lib/python*/site-packages")
    (there / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")


def clone(home: Path, *, reuse: bool) -> None:
    """Clone this checkout; `reuse`: with the packages of this Python, in place of none."""
    shell(home.parent, "git", "clone", "--quiet", str(ROOT), str(home))
    if reuse:
        borrow(home)


def steps(home: Path) -> list[tuple[str, Callable[[], str], str]]:
    """(what, how, what must be in the output); `home` is where the clone will be."""
    tep, python = str(home / ".venv/bin/tep"), str(home / ".venv/bin/python")

    def first_program() -> str:
        (home / "first.py").write_text(block(home / "README.md", 0), encoding="utf-8")
        return shell(home, python, "first.py")

    def own_protocol() -> str:
        program = block(home / "docs/howto/protocol.md", 0)
        (home / "my_protocol.py").write_text(program, encoding="utf-8")
        place = ("--protocol", "my_protocol.py:deliver")
        return shell(home, tep, "sim", *place, "--runs", "100", "--faults", "order,posting")

    def notebook() -> str:
        # As `jupyter execute`, a script that is not there where packages are borrowed.
        run = "from nbclient.cli import main; main()"
        shell(home, python, "-c", run, "--inplace", NOTEBOOK)
        return (home / NOTEBOOK).read_text(encoding="utf-8")

    bench = ("scripts/bench_two_nodes", "--launch", "local", "--backend", "libfabric", "--short")
    return [
        ("clone to demo", lambda: shell(home, "scripts/demo"), "agrees"),
        ("first program, of README.md", first_program, "256 pages in"),
        ("first notebook", notebook, "image/png"),
        ("first protocol tested, 100 seeds", own_protocol, "100 clean"),
        ("first bench, two processes", lambda: shell(home, *bench), "Gb/s"),
    ]


def used_s() -> float:
    """CPU time of processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def walk(folder: Path, *, reuse: bool) -> list[dict[str, object]]:
    """Go the whole path in an empty folder.

    Args:
        folder: where to clone to.
        reuse: the packages of this Python, in place of installing them.

    Returns:
        A row a step.
    """
    home = folder / "tep"
    clone(home, reuse=reuse)
    rows: list[dict[str, object]] = []
    for what, how, wanted in steps(home):
        began, cpu = time.monotonic(), used_s()
        printed = how()
        assert wanted in printed, (
            f"{what}: {wanted!r} is not in what it printed:\n{printed[-2000:]}"
        )
        took = {"s": round(time.monotonic() - began, 1), "s of CPU": round(used_s() - cpu, 1)}
        rows.append({"what": what} | took)
        sys.stderr.write(f"{rows[-1]}\n")
    return rows


def main(argv: list[str]) -> int:
    """Walk, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reuse", action="store_true", help="install nothing: use what is here")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        rows = walk(Path(folder), reuse=given.reuse)
    sys.stdout.write(json.dumps({"rows": rows}, indent=1) + "\n" if given.json else f"{rows}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
