"""The README's Python example, run as it stands."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).resolve().parents[2] / "README.md"


def test_the_notebook_example_runs_and_moves_the_bytes() -> None:
    """It is the first program that a newcomer runs; a renamed argument must not break it there."""
    page = README.read_text(encoding="utf-8")
    [example] = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    names: dict = {}
    exec(compile(example, str(README), "exec"), names)

    pages = (names["npages"], names["page_bytes"])
    moved = names["dst"].reshape(pages)[names["dst_idx"]]
    assert (names["src"].reshape(pages)[names["src_idx"]] == moved).all()
