"""Ten classic mistakes: the shipped tools find each one, and the page shows them as they stand."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from tep.testing import Violation, hunt, shrink, story
from tep.testing.hunting import load_protocol

ROOT = Path(__file__).parents[3]
FILE = ROOT / "tests/example/mistakes.py"
MISTAKES = {
    protocol.__name__: (protocol, faults)
    for protocol, faults in load_protocol(f"{FILE}:order_assumed")
    .__globals__["FOUND_UNDER"]
    .items()
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MISTAKES)
def test_each_mistake_is_found(name: str) -> None:
    """A kind of mistake that 1,000 examples do not show would be one that users ship."""
    protocol, faults = MISTAKES[name]
    nodes = 3 if name == "two_writers" else 2
    with pytest.raises(Violation) as found:
        hunt(protocol, runs=1000, nodes=nodes, faults=faults)
    told = story(shrink(found.value)).splitlines()

    assert len(told) <= 30
    assert any(line.startswith(("row ", "drawn: ")) for line in told)


@pytest.mark.parametrize("name", MISTAKES)
def test_the_page_shows_each_mistake_as_it_stands(name: str) -> None:
    """A program on the page that differs from the one that is hunted shows nothing."""
    page = (ROOT / "docs/howto/mistakes.md").read_text(encoding="utf-8")
    protocol, faults = MISTAKES[name]

    assert inspect.getsource(protocol).strip() in page
    assert f"mistakes.py:{name} --faults {faults}" in page
