"""Write docs/reference/cli.md from the command line itself: `scripts/docs commands`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from tep.cli import app

__all__ = ["page"]


def commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield every command with its whole name; a group that does something itself is one, too."""
    subs = getattr(command, "commands", {})
    if not subs or command.invoke_without_command:
        yield name, command
    for sub, found in subs.items():
        yield from commands(found, f"{name} {sub}")


def page() -> str:
    """Return the page."""
    lines = [
        "# The command line",
        "",
        "Every command takes `--json`, and then prints one JSON document and nothing else.",
        "`tep COMMAND --help` says the same as this page.",
        "`tep --install-completion` brings completion to your shell.",
    ]
    for name, command in commands(typer.main.get_command(app), "tep"):
        lines += ["", f"## {name}", "", " ".join((command.help or "").split()), ""]
        rows = [
            f"| `{', '.join([*one.opts, *one.secondary_opts])}` | {_help(one)} |"
            for one in command.params
            if one.name != "help" and getattr(one, "help", None)
        ]
        lines += ["| option | |", "|---|---|", *rows] if rows else []
    return "\n".join(lines) + "\n"


def _help(option: object) -> str:
    return " ".join(str(getattr(option, "help", "")).split()).replace("|", "\\|")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, default=Path("docs/reference/cli.md"))
    parser.parse_args().file.write_text(page(), "utf-8")
