"""One function a backend, with its options written out, so that editors and mypy know them.

`TransferEngine.open(backend, ...)` takes the same by name. What each option means is said by the
backend's own `open_domains`; tests/unit/test_opening.py compares the signatures.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tep.api import EngineOptions
from tep.engine.verbs import TransferEngine

if TYPE_CHECKING:
    from tep.backends.loopback import Hub
    from tep.drivers import Driver
    from tep.memory import DmabufExport

__all__ = ["open_libfabric", "open_local", "open_loopback", "open_verbs"]

_DEFAULTS = EngineOptions()


def open_libfabric(
    *,
    device: str | None = None,
    driver: Driver | None = None,
    options: EngineOptions = _DEFAULTS,
    provider: str = "tcp",
    nics: Sequence[str] | int | None = None,
    name: str | None = None,
    epoch: int | None = None,
    peer_timeout_s: float = 5.0,
    delivery_complete: bool | None = None,
    window_rows: int | None = None,
    window_bytes: int | None = None,
    cuda: bool = False,
    dmabuf: DmabufExport | None = None,
    same_host_shm: bool = False,
    sleeps: bool = True,
) -> TransferEngine:
    """Open an engine over libfabric: AWS EFA, or tcp and shared memory on any Linux machine.

    device, driver and options are those of `TransferEngine.open`; the others are what
    `tep.backends.libfabric.open_domains` says.

    Raises:
        UsageError: an impossible value.
        BackendUnavailable: it cannot run here; says what was tried, and what would bring it.
    """
    return TransferEngine.open("libfabric", **locals())


def open_local(
    nics: int = 1,
    *,
    device: str | None = None,
    driver: Driver | None = None,
    options: EngineOptions = _DEFAULTS,
    name: str | None = None,
    sq_depth: int = 4096,
    allow_tracer: bool = True,
    spin_s: float | None = None,
    copy_threads: int = 1,
) -> TransferEngine:
    """Open an engine that reaches processes of this host, memory to memory.

    device, driver and options are those of `TransferEngine.open`; the others are what
    `tep.backends.local.open_domains` says.

    Raises:
        UsageError: an impossible value.
        BackendUnavailable: it cannot run here; says what was tried, and what would bring it.
    """
    return TransferEngine.open("local", **locals())


def open_loopback(
    nics: int = 1,
    *,
    device: str | None = None,
    driver: Driver | None = None,
    options: EngineOptions = _DEFAULTS,
    hub: Hub | None = None,
    seed: int | None = 0,
    name: str | None = None,
    sq_depth: int = 1024,
    reads: int = 128,
    link_bps: int = 0,
    max_write_bytes: int = 1099511627776,
    max_msg_bytes: int = 1048576,
) -> TransferEngine:
    """Open an engine that reaches the others of this process, memory to memory.

    device, driver and options are those of `TransferEngine.open`; the others are what
    `tep.backends.loopback.open_domains` says.

    Raises:
        UsageError: an impossible value.
        BackendUnavailable: it cannot run here; says what was tried, and what would bring it.
    """
    return TransferEngine.open("loopback", **locals())


def open_verbs(
    nics: int | str | Sequence[str] | None = None,
    *,
    device: str | None = None,
    driver: Driver | None = None,
    options: EngineOptions = _DEFAULTS,
    name: str | None = None,
    epoch: int | None = None,
    library: str | None = None,
    dmabuf_export: DmabufExport | None = None,
    port: int = 1,
    pkey: int | None = None,
    gid_index: int | None = None,
    sq_depth: int | None = None,
    reads: int | None = None,
    signal_rows: int = 256,
    imm_recvs: int | None = None,
    msg_recvs_max: int | None = None,
    inline_bytes: int = 28,
    max_msg_bytes: int = 1048576,
    qps_per_peer: int = 1,
    spray_seed: int | None = None,
    timeout: int = 14,
    retry_cnt: int = 6,
    rnr_retry: int = 7,
    min_rnr_timer: int = 12,
    handshake_s: float = 3.0,
    resend_s: float = 0.02,
    drain_s: float = 1.0,
    relaxed_ordering: bool = True,
    ece: bool = True,
    traffic_class: int = 0,
    service_level: int = 0,
) -> TransferEngine:
    """Open an engine over RDMA NICs, through libibverbs: ConnectX, or Soft-RoCE.

    device, driver and options are those of `TransferEngine.open`; the others are what
    `tep.backends.verbs.open_domains` says.

    Raises:
        UsageError: an impossible value.
        BackendUnavailable: it cannot run here; says what was tried, and what would bring it.
    """
    return TransferEngine.open("verbs", **locals())
