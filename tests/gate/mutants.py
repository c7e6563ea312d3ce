"""Mistakes that a tool makes in some rooms: which of them does no test notice?

    pip install cosmic-ray                      # a tool; the project does not need it
    python -m tests.gate.mutants --sample 300   # ten minutes on two processors
    python -m tests.gate.mutants                # all of core, control and wire: two hours
    python -m tests.gate.mutants --rooms tep/host tep/observe --tests tests/unit/host \
        tests/unit/observe --sample 100

A mistake is one operator, number or condition replaced by another; at each place of the code the
session has one, drawn by --seed. For each in the engine, 120 drawn runs are played first; and then
the tests of `--fast` that reach its line, 12 s of them; the first failure ends it, and so does a
time without an end. What nobody noticed is printed as a list; with --again those are played once
more, with the slow tests. `mutants.txt` says of those that were
looked at why they change nothing, or which test notices them now.

No file is changed. The tests are collected once; each mistake is a fork of that process in which
the functions concerned get other code. What runs at import, such as the default of a field, takes
a process of its own that imports the changed module; `--later` leaves these out.
"""

from __future__ import annotations

import argparse
import difflib
import gc
import itertools
import json
import os
import random
import resource
import select
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Final, NamedTuple

import pytest
from _pytest.main import pytest_runtestloop as run_tests  # what pytest itself does

from tests.gate.mutated import Finder, Functions, changed, compiled, header, live, put

ROOT: Final = Path(__file__).parents[2]
MUTATED: Final = ("tep/core", "tep/control", "tep/base/wire.py")
DRAWN: Final = ("tep/core/", "tep/control/", "tep/engine/", "tep/base/")
"""The rooms that drawn runs go through."""
TESTS: Final = ("tests/unit", "tests/property", "tests/conformance")
SEEDS: Final = 120
TESTS_S: Final = 12.0
"""So much CPU time of tests is spent on a mistake, the quickest files first; more with --again."""
AGAIN: Final = 4
CPU_S: Final = 60
TIMEOUT_S: Final = 150
TEST_TIMEOUT_S: Final = 30
TAKEN_FOR_TYPES: Final = "ReplaceBinaryOperator_BitOr"
"""Nearly all of them are in annotations, which nobody evaluates."""
NUMBERS: Final = ("Number", "Binary")
"""Played last: most of them change a bound that nobody can see."""
_HEADS: Final = ("---", "+++")
_TOLD: Final = "TEP_MUTANT_FD"

CONFIG: Final = """[cosmic-ray]
module-path = {paths}
timeout = 1.0
excluded-modules = []
test-command = "true"
[cosmic-ray.distributor]
name = "local"
"""


class Mistake(NamedTuple):
    job: str
    path: str
    row: int
    operator: str
    occurrence: int

    @property
    def file(self) -> Path:
        return ROOT / self.path

    def text(self) -> str:
        """The module with the mistake in it."""
        from cosmic_ray.mutating import mutate_code  # the tool
        from cosmic_ray.plugins import get_operator

        was = self.file.read_text()
        return mutate_code(was, get_operator(self.operator)(), self.occurrence) or was


def draw(session: Path, sample: int, seed: int) -> None:
    """Leave one mistake at each place, and `sample` of these (0: all)."""
    with closing(sqlite3.connect(session)) as found, found:
        rows = found.execute(
            "select job_id, module_path, start_pos_row, start_pos_col, operator_name"
            " from mutation_specs order by module_path, start_pos_row, start_pos_col,"
            " operator_name, occurrence"
        ).fetchall()
        places: dict[tuple[str, int, int], list[str]] = {}
        for job, path, row, column, operator in rows:
            if TAKEN_FOR_TYPES not in operator:
                places.setdefault((path, row, column), []).append(job)
        dice = random.Random(seed)  # no secret
        kept = [dice.choice(jobs) for jobs in places.values()]
        if sample:
            kept = dice.sample(kept, min(sample, len(kept)))
        found.execute("create temp table kept (job_id)")
        found.executemany("insert into kept values (?)", [(job,) for job in kept])
        found.execute("delete from mutation_specs where job_id not in kept")
        found.execute("delete from work_items where job_id not in kept")


