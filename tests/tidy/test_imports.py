"""Rules of imports beyond import-linter's contracts; and that `import tep` stays light."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.tidy.sources import dotted, imported, nodes, python_files

_NOUNS = """
    base/api base/checks base/errors base/hashing base/units base/wire
    memory/source memory/watch
"""
NOUNS = [Path("tep", f"{name}.py") for name in _NOUNS.split()]
_ROOMS = {"core", "control", "engine"}
CORE = [path for path in python_files("tep") if path.parts[1] in _ROOMS] + NOUNS

_FOREIGN = """
    simpy torch cuda cupy typer rich matplotlib prometheus_client
    tep.backends.ffi tep.cuda tep.host.cuda tep.sim tep.apps tep.cli tep.testing
"""
FOREIGN = _FOREIGN.split()

_CLOCKS_AND_DICE = """
    time datetime random secrets uuid numpy.random os.environ os.getenv os.urandom
"""
CLOCKS_AND_DICE = _CLOCKS_AND_DICE.split()


def _is_under(name: str, tops: list[str]) -> bool:
    return any(name == top or name.startswith(f"{top}.") for top in tops)


def test_the_core_is_where_this_test_looks() -> None:
    """A renamed room would drop out of the rules below without a word."""
    assert [] == [str(path) for path in NOUNS if path not in python_files("tep")]
    assert _ROOMS <= {path.parts[1] for path in CORE}


def test_core_imports_no_backend_and_nothing_foreign() -> None:
    """The code that is tested against a hostile fabric must be the code that drives hardware."""
    registry = {"tep.backends", "tep.backends.open_device", "tep.backends.load_backend"}
    found = [
        f"{path}:{line} {name}"
        for path in CORE
        for line, name in imported(path)
        if _is_under(name, FOREIGN)
        or (
            _is_under(name, ["tep.backends"])
            and not _is_under(name, ["tep.backends.base"])
            and name not in registry
        )
    ]

    assert [] == found


def test_core_reads_no_clock_no_dice_no_environment() -> None:
    """Same seed, same trace: time and chance come from the driver and the caller alone."""
    found = [
        f"{path}:{line} {name}"
        for path in CORE
        for line, name in imported(path)
        if _is_under(name, CLOCKS_AND_DICE)
    ]
    for path in CORE:
        found += [
            f"{path}:{node.lineno} {dotted(node)}"
            for node in nodes(path)
            if isinstance(node, ast.Attribute)
            and dotted(node) in {"os.environ", "os.getenv", "np.random", "os.urandom"}
        ]

    assert [] == found


def test_only_the_drivers_have_threads() -> None:
    """A thread started elsewhere runs beside the engine's one owner. A Lock starts none.

    `tep/host/sight.py` has one that only reads, so that it answers while the owner hangs.
    The verbs backend's routes are made by threads of one call each, which the kernel may hold up. A
    Member of a weight update runs asyncio for a framework whose calls block, as users' programs do.
    A launch waits for its ranks in an event loop, also in a notebook, whose cells run inside one.
    A sweep feeds its processes, and runs no engine beside that.

    The shipped tests may: they play the users.
    """
    threads = {
        "tep/drivers/threads.py",
        "tep/host/sight.py",
        "tep/backends/verbs/messages.py",
        "tep/compat/nixl/listener.py",
        "tep/integrations/weights/member.py",
        "tep/rendezvous/launch.py",
        "tep/sim/sweeps.py",
    }
    homes = ["threading", "_thread", "concurrent.futures"]
    locks = {"threading", "threading.Condition", "threading.Lock", "threading.RLock"}
    locks |= {
        "threading.get_ident",
        "threading.main_thread",
    }  # who runs this: starts nothing either
    rooms = [
        path
        for path in python_files("tep")
        if str(path) not in threads and path.parts[1] != "testing"
    ]
    found = [
        f"{path}:{line} {name}"
        for path in rooms
        for line, name in imported(path)
        if _is_under(name, homes) and name not in locks
    ]
    found += [
        f"{path}:{node.lineno} {dotted(node)}"
        for path in rooms
        for node in nodes(path)
        if isinstance(node, ast.Attribute)
        and dotted(node).startswith("threading.")
        and dotted(node) not in locks
    ]

    assert [] == found


def test_the_simulator_does_not_know_the_engine() -> None:
    """It models hardware; an engine's detail in it would be tested against itself."""
    engine = [".".join(path.with_suffix("").parts) for path in CORE]
    tops = [name for name in engine if not name.startswith(("tep.base.", "tep.memory.source"))] + [
        "tep.TransferEngine"
    ]
    found = [
        f"{path}:{line} {name}"
        for path in python_files("tep")
        if path.parts[1] == "sim" and path.name != "cluster.py"
        for line, name in imported(path)
        if _is_under(name, tops)
    ]

    assert [] == found


PROBE = """
import json, os, sys

def mapped():
    with open("/proc/self/maps") as maps:
        return {line.split()[-1] for line in maps if ".so" in line}

modules, libraries = set(sys.modules), mapped()
exec(sys.argv[1])
print(json.dumps({
    "modules": sorted(set(sys.modules) - modules),
    "libraries": sorted(mapped() - libraries),
    "threads": len(os.listdir("/proc/self/task")),
}))
"""


def loaded_by(code: str) -> dict[str, Any]:
    """The modules, libraries and threads that a fresh interpreter has more after this code."""
    command = [sys.executable, "-c", PROBE, code]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    return json.loads(done.stdout)


def test_import_tep_is_light() -> None:
    """A missing or slow library is news at use; test collection stays quick.

    Extension modules of Python itself (lib-dynload) do not count: `typing` alone has one.
    """
    found = loaded_by("import tep")

    assert ["tep"] == [name for name in found["modules"] if name.partition(".")[0] == "tep"]
    heavy = {"numpy", "simpy", "msgspec", "ctypes", "threading", "asyncio", "rich", "typer"}
    assert set() == heavy & set(found["modules"])
    assert [] == [name for name in found["libraries"] if "/lib-dynload/" not in name]
    assert 1 == found["threads"]


def test_the_command_line_is_light() -> None:
    """`tep --help` and its completion in a shell wait for no library that a command needs."""
    found = loaded_by("import tep.cli")

    heavy = {"numpy", "simpy", "msgspec", "ctypes", "asyncio", "multiprocessing", "rich"}
    assert set() == heavy & set(found["modules"])


def test_an_engine_that_nobody_awaits_loads_no_asyncio() -> None:
    """asyncio is a tenth of an engine's start; a program that awaits has it already."""
    found = loaded_by("from tep import TransferEngine; import tep.backends.libfabric")

    assert "tep.engine" in found["modules"]
    assert "asyncio" not in found["modules"]
