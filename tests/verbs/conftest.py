"""The tests of this folder run beside RDMA devices: in the guest, or on a machine that has some.

Elsewhere they are not collected; tests/e2e/test_rxe_vm.py boots the guest and runs them there.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tep.backends.ffi.ibverbs import load
from tep.backends.verbs import survey
from tep.backends.verbs.device import Settings

DEVICES = sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))

collect_ignore_glob = [] if DEVICES else ["test_*.py"]


@pytest.fixture(scope="session")
def devices():
    """Names of eight usable RDMA devices; where there are fewer, some more than once."""
    usable = [seen.name for seen in survey(load(), Settings()) if seen.usable]
    if not usable:
        pytest.skip("no RDMA device here is usable; tep info says why")
    return (usable * 8)[:8]


@pytest.fixture(scope="session")
def soft_devices():
    """Names of the guest's software devices, whose network may be spoiled."""
    found = [name for name in DEVICES if name.startswith("rxe")]
    if len(found) < 8:
        pytest.skip("this spoils a network, and wants the guest's: scripts/rxe")
    return found
