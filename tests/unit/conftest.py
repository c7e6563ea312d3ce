"""Fixtures that several files of this folder share; no test lives here."""

from __future__ import annotations

import pytest

from tests.support.here import need_stub


@pytest.fixture
def stub():
    """The C stub of libibverbs, as new before and after."""
    found = need_stub()
    found.reset()
    yield found
    found.reset()