def to_play(session: Path) -> list[Mistake]:
    """Return the mutants without a result, in a fixed order that follows no file."""
    with closing(sqlite3.connect(session)) as found:
        rows = found.execute(
            "select job_id, module_path, start_pos_row, operator_name, occurrence"
            " from mutation_specs where job_id not in (select job_id from work_results)"
            " order by module_path, start_pos_row, start_pos_col"
        ).fetchall()
    mistakes = [Mistake(*row) for row in rows]
    random.Random(1).shuffle(mistakes)
    return sorted(mistakes, key=lambda x: any(name in x.operator for name in NUMBERS))


def forget_unnoticed(session: Path) -> None:
    """Leave the mistakes that no test noticed, without a result, and none else."""
    with closing(sqlite3.connect(session)) as found, found:
        found.execute(
            "create temp table noticed as select job_id from work_results"
            " where test_outcome != 'SURVIVED'"
        )
        found.execute("delete from mutation_specs where job_id in noticed")
        found.execute("delete from work_items where job_id in noticed")
        found.execute("delete from work_results")


def unnoticed(session: Path) -> tuple[int, list[str]]:
    """Return the number played, and place, line and change of those that no test noticed."""
    with closing(sqlite3.connect(session)) as found:
        (played,) = found.execute("select count(*) from work_results").fetchone()
        rows = found.execute(
            "select module_path, start_pos_row, definition_name, diff from work_results"
            " join mutation_specs using (job_id) where test_outcome = 'SURVIVED'"
            " order by module_path, start_pos_row"
        ).fetchall()
    texts = []
    for path, row, name, diff in rows:
        lines = [line for line in diff.splitlines() if line[:1] in "+-" and line[:3] not in _HEADS]
        was, became = (" ".join(x[1:].strip() for x in lines if x[0] == sign) for sign in "-+")
        texts.append(f"{path}:{row} {name}: {was} -> {became}")
    return played, texts


class Reached:
    """The tests that reach each line, and the time each takes."""

    def __init__(self, path: Path, rooms: list[str], tests_s: float) -> None:
        self.path, self.rooms, self.tests_s = path, rooms, tests_s
        self.lines: dict[str, dict[str, list[str]]] = {}
        self.seconds: dict[str, float] = {}
        self.failed: set[str] = set()
        self.read()

    def read(self) -> None:
        """Read what an earlier run has found out."""
        if self.path.exists():
            self.lines, self.seconds = json.loads(self.path.read_text())

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test that fails, where this is a plugin."""
        if report.failed:
            self.failed.add(report.nodeid)

    def leave_out_failed(self) -> None:
        """A test that fails without a mistake notices none."""
        for reaching in self.lines.values():
            for line, names in reaching.items():
                reaching[line] = [name for name in names if name not in self.failed]

    def by(self, mistake: Mistake) -> list[str]:
        """The tests that reach a mistake, file by file, the quickest file first."""
        lines = header(mistake.file, mistake.row)
        names = {
            name
            for line, reaching in self.lines.get(mistake.path, {}).items()
            if lines is None or int(line) in lines
            for name in reaching
        }
        total: Counter[str] = Counter()
        for name in names:
            total.update({_file(name): round(self.seconds[name] * 1e9)})
        order = sorted(names, key=lambda name: (total[_file(name)], name))
        spent = itertools.accumulate(self.seconds[name] for name in order)
        return [name for name, until in zip(order, spent, strict=True) if until < self.tests_s]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Look at the lines that a test reaches, where this is a plugin."""
        from coverage import Coverage

        rooms = [str(ROOT / x / "*" if (ROOT / x).is_dir() else ROOT / x) for x in self.rooms]
        coverage = Coverage(include=rooms, data_file=None, config_file=False)
        coverage.set_option("run:disable_warnings", ["no-data-collected"])
        start = time.process_time()
        coverage.start()
        try:
            return (yield)
        finally:
            coverage.stop()
            self.seconds[item.nodeid] = time.process_time() - start
            data = coverage.get_data()
            for name in data.measured_files():
                of_file = self.lines.setdefault(str(Path(name).relative_to(ROOT)), {})
                for line in data.lines(name) or []:
                    of_file.setdefault(str(line), []).append(item.nodeid)


