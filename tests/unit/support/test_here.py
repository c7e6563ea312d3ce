"""Every optional tool that scripts/setup installs must be found; see support/here.py.

Otherwise a library that is no longer found would skip all its tests, and the run would pass.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from pathlib import Path

import pytest

from tep.backends import libfabric
from tests.support.verbs_stub import build

HAS_WHEEL = sys.platform == "linux" and platform.machine() in {"x86_64", "aarch64"}
GETS_PACKAGES = bool(os.environ.get("CI")) and os.geteuid() == 0


@pytest.mark.skipif(not HAS_WHEEL, reason="no wheel with libfabric is made for this system")
def test_libfabric_is_found() -> None:
    """Its wheel comes with the tests' own requirements: none of its tests may be skipped."""
    for domain in libfabric.open_domains(provider="tcp").domains:
        domain.close()


@pytest.mark.skipif(not GETS_PACKAGES, reason="setup installs Debian packages in CI only, as root")
def test_ci_has_a_compiler_and_the_headers() -> None:
    """The layouts of both libraries and all of the verbs backend are tested with these."""
    build()

    assert shutil.which("cc")
    assert Path("/usr/include/rdma/fabric.h").exists()
