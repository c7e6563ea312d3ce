"""The README's Python examples: the first is run as it stands, the second elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).resolve().parents[2] / "README.md"
TWO_RANKS = Path(__file__).parent / "two_ranks.py"


def examples() -> list[str]:
    """The Python blocks of the page, in order."""
    page = README.read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


def test_the_page_is_one_screen_and_its_links_lead_somewhere() -> None:
    """A front page that has to be scrolled for minutes is not read."""
    page = README.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#]+)\)", page)

    assert len(page.splitlines()) <= 120
    assert len(links) > 10
    assert [] == [link for link in links if not (README.parent / link).exists()]


def test_the_notebook_example_runs_and_moves_the_bytes() -> None:
    """It is the first program that a newcomer runs; a renamed argument must not break it there."""
    example = examples()[0]
    names: dict = {}
    exec(compile(example, str(README), "exec"), names)

    pages = (names["npages"], names["page_bytes"])
    moved = names["dst"].reshape(pages)[names["dst_idx"]]
    assert (names["src"].reshape(pages) == moved).all()


def test_the_two_process_example_is_the_program_that_is_tested() -> None:
    """A page that drifts from the program teaches what nobody has run."""
    program = TWO_RANKS.read_text(encoding="utf-8").split('"""\n', 1)[1]
    program = re.sub(r"  # no[q]a: .*", "", program)

    assert program.split() == examples()[1].split()
