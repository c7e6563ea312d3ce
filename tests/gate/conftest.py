"""Fixtures that several gates share; no test lives here."""

from __future__ import annotations

import logging

import pytest


@pytest.fixture
def quiet() -> object:
    """What callbacks of a broken engine raise is found by its gate; the log would drown in it."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
