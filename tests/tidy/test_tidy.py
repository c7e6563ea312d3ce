"""The rules of style that a program can check, over every file of the project."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.tidy.sources import dotted, files, nodes, python_files, text, tree

LINE_MAX, FUNCTION_MAX, FILE_MAX = 100, 60, 900

LONGER: dict[str, str] = {
    # "path" or "path::function": the reason why it may be longer
    "tests/property/test_numbers.py::verbs": "a table: one entry for each argument of each verb",
    "tep/cli/kvcache.py::kvcache": "a command: most of its lines are its options and their checks",
    "tep/cli/moe.py::moe": "a command: most of its lines are its options and their checks",
    "tep/cli/rl.py::plan": "a command: most of its lines are its options and their checks",
}


def _functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_every_module_says_what_lives_in_it() -> None:
    """Without the sentence nobody knows what may be added to a room, and it becomes a shed."""
    silent = [str(path) for path in python_files() if not ast.get_docstring(tree(path))]

    assert [] == silent


def test_lines_functions_and_files_stay_short() -> None:
    """Code that does not fit a screen is not read."""
    found = []
    for path in python_files():
        lines = text(path).splitlines()
        found += [f"{path}:{n}" for n, line in enumerate(lines, 1) if len(line) > LINE_MAX]
        if len(lines) > FILE_MAX and str(path) not in LONGER:
            found.append(f"{path}: {len(lines)} lines")
        for node in _functions(path):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_MAX and f"{path}::{node.name}" not in LONGER:
                found.append(f"{path}::{node.name}: {length} lines")

    assert [] == found


def test_exceptions_are_still_needed() -> None:
    """An exception that outlives its reason hides the next offender."""
    names = {str(path) for path in python_files()}
    names |= {f"{path}::{node.name}" for path in python_files() for node in _functions(path)}

    assert set() == set(LONGER) - names
    assert all(len(reason) > 20 for reason in LONGER.values())


def test_every_room_lists_its_public_names() -> None:
    """`__all__` is what a reader may rely on; a name in it that is not there breaks `import *`."""
    found = []
    for path in python_files("tep"):
        body = tree(path).body
        listed = [
            ast.literal_eval(node.value)
            for node in body
            if isinstance(node, ast.Assign) and [dotted(t) for t in node.targets] == ["__all__"]
        ]
        if len(body) <= 1 or path.name == "__main__.py":  # a docstring alone has nothing to list
            continue
        if not listed:
            found.append(f"{path}: no __all__")
            continue
        if path == Path("tep/__init__.py"):
            continue  # lazy names: test_public_names.py resolves them
        missing = set(listed[0]) - set(_top_names(body))
        if missing and not any(getattr(node, "name", "") == "__getattr__" for node in body):
            found.append(f"{path}: {sorted(missing)} in __all__ but not defined")

    assert [] == found


def _top_names(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (dotted(target) for target in node.targets)
        elif isinstance(node, ast.AnnAssign):
            yield dotted(node.target)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.If | ast.Try):
            yield from _top_names([*node.body, *node.orelse])


def test_public_functions_and_classes_have_docstrings() -> None:
    """The docstrings of `__all__` are for readers who do not want to read the code."""
    found = []
    for path in python_files("tep"):
        for node in tree(path).body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            if not node.name.startswith("_") and not ast.get_docstring(node):
                found.append(f"{path}:{node.lineno} {node.name}")

    assert [] == found


def test_every_test_says_what_would_break() -> None:
    """A red test whose purpose is unknown gets deleted."""
    found = [
        f"{path}:{node.lineno} {node.name}"
        for path in python_files("tests", "tep")
        for node in _functions(path)
        if node.name.startswith("test_") and not ast.get_docstring(node)
    ]

    assert [] == found


def test_notes_on_work_to_do_carry_an_issue_number() -> None:
    """A control message on work to do that belongs to no issue stays for ever."""
    word = "TO" + "DO"
    pattern = re.compile(rf"\b({word}|FIX" + r"ME|XX" + r"X)\b(?!.{0,3}#\d+)")
    found = [
        f"{path}:{n}"
        for path in files()
        if path.suffix in {".py", ".md", ".toml"}
        for n, line in enumerate(text(path).splitlines(), 1)
        if pattern.search(line)
    ]

    assert [] == found


def test_no_exception_is_caught_blindly() -> None:
    """A bare except hides the bug of tomorrow; a wide one says beside it why it must be."""
    found = []
    for path in python_files():
        lines = text(path).splitlines()
        for node in nodes(path):
            if not isinstance(node, ast.ExceptHandler):
                continue
            types = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            wide = {dotted(t) for t in types if t} & {"Exception", "BaseException"}
            reason = re.search(r"# noqa: BLE001 +# \w.{10,}", lines[node.lineno - 1])
            passed_on = isinstance(node.body[-1], ast.Raise)
            if node.type is None or (wide and not reason and not passed_on):
                found.append(f"{path}:{node.lineno}")

    assert [] == found


def test_silenced_checks_say_why() -> None:
    """`noqa` and `type: ignore` name one rule, and the reason stands beside or above."""
    mark = re.compile(r"#\s*(noqa|type:\s*ignore)(?P<rest>.*)")
    found = []
    for path in python_files():
        lines = text(path).splitlines()
        for n, line in enumerate(lines, 1):
            hit = mark.search(line)
            if hit is None or path.parts[:2] == ("tests", "tidy"):
                continue
            named = re.match(r"(: ?[A-Z]+\d+|\[[a-z-]+)", hit["rest"])
            above = lines[n - 2].lstrip().startswith("#")
            beside = "#" in hit["rest"]
            if not named or not (beside or above):
                found.append(f"{path}:{n}: {hit[0]}")

    assert [] == found


def test_tests_do_not_sleep() -> None:
    """A sleep is too short on a loaded machine and too long on an idle one; wait for an event.

    `bench_busy` waits for nothing: a sleep is the time over which it measures.
    """
    found = [
        f"{path}:{node.lineno}"
        for path in python_files("tests")
        if path.name != "bench_busy.py"
        for node in nodes(path)
        if isinstance(node, ast.Call) and dotted(node.func) in {"time.sleep", "sleep"}
    ]

    assert [] == found


def test_skips_and_expected_failures_have_a_reason() -> None:
    """A silent skip is a test that nobody misses until it is needed."""
    found = []
    for path in python_files("tests", "tep"):
        for node in nodes(path):
            target = node.func if isinstance(node, ast.Call) else node
            name = dotted(target) if isinstance(target, ast.expr) else ""
            if not re.fullmatch(r"(pytest\.)?(mark\.)?(skip|skipif|xfail)", name):
                continue
            if isinstance(node, ast.Call):
                words = [k.arg for k in node.keywords]
                called = name.removeprefix("pytest.") in {"skip", "xfail"} and node.args
                if "reason" not in words and not called:
                    found.append(f"{path}:{node.lineno}")
    bare = re.compile(r"@pytest\.mark\.(skip|xfail)\s*$", re.MULTILINE)
    found += [str(path) for path in python_files("tests", "tep") if bare.search(text(path))]

    assert [] == found


def test_no_path_of_somebodys_machine() -> None:
    """A path of one machine works on that machine."""
    folders = "|".join(["ho" + "me", "wo" + "rk", "ro" + "ot", "Us" + "ers"])
    pattern = re.compile(rf"(?<![\w./<-])/({folders})/[\w.]")
    found = [
        f"{path}:{n}: {line.strip()[:80]}"
        for path in files()
        if path.suffix != ".png"
        for n, line in enumerate(text(path).splitlines(), 1)
        if pattern.search(line)
    ]

    assert [] == found


def test_no_package_registry_is_named() -> None:
    """The source of packages is the user's configuration, not ours."""
    hosts = "|".join(["py" + r"pi\.org", "python" + "hosted", "deb" + r"ian\.org", "npm" + "js"])
    found = [
        str(path)
        for path in files()
        if path.suffix != ".png" and re.search(hosts, text(path), re.IGNORECASE)
    ]

    assert [] == found


