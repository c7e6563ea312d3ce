"""No garbage collection during these tests; no test lives here."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def _uncollected() -> Iterator[None]:
    """Millions of nodes of syntax trees, none of them garbage, would be passed over many times."""
    gc.disable()
    yield
    gc.enable()
