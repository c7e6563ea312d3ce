"""The tests of this folder run on the fake driver: tests/abi/test_cuda_python.py starts them there.

By hand: scripts/fake_cuda -- python -m pytest tests/cuda.
"""

from __future__ import annotations

import gc
import os

import pytest

from tep.host.cuda import driver
from tests.support.fake_cuda import Fake

collect_ignore_glob = [] if "TEP_FAKE_CUDA" in os.environ else ["test_*.py"]


@pytest.fixture
def fake():
    """Two GPUs that are Hoppers in what they say of themselves, and a log that begins here."""
    gc.collect()  # what earlier tests left is given back before anything is counted
    driver.cache_clear()
    yield Fake()
    driver.cache_clear()


@pytest.fixture
def cuda(fake):
    """The driver as tep calls it."""
    return driver()
