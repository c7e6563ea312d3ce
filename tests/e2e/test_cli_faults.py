"""The command line with mistakes that people make: flag, value and remedy, and no traceback."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from tep.cli import main, show

MISTAKES = {
    # command: what the error has to name
    "rl plan --guessed 0": ("--guessed", ": 0; a factor of 1 or more"),
    "rl plan --profile abc": ("profile 'abc'", "cx7_400", "a path"),
    "rl plan --train 10 --pp 3": ("10 training ranks", "'pp': 3"),
    "rl plan --watermark-gib -1": ("--watermark-gib",),
    "rl plan --output /no/where/table": ("--output", "there is no folder /no/where", "make it"),
    "rl run --weights nofile --model kimi-k2": ("--weights", "'nofile' does not exist"),
    "new protocol /proc/no": ("tep new", "/proc/no", "name another folder"),
    "sim --seed 7": ("--protocol FILE.py:NAME", "python -m tests.world SEED"),
    "sim --protocol x.py:y --nics banana": ("--nics", "'banana'", "LEAST-MOST"),
    "sim --protocol x.py:y --nics 4-1": ("--nics", "'4-1'", "LEAST-MOST"),
    "sim --protocol nofile.py:y": ("--protocol 'nofile.py:y'", "a file that exists"),
    "sim sweep math:hypot x=1 --processes 2 --ray auto": ("--processes", "no effect with --ray"),
    "sim fit nofile": ("results", "'nofile' does not exist"),
    "kvcache --fabric tcp --tp 3": ("--tp", "4 heads", "1, 2 and 4 can"),
    "kvcache --fabric local --rate -1": ("--rate",),
    "kvcache --fabric local --rate 1": ("--rate", "no effect with --fabric local"),
    "kvcache --fabric chaos --tp 7": ("--tp", "no effect with --fabric chaos"),
    "kvcache --fabric timing --prompts 3": ("--prompts", "no effect with --fabric timing"),
    "kvcache --fabric timing --tokens 999999999": ("--tokens", "999,999,999", "at most"),
    "kvcache --fabric timing --seconds 0.01": ("--seconds 0.01", "--rate 0.8", "raise either"),
    "kvcache --fabric timing --profile abc": ("profile 'abc'", "cx7_400"),
    "kvcache ttft -- -5": ("-5",),
    "moe --check 1 --ep 4": ("--ep", "no effect with --check"),
    "moe --nic abc": ("'abc'", "cx7_400"),
    "moe --slow-nic 0.5": ("--slow-nic",),
    "demo --file /nofile": ("--file /nofile", "No such file"),
    "doctor --machine /nofile": ("--machine", "'/nofile' does not exist"),
    "doctor --bundle /no/where/x": ("--bundle", "there is no folder /no/where"),
    "info --machine /nofile": ("--machine", "'/nofile' does not exist"),
    "reproduce banana": ("'banana'", "p2p"),
}


@pytest.mark.parametrize("command", MISTAKES)
def test_a_mistake_is_named_with_its_value(command, capsys, tmp_path, monkeypatch) -> None:
    """A traceback tells a user that tep is broken; silence tells them that all is well."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")
    status = main(command.split())
    said = capsys.readouterr()

    assert status in {1, 2}
    for words in MISTAKES[command]:
        assert words in said.err
    assert "VIOLATION" not in said.err
    assert [] == list(tmp_path.iterdir())


def test_no_command_leaves_a_file_behind(tmp_path) -> None:
    """Four traces of a megabyte in the working directory are four surprises."""
    code = "import sys; from tep.cli import main; sys.exit(main())"
    (tmp_path / "some.bin").write_bytes(bytes(10_000))
    pull = Path(__file__).parents[1] / "example" / "puller.py"
    sim = f"sim --protocol {pull}:pull --faults order --seed 3"
    for command in ("demo --file some.bin --page-bytes 4096", sim, "moe --ep 4"):
        done = subprocess.run(
            [sys.executable, "-c", code, *command.split()],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert 0 == done.returncode, done.stdout + done.stderr

    assert ["some.bin"] == [path.name for path in tmp_path.iterdir()]


ROWS = [
    {"name": "one", "us": "1.5", "size": "4 KiB", "why": "", "mixed": "7"},
    {"name": "twenty-two", "us": "100.25", "size": "64 KiB", "why": "a" * 300, "mixed": "n/a"},
]


def test_numbers_stand_to_the_right_and_words_to_the_left_and_a_pipe_gets_whole_lines(
    capsys,
) -> None:
    """Text that is set to the right cannot be read, and folded lines cannot be searched."""
    show.print_table("A title that is longer than nothing", list(ROWS[0]), ROWS)
    title, head, rule, *rows = capsys.readouterr().out.splitlines()

    assert "A title that is longer than nothing" == title
    assert 2 == len(rows)
    assert rows[0].startswith("one ")
    assert "a" * 300 in rows[1]
    for name in ("us", "size"):
        end = head.index(name) + len(name)
        assert all(row[end - 1] != " " and row[end] == " " for row in rows), name
    start = head.index("mixed")
    assert all(row[start] != " " for row in rows[1:])
    assert all(line == line.rstrip() for line in (head, rule, *rows))


def test_a_ci_log_shows_every_remedy(capsys, monkeypatch) -> None:
    """In a pipe the doctor's lines were a thousand columns long, with the remedy at their end."""
    monkeypatch.delenv("COLUMNS", raising=False)
    main(["doctor", "--no-try"])
    main(["info"])
    lines = capsys.readouterr().out.splitlines()

    assert [] == [line for line in lines if len(line) > 100]
    assert "what mends it: " in "\n".join(lines)
    assert not any(set(line) & set("│┃━─") for line in lines)


def test_a_terminal_folds_long_text(monkeypatch, capsys) -> None:
    """A table wider than the window is none."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(
        "rich.console.Console",
        lambda **_: Console(width=72, file=sys.stdout, color_system=None, no_color=True),
    )
    show.print_table("t", list(ROWS[0]), ROWS)

    lines = re.sub(r"\x1b\[\d+m", "", capsys.readouterr().out).splitlines()
    assert max(map(len, lines)) <= 72


def test_the_child_of_a_command_ends_without_a_traceback(tmp_path) -> None:
    """An error of a worker process is printed once, in its parent's words and its own."""
    from tep.apps.rl.job import main as worker

    assert callable(worker)
    code = "import sys; from tep.cli import main; sys.exit(main())"
    args = ["rl", "run", "--weights", "w.safetensors", "--model", "kimi-k2"]
    (tmp_path / "w.safetensors").write_bytes(b"no weights at all")
    done = subprocess.run(
        [sys.executable, "-c", code, *args],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert 1 == done.returncode
    assert "Traceback" not in done.stderr
    assert Path("w.safetensors").name in done.stderr
