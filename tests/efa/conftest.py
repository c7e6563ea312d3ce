"""Most tests of this folder run on fake EFA NICs: tests/e2e/test_fake_efa.py starts them there.

By hand: scripts/fake_efa --nics 8 -- python -m pytest tests/efa. Elsewhere only the tests of the
device itself are collected.
"""

from __future__ import annotations

import os

ON_FAKE = ["test_contract.py", "test_processes.py", "test_direct.py"]

collect_ignore_glob = [] if "TEP_FAKE_EFA" in os.environ else ON_FAKE

# Each worker of pytest-xdist is a host of its own, so that none takes the other's addresses.
if worker := os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw"):
    os.environ["TEP_FAKE_EFA_HOST"] = str(int(worker) % 8)
