"""The optional tools of a machine: without one its tests are skipped, with a reason. Not a test.

Only a missing tool ends in a skip; any other fault is an error.
"""

from __future__ import annotations

import os

import pytest

from tep.backends import libfabric
from tep.backends.ffi.libfabric import Libfabric, load
from tep.base.errors import BackendUnavailable
from tests.support import fake_cuda, fake_efa
from tests.support.verbs_stub import Stub, build
from tests.support.vm import kernel

__all__ = [
    "need_fake_cuda", "need_fake_efa", "need_guest", "need_libfabric", "need_stub", "require",
]  # fmt: skip


def need_libfabric() -> Libfabric:
    """The library, whatever its providers; skip where there is none."""
    try:
        libfabric.probe()
    except BackendUnavailable as error:
        pytest.skip(f"not here: {error}")
    return load()


def require(provider: str) -> None:
    """Skip where there is no libfabric, or none with this provider."""
    try:
        for domain in libfabric.open_domains(provider=provider).domains:
            domain.close()
    except BackendUnavailable as error:
        pytest.skip(f"not here: {error}")


def need_stub() -> Stub:
    """The stub provider of the verbs backend; skip where it cannot be built."""
    try:
        return build()
    except LookupError as error:
        pytest.skip(f"not here: {error}")


def need_fake_cuda(major: int = 13) -> dict[str, str]:
    """The variables of a process on the fake driver; skip where it cannot be built."""
    try:
        return fake_cuda.environment(major=major)
    except fake_cuda.NoCompiler as error:
        pytest.skip(f"not here: {error}")


def need_fake_efa() -> None:
    """Skip where the fake EFA device cannot be built, or no wheel has a provider for it."""
    need_libfabric()
    try:
        fake_efa.build()
    except fake_efa.NoCompiler as error:
        pytest.skip(f"not here: {error}")


def need_guest() -> None:
    """Skip where no guest can be had; CI gets what is missing, and must have one."""
    try:
        if os.environ.get("CI"):
            kernel.install()
        if missing := kernel.missing_tools():
            pytest.skip(f"not installed: {', '.join(missing)}; scripts/rxe --install gets them")
        kernel.fetch(kernel.cache_folder() / "kernel")
    except kernel.GuestError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
