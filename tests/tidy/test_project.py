"""README, CHANGELOG, scripts, notebooks and pins: what they promise is there."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.specifiers import SpecifierSet

import tep
from tep.base.distribution import DISTRIBUTION
from tests.tidy.sources import ROOT, files, text

SCRIPTS = [path for path in files() if path.parent == Path("scripts") and path.suffix == ""]
DEFINITION_LINES_MAX = 10


def commands(page: Path) -> list[list[str]]:
    """The commands of a page's shell blocks, comments and prompts taken off."""
    blocks = re.findall(r"^```(?:bash|sh|console)\n(.*?)^```", text(page), re.MULTILINE | re.DOTALL)
    lines = [line.strip().removeprefix("$ ") for block in blocks for line in block.splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def test_readme_scripts_exist() -> None:
    """The first command a newcomer copies must not answer "not found"."""
    named = {words[0] for words in commands(Path("README.md")) if words[0].startswith("scripts/")}

    assert {"scripts/demo", "scripts/test"} <= named
    assert [] == [name for name in sorted(named) if not os.access(ROOT / name, os.X_OK)]


def test_readme_subcommands_exist() -> None:
    """A subcommand that was renamed lives on in the README for years."""
    named = {
        words[1]
        for words in commands(Path("README.md"))
        if words[0] in {"tep", ".venv/bin/tep"} and len(words) > 1
    }

    assert named, "the README shows no use of tep"
    code = "import sys, tep.cli; sys.exit(any([tep.cli.main([w, '--help']) for w in sys.argv[1:]]))"
    done = subprocess.run(
        [sys.executable, "-c", code, *sorted(named)],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert 0 == done.returncode, done.stdout + done.stderr


def test_changelog_has_this_version() -> None:
    """A release without an entry leaves its users to read the history."""
    page = text(Path("CHANGELOG.md"))

    assert re.search(rf"^## \[{re.escape(tep.__version__)}\]", page, re.MULTILINE)
    assert re.search(r"^## \[Unreleased\]", page, re.MULTILINE)


def test_scripts_run_from_anywhere() -> None:
    """A script without its bit, its shebang or `set -euo pipefail` fails late or goes on after."""
    assert {"setup", "demo", "test"} <= {path.name for path in SCRIPTS}
    for path in [*SCRIPTS, Path(".ci/run")]:
        assert os.access(ROOT / path, os.X_OK), path
        assert text(path).startswith("#!/usr/bin/env bash\n"), path
        assert "\nset -euo pipefail\n" in text(path), path
        assert "dirname" in text(path), f"{path} does not find its own folder"


def test_the_workflow_and_the_container_have_what_scripts_have() -> None:
    """A list that is kept twice is right once."""
    workflow = text(Path(".github/workflows/test.yml"))
    setup = text(Path("scripts/setup"))
    packages = re.search(r"apt_packages=\(([^)]+)\)", setup)
    container = text(Path(".devcontainer/Dockerfile"))

    assert packages is not None
    assert set() == set(packages[1].split()) - set(container.replace("\\", " ").split())
    assert ["scripts/demo", "scripts/test"] == re.findall(r"- run: (.+)", workflow)
    assert tep_python() == re.search(r'python: \["([^"]+)"', workflow)[1]


def tep_python() -> str:
    """The oldest Python that pyproject.toml allows."""
    found = re.search(r'requires-python = ">=([0-9.]+)"', text(Path("pyproject.toml")))
    assert found is not None
    return found[1]


def test_ci_runs_what_everybody_runs() -> None:
    """A check that only CI knows is a check that nobody can reproduce."""
    code = [line for line in text(Path(".ci/run")).splitlines()[1:] if not line.startswith("#")]

    assert 2 == len(code)
    assert "scripts/test" in code[1]


def code_cells() -> list[tuple[Path, dict]]:
    return [
        (path, cell)
        for path in files()
        if path.suffix == ".ipynb"
        for cell in json.loads(text(path))["cells"]
        if cell["cell_type"] == "code"
    ]


def test_notebooks_are_committed_clean() -> None:
    """Outputs make every change unreadable, and show numbers of somebody's machine."""
    assert code_cells(), "there is no notebook"
    found = [
        f"{path}: {''.join(cell['source'])[:60]}"
        for path, cell in code_cells()
        if cell["outputs"] or cell["execution_count"] is not None
    ]

    assert [] == found


def test_notebooks_tell_and_do_not_compute() -> None:
    """A long definition in a notebook is code without tests."""
    for path, cell in code_cells():
        source = "".join(cell["source"])
        if source.lstrip().startswith(("%", "!")):
            continue
        code = compile(
            source, str(path), "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        )
        lengths = [
            node.end_lineno - node.lineno + 1
            for node in code.body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        ]
        assert sum(lengths) <= DEFINITION_LINES_MAX, source


def test_notebooks_use_public_names_only() -> None:
    """A copied cell would depend on names that may change without notice."""
    found = []
    for path, cell in code_cells():
        for node in ast.walk(ast.parse("".join(cell["source"]))):
            if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "tep":
                public = getattr(importlib.import_module(str(node.module)), "__all__", ())
                names = [f"{node.module}.{a.name}" for a in node.names if a.name not in public]
                found += [f"{path}: {name}" for name in names if not importlib.util.find_spec(name)]
            elif isinstance(node, ast.Attribute) and node.attr.startswith("_"):
                found.append(f"{path}: .{node.attr}")

    assert [] == found


def test_pins_are_exact_and_name_no_place() -> None:
    """A loose or located pin installs something else next month, or only here."""
    lines = [
        line for line in text(Path("constraints.txt")).splitlines() if line[:1] not in {"#", ""}
    ]

    assert [] == [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.+!]+", line)]


def test_everything_that_setup_installs_is_pinned() -> None:
    """A dependency without a pin makes two machines differ."""
    project = tomllib.loads(text(Path("pyproject.toml")))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["test"]]
    pinned = {_normal(line) for line in text(Path("constraints.txt")).splitlines()}

    assert set() == {_normal(line) for line in wanted} - pinned


def test_pins_install_on_every_python_that_is_promised() -> None:
    """Debian 12 has Python 3.11.2: a pin that wanted 3.11.5 ended scripts/setup there."""
    promised = tomllib.loads(text(Path("pyproject.toml")))["project"]["requires-python"]
    oldest = f"{promised.removeprefix('>=')}.0"
    pinned = {_normal(line) for line in text(Path("constraints.txt")).splitlines()}
    wants = {
        _normal(one.metadata["Name"]): one.metadata["Requires-Python"] or ""
        for one in importlib.metadata.distributions()
    }
    mine = {name: want for name, want in wants.items() if name in pinned}

    assert len(mine) > len(pinned) // 2, "run by the Python of .venv"
    assert {} == {k: want for k, want in mine.items() if oldest not in SpecifierSet(want)}


def _normal(requirement: str) -> str:
    name = re.match(r"[\w.-]*", requirement)
    assert name is not None
    return re.sub(r"[-_.]+", "-", name[0]).lower()


def test_the_package_ships_its_data() -> None:
    """Profiles and the typing marker are no Python files: the build forgets them unless told."""
    project = tomllib.loads(text(Path("pyproject.toml")))
    data = project["tool"]["setuptools"]["package-data"]["tep"]

    assert {"py.typed", "sim/profiles/*.toml"} <= set(data)
    assert Path("tep/py.typed") in files()
    packages = {path.parent for path in files() if path.suffix == ".py" and path.parts[0] == "tep"}
    without = {str(p) for p in packages if Path(p, "__init__.py") not in files()}
    assert set() == without, "a folder without __init__.py is left out of the wheel"


PAGES = {".py", ".md", ".toml", ".ipynb", ".cff", ""}


def test_the_distribution_has_one_name_everywhere() -> None:
    """On the package index `tep` is somebody else's: `pip install tep` runs a stranger's code."""
    project = tomllib.loads(text(Path("pyproject.toml")))["project"]
    extras = project["optional-dependencies"]

    assert DISTRIBUTION == project["name"]
    for path in files():
        if path.suffix not in PAGES or path.parts[0] == "tests":
            continue
        for what, name, asked in re.findall(
            r"(pip install[^\n]*?|[\"'`])\b(tep(?:-[\w-]+)?)\[([\w,]+)\]", text(path)
        ):
            assert DISTRIBUTION == name, f"{path}: {what}{name}[{asked}]"
            assert set(asked.split(",")) <= set(extras), f"{path}: {name}[{asked}]"
        assert not re.search(r"pip install +['\"]?tep(?![-\w.])", text(path)), path


def test_every_extra_is_needed_by_something() -> None:
    """An extra that nothing imports is a promise of something that is not there."""
    project = tomllib.loads(text(Path("pyproject.toml")))["project"]
    extras = project["optional-dependencies"]
    code = "\n".join(text(path) for path in files() if path.parts[0] == "tep")
    # Tensors come from whoever has torch; notebooks and pages are opened by a person.
    for extra in set(extras) - {"test", "all", "torch", "notebook", "docs"}:
        assert re.search(rf"""install\(["']{extra}["']\)|need\("[\w.]+", "{extra}",""", code), extra
    everything = re.fullmatch(rf"{DISTRIBUTION}\[([\w,]+)\]", extras["all"][0])
    assert everything is not None
    assert set(extras) - {"test", "all"} == set(everything[1].split(","))


def test_the_citation_is_of_this_version() -> None:
    """A cited version must be one that can be found."""
    page = text(Path("CITATION.cff"))

    assert re.search(rf"^version: {re.escape(tep.__version__)}$", page, re.MULTILINE)
    assert 'value: "arXiv:2510.27656"' in page
