"""The documentation: its programs run, its commands parse, its names exist, and it builds."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from functools import cache, partial
from pathlib import Path

import pytest
import typer

import tep
from tep.cli import app
from tep.host import sight
from tests.support.children import wait_until
from tests.support.here import need_fake_cuda, need_fake_efa, need_guest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
FENCE = re.compile(r"^``` ?(?P<head>[^\n]*)\n(?P<body>.*?)^```", re.MULTILINE | re.DOTALL)
TWO_RANKS = Path(__file__).parent / "two_ranks.py"
OTHERS = {"torchrun", "srun", "ray", "export", "wait"}
"""Programs in shell lines that are not ours."""


def blocks(page: Path) -> list[tuple[str, str]]:
    """The fenced blocks of a page: what stands behind the fence, and the lines."""
    return [(m["head"], m["body"]) for m in FENCE.finditer(page.read_text(encoding="utf-8"))]


def shell_lines() -> list[tuple[str, str]]:
    """(page, command) for each command of each shell block; `&` and `;` separate commands."""
    found = []
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES]:
        for head, body in blocks(page):
            if "bash" in head:
                parts = re.split(r"\n|;|(?<!&)&(?!&)", re.sub(r"\s+#.*", "", body))
                found += [(page.name, part.strip()) for part in parts if part.strip()]
    return found


NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


def words_of(line: str) -> list[str]:
    """The words of a line, with a sign for each number; `...` stands for the rest."""
    return NUMBER.sub("#", line.partition("...")[0]).split()


def check_output(shown: str, printed: str, *, simulated: bool) -> None:
    """Compare what a page shows with what was printed: words, and numbers if they are simulated.

    A line of `...` stands for any lines.
    """
    lines = iter(printed.splitlines())
    skip = False
    for wanted in shown.splitlines():
        if wanted.strip() == "...":
            skip = True
            continue
        words = words_of(wanted)
        size = len(words) if "..." in wanted else None
        found = next((one for one in lines if not skip or words_of(one)[:size] == words), "")
        assert words == words_of(found)[:size], f"{wanted!r} is not in:\n{printed}"
        if simulated:
            pairs = zip(NUMBER.findall(wanted), NUMBER.findall(found), strict=True)
            for one, other in pairs:
                assert float(one.replace(",", "")) == pytest.approx(
                    float(other.replace(",", "")), rel=0.01
                ), f"{wanted!r}: {found!r}"
        skip = False


FAKES = {"scripts/fake_cuda": need_fake_cuda, "scripts/fake_efa": need_fake_efa}
TEP = [sys.executable, "-c", "import sys; from tep.cli import main; sys.exit(main())"]


def run_commands(body: str) -> str:
    """Run the commands of a block as a reader does, with this Python in place of .venv's."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    printed = ""
    for line in body.splitlines():
        words = shlex.split(line)
        if words[0] in FAKES:
            FAKES[words[0]]()
            words[:1] = [sys.executable, "-m", f"tests.support.{words[0].removeprefix('scripts/')}"]
        if words[0] == "scripts/rxe":
            words[:1] = [sys.executable, "-m", "tests.support.vm"]
        words += ["verbs"] if words[-1] == "scripts/cx7_smoke" else []
        for k, word in enumerate(words):
            if word.startswith("scripts/"):
                known = {"cx7_smoke": "verify_efa", "verify_efa": "verify_efa"}
                name = word.removeprefix("scripts/")
                words[k : k + 1] = [sys.executable, f"{ROOT}/scripts/{known.get(name, name)}.py"]
                break
        if words[0] == ".venv/bin/python":
            words[0] = sys.executable
        for k, word in enumerate(words):
            if word in {"tep", ".venv/bin/tep"}:
                words[k : k + 1] = TEP
                break
        done = subprocess.run(
            words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=700, check=False
        )
        assert 0 == done.returncode, f"{line}:\n{done.stdout}{done.stderr}"
        printed += done.stdout
    return printed


def runs(page: Path) -> bool:
    """Whether something on a page can be run."""
    return any(head[:6] == "python" or ".run" in head for head, _ in blocks(page))


@pytest.mark.parametrize("page", [*filter(runs, PAGES)], ids=lambda page: page.stem)
def test_the_programs_of_a_page_run(page: Path) -> None:
    """A reader copies them in order; what needs an instance or a file of theirs must compile."""
    names: dict = {}
    printed, simulated = "", False
    for head, body in blocks(page):
        if head == "text" or ".measured" in head:
            if printed:
                check_output(body, printed, simulated=simulated and head == "text")
            printed = ""
        elif "title=" in head:
            program = re.sub(
                r"  # no[q]a: .*", "", TWO_RANKS.read_text("utf-8").split('"""\n', 1)[1]
            )
            assert program.split() == body.split()
        elif head.startswith("python"):
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile(body, str(page), "exec"), names)
            printed, simulated = out.getvalue(), True
        elif ".run" in head:
            printed, simulated = run_commands(body), False
        elif ".python" in head:
            compile(body, str(page), "exec")
            printed = ""