def _file(test: str) -> str:
    return test.partition("::")[0]


class Names:
    """A plugin that keeps the name of the first test that failed."""

    failed = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid


def notice(session: pytest.Session, mistake: Mistake, tests: list[str]) -> str:
    """Play and test the code as it is now: who noticed something; "" for nobody."""
    if mistake.path.startswith(DRAWN):
        from tests.gate.test_planted_bugs import first_found

        try:
            if first_found(range(SEEDS)) is not None:
                return "drawn runs"
        except BaseException as error:  # noqa: BLE001  # a mistake may raise anything
            return f"drawn runs: {type(error).__name__}"
    names = Names()
    session.config.pluginmanager.register(names)
    items = {item.nodeid: item for item in session.items}
    session.items = [items[name] for name in tests if name in items]
    try:
        run_tests(session)
    except BaseException as error:  # noqa: BLE001  # the same, and -x ends the loop so
        return names.failed or type(error).__name__
    return names.failed


def quiet(session: pytest.Session) -> None:
    """Have this fork say nothing, and keep its files in a folder of its own."""
    session.config.pluginmanager.unregister(name="terminalreporter")
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    folder = _folder(os.getpid())
    folder.mkdir(exist_ok=True)
    os.environ["PYTEST_DEBUG_TEMPROOT"] = str(folder)


def _folder(pid: int) -> Path:
    return Path(tempfile.gettempdir(), f"mutant-{pid}")


