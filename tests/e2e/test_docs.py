"""The documentation: its programs run, its commands parse, its names exist, and it builds."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import typer

import tep
from tep.cli import app

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
FENCE = re.compile(r"^``` ?(?P<head>[^\n]*)\n(?P<body>.*?)^```", re.MULTILINE | re.DOTALL)
TWO_RANKS = Path(__file__).parent / "two_ranks.py"
OTHERS = {"torchrun", "srun", "ray", "export", "wait", "ibv_devinfo"}
"""Programs in shell lines that are not ours."""


def blocks(page: Path) -> list[tuple[str, str]]:
    """The fenced blocks of a page: what stands behind the fence, and the lines."""
    return [(m["head"], m["body"]) for m in FENCE.finditer(page.read_text(encoding="utf-8"))]


def shell_lines() -> list[tuple[str, str]]:
    """(page, command) for each command of each shell block; `&` and `;` separate commands."""
    found = []
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES]:
        for head, body in blocks(page):
            if head.startswith("bash"):
                parts = re.split(r"\n|;|(?<!&)&(?!&)", re.sub(r"\s+#.*", "", body))
                found += [(page.name, part.strip()) for part in parts if part.strip()]
    return found


@pytest.mark.parametrize("page", [p for p in PAGES if any(h[:6] == "python" for h, _ in blocks(p))],
                         ids=lambda page: page.stem)  # fmt: skip
def test_the_programs_of_a_page_run(page: Path) -> None:
    """A reader copies them in order; what needs an instance or a file of theirs must compile."""
    names: dict = {}
    for head, body in blocks(page):
        if "title=" in head:
            program = re.sub(
                r"  # no[q]a: .*", "", TWO_RANKS.read_text("utf-8").split('"""\n', 1)[1]
            )
            assert program.split() == body.split()
        elif head.startswith("python"):
            exec(compile(body, str(page), "exec"), names)
        elif ".python" in head:
            compile(body, str(page), "exec")


@cache
def help_of(program: str) -> str:
    """Return the help of one of our scripts."""
    folder, path = ROOT / "scripts", ROOT / program
    python = folder / f"{path.name}.py"
    command = [sys.executable, str(python), "--help"] if python.exists() else [str(path), "--help"]
    if not python.exists():
        return path.read_text(encoding="utf-8")
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def check_tep(words: list[str]) -> None:
    """Follow the words of a `tep` command through its commands and options."""
    command = typer.main.get_command(app)
    rest = list(words)
    while rest and not rest[0].startswith("-") and hasattr(command, "commands"):
        assert rest[0] in command.commands, f"no such command: {words}"
        command = command.commands[rest.pop(0)]
    known = {name for param in command.params for name in [*param.opts, *param.secondary_opts]}
    known |= {"--help"}
    for word in rest:
        flag = word.split("=")[0]
        assert not flag.startswith("-") or flag in known, f"{flag} is no option of tep {words}"


@pytest.mark.parametrize(("page", "line"), shell_lines())
def test_every_command_parses(page: str, line: str) -> None:
    """A flag that was renamed makes the page a liar."""
    words = shlex.split(line)
    words = [word for k, word in enumerate(words) if k or "=" not in word] or words
    while words and "=" in words[0]:
        words.pop(0)
    programs = [
        k for k, word in enumerate(words) if "scripts/" in word or word.endswith(("/tep", "tep"))
    ]
    if not programs:
        assert (
            words == [] or words[0] in OTHERS or words[0].endswith(("python", "pip", "pytest"))
        ), line
        return
    first, last = programs[0], programs[-1]
    assert all(word in OTHERS or first == 0 for word in words[:1]), f"{page}: {line}"
    program, options = words[last], words[last + 1 :]
    if program.endswith("tep"):
        check_tep(options)
        return
    assert (ROOT / program).exists(), f"{page}: {program} is not there"
    for word in options:
        if word.startswith("--"):
            assert word.split("=")[0] in help_of(program), f"{page}: {line}"


def test_every_public_name_has_its_place_and_its_words() -> None:
    """Nobody finds a name that no page lists."""
    listed = set(
        re.findall(r"^::: tep\.(\w+)$", "\n".join(p.read_text() for p in PAGES), re.MULTILINE)
    )
    expected = set(tep.__all__) - {"__version__", "apps", "cuda", "rendezvous", "sim", "testing"}

    assert set() == expected - listed
    assert [] == [name for name in expected if not getattr(tep, name).__doc__]


def test_it_builds_without_a_warning(tmp_path: Path) -> None:
    """Dead links, missing pictures and unknown names end the build."""
    for name in ("docs", "mkdocs.yml"):
        source = ROOT / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / name)
    for name in re.findall(
        r'^--8<-- "([^":]+)', "\n".join(p.read_text() for p in PAGES), re.MULTILINE
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    done = subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--strict", "--clean"],
        cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    page = (tmp_path / "site" / "reference" / "engine" / "index.html").read_text("utf-8")
    assert "submit_paged_writes" in page
    assert (tmp_path / "site" / "img" / "counting.svg").exists()
    assert "fonts.googleapis.com" not in page, "a page loads nothing from elsewhere"
    index = json.loads((tmp_path / "site" / "search.json").read_text("utf-8"))
    found = {item["location"].partition("#")[0].rstrip("/") for item in index["items"]}
    paths = {str(p.relative_to(DOCS).with_suffix("")) for p in PAGES}
    assert paths - {"index"} | {""} == found, "the search knows each page, and no other"


def test_the_pictures_are_what_the_script_draws(tmp_path: Path) -> None:
    """A picture without its program cannot be mended."""
    subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "draw_figures.py"), str(tmp_path)],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    drawn = {file.name for file in tmp_path.glob("*.svg")}

    assert drawn == {file.name for file in (DOCS / "img").glob("*.svg")}
    shown = set(re.findall(r"img/(\w+\.svg)", "\n".join(p.read_text() for p in PAGES)))
    assert drawn == shown
