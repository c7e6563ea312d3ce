"""COMING_FROM.md: its examples run, and every name of ours on it exists."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import tep

PAGE = Path(__file__).resolve().parents[2] / "COMING_FROM.md"
API = PAGE.parent / "tests" / "abi" / "nixl_api.json"
TEXT = PAGE.read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
HOLDERS = {
    "engine": tep.TransferEngine,
    "transfer": tep.Transfer,
    "watcher": tep.Watcher,
    "tep": tep,
}


@pytest.mark.parametrize("example", EXAMPLES, ids=["NIXL", "Mooncake", "fabric-lib"])
def test_the_examples_run(example) -> None:
    """A page for newcomers whose first program fails is their last."""
    exec(compile(example, str(PAGE), "exec"), {})


def test_every_call_of_nixl_is_there() -> None:
    """A reader who does not find a call there does not know whether tep has it."""
    api = json.loads(API.read_text(encoding="utf-8"))
    calls = [name for name in api["classes"]["nixl_agent"] if not name.startswith("_")]
    assert len(calls) > 30
    assert [] == [name for name in calls if not re.search(rf"`[^`]*\b{name}\b", TEXT)]


def test_every_name_of_ours_exists() -> None:
    """A table of calls that were renamed sends people to look for them."""
    names = set(re.findall(r"\b(engine|transfer|watcher|tep)\.([A-Za-z]\w*)", TEXT))
    assert len(names) > 25
    arguments = {"ptr"}
    gone = [
        f"{holder}.{name}"
        for holder, name in names
        if name not in arguments and not hasattr(HOLDERS[holder], name)
    ]
    assert [] == gone