class Player:
    """A plugin of pytest: instead of running what was collected it plays mistakes."""

    def __init__(self, session: Path, workers: int, reached: Reached, *, later: bool) -> None:
        self.session, self.workers, self.later = session, workers, later
        self.reached = reached
        self.job: Mistake | None = None
        self.again = ["--again"] * (reached.tests_s > TESTS_S)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if self.job is not None:
            who = notice(session, self.job, self.reached.by(self.job))
            os.write(int(os.environ[_TOLD]), who.encode())
            os._exit(0)
        if not self.reached.lines:  # in a fork: what the tests leave behind is not for the others
            if os.fork() == 0:
                session.config.pluginmanager.register(self.reached)
                session.config.option.maxfail = 0
                run_tests(session)
                self.reached.leave_out_failed()
                self.reached.path.write_text(json.dumps((self.reached.lines, self.reached.seconds)))
                os._exit(0)
            os.wait()
            self.reached.read()
        gc.unfreeze()  # tests/conftest.py had it pass over what was imported
        functions = live()
        gc.freeze()
        for k in range(self.workers):
            if os.fork() == 0:
                try:
                    for mistake in to_play(self.session)[k :: self.workers]:
                        self._play(session, mistake, functions)
                except BaseException:  # noqa: BLE001  # pytest would go on in this fork as well
                    traceback.print_exc()
                    os._exit(1)
                os._exit(0)
        for _ in range(self.workers):
            os.wait()
        return True

    def _play(self, session: pytest.Session, mistake: Mistake, functions: Functions) -> None:
        was = text = mistake.file.read_text()
        try:
            text = mistake.text()
            pairs = changed(*(compiled(x, mistake.file) for x in (was, text)))
        except Exception as error:  # noqa: BLE001  # no Python, or the tool cannot make it
            self._keep(mistake, "INCOMPETENT", f"{type(error).__name__}: {error}", text)
            return
        if pairs is None and self.later:
            return
        heard, told = os.pipe()
        child = os.fork()
        if child == 0:
            os.setsid()
            resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
            quiet(session)
            if pairs is None:
                self._import(mistake, told)
            else:
                put(pairs, functions)
                os.write(told, notice(session, mistake, self.reached.by(mistake)).encode())
            os._exit(0)
        os.close(told)
        ready, _, _ = select.select([heard], [], [], TIMEOUT_S)
        who = os.read(heard, 1000).decode() if ready else "a time without an end"
        os.close(heard)
        if not ready:
            os.killpg(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if status and not who:
            who = f"its process ended with {status}"
        shutil.rmtree(_folder(child), ignore_errors=True)
        self._keep(mistake, "KILLED" if who else "SURVIVED", who, text)

    def _import(self, mistake: Mistake, told: int) -> None:
        """Have a process that imports the mistake say who noticed it."""
        command = [sys.executable, "-m", "tests.gate.mutants", "--session", str(self.session)]
        subprocess.run(
            [*command, "--job", mistake.job, "--rooms", *self.reached.rooms, *self.again],
            pass_fds=[told],
            env=os.environ | {_TOLD: str(told)},
            check=True,
        )

    def _keep(self, mistake: Mistake, outcome: str, who: str, text: str) -> None:
        was = mistake.file.read_text().split("\n")
        lines = difflib.unified_diff(was, text.split("\n"), lineterm="", n=0)
        with closing(sqlite3.connect(self.session, timeout=60)) as found, found:
            found.execute(
                "insert into work_results (worker_outcome, output, test_outcome, diff, job_id)"
                " values ('NORMAL', ?, ?, ?, ?)",
                (who, outcome, "\n".join(lines), mistake.job),
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rooms", nargs="+", default=MUTATED, help="where mistakes are made")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="the tests that may notice them")
    parser.add_argument("--sample", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--session", type=Path, default=Path("mutants.sqlite"))
    parser.add_argument("--later", action="store_true", help="leave out what runs at import")
    parser.add_argument("--again", action="store_true", help="those that no test noticed, longer")
    parser.add_argument("--job", help="play this mistake, in a process that imports it")
    given = parser.parse_args()
    session = given.session.resolve()
    if not session.exists():  # else it goes on where it was stopped
        config = session.with_suffix(".toml")
        config.write_text(CONFIG.format(paths=list(given.rooms)))
        tool = [sys.executable, "-m", "cosmic_ray.cli", "init"]
        subprocess.run([*tool, str(config), str(session)], check=True)
        draw(session, given.sample, given.seed)
    if given.again and not given.job:
        forget_unnoticed(session)
        session.with_suffix(".lines").unlink(missing_ok=True)
    longer = AGAIN if given.again else 1
    reached = Reached(session.with_suffix(".lines"), given.rooms, TESTS_S * longer)
    player = Player(session, given.workers, reached, later=given.later)
    tests = list(given.tests)
    if given.job:
        (mistake,) = (x for x in to_play(session) if x.job == given.job)
        player.job = mistake
        sys.meta_path.insert(0, Finder(mistake.file, mistake.text()))
        tests = sorted({_file(name) for name in player.reached.by(mistake)})
        tests.append("--assert=plain")  # else pytest imports tep's modules in its own way
    os.environ["TEP_PROFILE"] = "fast"
    options = ["-q", "-x", "-p", "no:randomly", "-p", "no:cacheprovider", "-p", "no:xdist"]
    marks = "not long and not notebook" + " and not slow" * (not given.again)
    options += ["-o", f"timeout={TEST_TIMEOUT_S * longer}", "-m", marks]
    pytest.main([*options, *tests], plugins=[player])
    if given.job:  # no test was begun: the mistake stops an import
        os.write(int(os.environ[_TOLD]), b"its import")
        return 0
    played, texts = unnoticed(session)
    texts.append(f"{played} mistakes, {len(texts)} of them unnoticed")
    print(*texts, sep="\n")  # noqa: T201  # it is a program
    return 0


if __name__ == "__main__":
    sys.exit(main())