READS_PEERS = [
    "tep/backends/local/channel.py",
    "tep/backends/local/outbound.py",
    "tep/backends/local/port.py",
    "tep/backends/local/memory.py",
    "tep/backends/libfabric/frames.py",
    "tep/control/messages.py",
    "tep/rendezvous/wire.py",
    "tep/base/wire.py",
]


def test_what_a_peer_has_written_is_not_asserted() -> None:
    """An assert on a peer's words ends the engine, or under -O lets them through."""
    found = [
        f"{path}:{node.lineno}"
        for path in map(Path, READS_PEERS)
        for node in nodes(path)
        if isinstance(node, ast.Assert)
    ]

    assert [] == found


def test_no_repr_shows_a_token() -> None:
    """A repr ends up in an error's text, and so in a log that others read."""
    found = []
    for path in python_files("tep"):
        for owner in (node for node in nodes(path) if isinstance(node, ast.ClassDef)):
            secret = any(
                isinstance(node, ast.AnnAssign)
                and dotted(node.target) == "token"
                and "repr=False" not in ast.unparse(node)
                for node in owner.body
            )
            own = "__repr__" in {
                getattr(node, "name", None) or dotted(getattr(node, "targets", [node])[0])
                for node in owner.body
                if isinstance(node, ast.FunctionDef | ast.Assign)
            }
            if secret and not own:
                found.append(f"{path}:{owner.lineno} {owner.name}")

    assert [] == found


def test_unit_tests_stand_where_their_subject_stands() -> None:
    """A flat folder of 130 files is one that nobody searches."""
    rooms = {path.parts[1] for path in python_files("tep") if len(path.parts) > 2} | {"support"}
    found = {path.parts[2] for path in python_files("tests/unit")} - {"conftest.py"}

    assert set() == found - rooms
