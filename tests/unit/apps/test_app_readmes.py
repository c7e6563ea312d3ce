"""The programs on the apps' pages: what people paste has to run."""

from __future__ import annotations

import gc
import re
from pathlib import Path

import pytest

from tep import apps
from tep.compat import mooncake, nixl
from tep.integrations import weights

PAGES = sorted(Path(apps.__file__).parent.glob("*/README.md"))


def test_every_app_has_a_page():
    """A reader of a folder of thirty files needs one that says where to begin."""
    assert ["kvcache", "moe", "rl"] == [page.parent.name for page in PAGES]


@pytest.mark.parametrize(
    "page",
    [*PAGES, *(Path(one.__file__).with_name("README.md") for one in (weights, mooncake, nixl))],
    ids=lambda page: page.parent.name,
)
def test_the_programs_of_a_page_run(page, monkeypatch):
    """An example that does not run is the first thing that a newcomer meets."""
    monkeypatch.setenv("TEP_NIXL_BACKEND", "local")  # some set it themselves: it is unset again
    programs = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)

    assert programs
    for program in programs:
        exec(program, {})
    gc.collect()  # an engine that a program leaves open would be seen in the next tests
