"""Fixtures that several gates share; no test lives here."""

from __future__ import annotations

import logging

import pytest


@pytest.fixture
def quiet() -> object:
    """Keep exceptions of a broken engine's callbacks out of the log; its gate finds them."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