@pytest.mark.long  # a minute: two emulated machines, one after the other
@pytest.mark.timeout(1500)
def test_the_commands_of_the_page_on_soft_roce_run_in_the_guest() -> None:
    """Whoever has no NIC meets the real libibverbs by these commands first."""
    need_guest()
    (_, commands), (_, shown), *_ = blocks(DOCS / "howto" / "soft-roce.md")
    printed = run_commands(commands)

    assert "rxe0" in printed
    assert "rxe1" in printed
    check_output(f"...\n{shown}", printed, simulated=False)


def test_the_commands_of_the_page_on_sight_show_a_program_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever reads the page has such a program now; its commands and what they print are true."""
    monkeypatch.setenv(sight.SWITCH, str(tmp_path / "sight"))
    env = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    found = blocks(DOCS / "howto" / "sight.md")
    program = tmp_path / "stuck.py"
    program.write_text(*(body for head, body in found if ".stuck" in head), encoding="utf-8")
    ready = "0 of 3 arrived"
    ran, printed = [], ""
    with subprocess.Popen([sys.executable, program], env=env) as stuck:
        try:
            wait_until(
                lambda: any(ready in str(sight.ask(one)) for one in sight.find(stuck.pid)),
                "a program that waits for immediates",
            )
            for head, body in found:
                if "bash" in head:
                    printed = ""
                    for line in body.splitlines():
                        words = line.replace("12345", str(stuck.pid)).split()[1:]
                        ran.append(words[0])
                        done = subprocess.run(
                            [*TEP, *words], env=env, capture_output=True, text=True, timeout=240,
                            check=False,
                        )  # fmt: skip
                        assert 0 == done.returncode, done.stderr
                        assert ready in done.stdout
                        printed += done.stdout
                elif ".measured" in head and ready in body:
                    check_output(body, printed, simulated=False)
        finally:
            stuck.kill()

    assert ["stall", "stall"] == ran


@cache
def help_of(program: str) -> str:
    """Return the help of one of our scripts."""
    folder, path = ROOT / "scripts", ROOT / program
    python = folder / f"{path.name}.py"
    command = [sys.executable, str(python), "--help"] if python.exists() else [str(path), "--help"]
    if not python.exists():
        return path.read_text(encoding="utf-8")
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


commands = cache(partial(typer.main.get_command, app))


def check_tep(words: list[str]) -> None:
    """Follow the words of a `tep` command through its commands and options."""
    command = commands()
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


def test_the_page_of_the_command_line_is_what_the_commands_say() -> None:
    """An option that no page has is found by nobody."""
    script = ROOT / "scripts" / "command_reference.py"
    page = runpy.run_path(str(script))["page"]()

    assert page == (DOCS / "reference" / "cli.md").read_text("utf-8"), "scripts/docs commands"


def test_every_variable_has_its_line() -> None:
    """A variable that is read and named nowhere is a surprise."""
    read = {
        name
        for path in (ROOT / "tep").rglob("*.py")
        for name in re.findall(r'"((?:TEP|NCCL)_[A-Z_]+)"', path.read_text("utf-8"))
    }
    page = (DOCS / "reference" / "environment.md").read_text("utf-8")

    assert {"TEP_TOKEN", "NCCL_IB_HCA"} <= read
    assert [] == [name for name in sorted(read) if f"`{name}" not in page]


def test_the_pictures_are_what_the_script_draws(tmp_path: Path) -> None:
    """A picture without its program cannot be mended; notebooks draw theirs in their own test."""
    script = runpy.run_path(str(ROOT / "scripts" / "draw_figures.py"))
    script["draw"](tmp_path, script["NOTEBOOKS"] if os.environ.get("TEP_LONG") else {})
    drawn = {file.name for file in tmp_path.glob("*.svg")}
    drawn |= {f"{name}.svg" for wanted in script["NOTEBOOKS"].values() for name in wanted}

    assert drawn == {file.name for file in (DOCS / "img").glob("*.svg")}
    shown = set(re.findall(r"img/(\w+\.svg)", "\n".join(p.read_text() for p in PAGES)))
    assert drawn == shown
