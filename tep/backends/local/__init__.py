"""The local backend: processes of one host, memory to memory, without any library or NIC.

Bytes move by process_vm_writev and process_vm_readv (a lone short row through the peer's
/proc/PID/mem), or by plain copies into memory of alloc_shared() and out of it; immediates and
messages through rings in shared memory; a sleeping peer is woken by an eventfd. The rooms:
`address`, `channel` (the socket), `memory` and `rings` (what is shared, and in which order it is
written), `copying`, `crew`, `outbound`, `sender`, `reads` and `letters`, `control`, `port`,
`watches`, `domain`. Here a backend's two functions.

Whom a NIC trusts. Any user of the host can connect: without the address's token it is one of at
most 64 callers, each for a second. Who has the token can write to what is registered as a target,
and read what is readable, if the kernel lets it touch this process; memory of alloc_shared() is
handed out by the same rule (the same user, or root). A process id that is used again gets no byte,
and gives none: /proc/PID/mem stays with the memory it was opened on, and each copy by id begins at
an address that only the right process has mapped (`memory.Witness`); what remains is the chance,
below one in a billion, that another process has mapped that address. A peer with the token can
spoil its own words and the port's: that ends its connection, or the others', and never the engine.

Nothing of it has a name in the file system: what a killed process held, the kernel frees. Several
NICs of one engine are parallel lanes and no faster: one thread at a time copies for all of them.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import socket
import sys
from pathlib import Path
from typing import Final

import numpy as np

from tep.backends.base import CallersTurn, DomainCaps, Opened
from tep.backends.local.address import Address, host_digest, process_start
from tep.backends.local.control import CONTROL_BYTES_MAX
from tep.backends.local.copying import can_reach
from tep.backends.local.domain import LocalDomain
from tep.backends.local.libc import allow_any_tracer, why
from tep.backends.local.memory import alloc_shared
from tep.backends.local.rings import MESSAGE_BYTES_MAX
from tep.backends.opening import all_or_none, identity
from tep.base.errors import BackendUnavailable, UsageError

__all__ = ["LocalDomain", "alloc_shared", "open_domains", "probe"]

_NICS_MAX: Final = 64
_SQ_DEPTH: Final = 4096
_COPY_THREADS_MAX: Final = 16
_PEER_TIMEOUT_S: Final = 2.0
"""The kernel tells of a death at once; this is room for a poll that comes late."""

_CHILDREN_ONLY: Final = 1  # of kernel.yama.ptrace_scope
_OPENED_TO_TRACERS: Final = (
    "opening an engine lets every process of this user read and write this process's memory until "
    "it exits (PR_SET_PTRACER_ANY); open with allow_tracer=False to keep Yama's limit: peers then "
    "reach tep.alloc_shared() memory only"
)

_log = logging.getLogger("tep")


def open_domains(
    nics: int = 1,
    *,
    name: str | None = None,
    sq_depth: int = _SQ_DEPTH,
    allow_tracer: bool = True,
    spin_s: float | None = None,
    copy_threads: int = 1,
) -> Opened:
    """Open the NICs of one engine.

    Args:
        nics: how many lanes, 1 to 64.
        name: of the engine, for reports; the same name in a later process replaces the former.
        sq_depth: rows outstanding on one NIC; as many reads besides.
        allow_tracer: where Yama restricts writes into other processes to children (Ubuntu's
            default), name "any process of this user" as an exception, for the rest of this
            process's life; it is logged once. False: peers then reach alloc_shared() memory only.
        spin_s: how long a wait() polls before it sleeps on the NICs' descriptors, seconds; 60 =
            spin: a core for as long as somebody waits, for the least latency. None = up to 100 us,
            while that pays; 0 = sleep at once. See `tep.drivers.turning`.
        copy_threads: threads that move the bytes of rows of 1 MiB and more together, 1 to 16, with
            the one that turns the engine. More than one takes cores, and pays where one core does
            not use all of the memory's bandwidth. Rows then land in no order.

    Raises:
        UsageError: an impossible number or name.
        BackendUnavailable: not Linux, or the kernel refuses memory, sockets or descriptors.
    """
    name, epoch = identity("local", name, None)
    if not 1 <= nics <= _NICS_MAX:
        raise UsageError(f"local: nics={nics}; 1 to {_NICS_MAX} are possible")
    if not 1 <= copy_threads <= _COPY_THREADS_MAX:
        raise UsageError(
            f"local: copy_threads={copy_threads}; 1 to {_COPY_THREADS_MAX} are possible"
        )
    if sq_depth < 1:
        raise UsageError(f"local: sq_depth={sq_depth}; 1 or more rows are possible")
    _check_system()
    if allow_tracer and _yama_scope() == _CHILDREN_ONLY:
        _open_to_tracers()
    host = os.getpid(), process_start(), epoch, host_digest()
    domains = all_or_none(
        LocalDomain(
            Address(nic, *host, os.urandom(16)),
            _caps(f"{name}/{nic}", sq_depth, ordered=copy_threads == 1),
            copy_threads,
        )
        for nic in range(nics)
    )
    about = f"{copy_threads} threads copy for each NIC" if copy_threads > 1 else ""
    return Opened(domains, epoch, name, CallersTurn(spin_s), about=about)


def _caps(nic: str, sq_depth: int, *, ordered: bool) -> DomainCaps:
    return DomainCaps(
        backend="local",
        nic=nic,
        link_bps=0,
        sq_depth=sq_depth,
        max_write_bytes=1 << 40,
        max_msg_bytes=MESSAGE_BYTES_MAX,
        ordered=ordered,
        imm_eats_recv=False,
        peer_timeout_s=_PEER_TIMEOUT_S,
        control_bytes=CONTROL_BYTES_MAX,
        reads=sq_depth,
    )


def _check_system() -> None:
    tried: list[tuple[str, str]] = []
    if sys.platform != "linux":
        tried.append(("the operating system", f"{sys.platform} is not Linux"))
    elif not hasattr(os, "memfd_create"):
        tried.append(("memfd_create", "this Python was built without it (glibc before 2.27)"))
    if sys.byteorder != "little":
        tried.append(("byte order", f"{sys.byteorder}; the rings are read as little-endian words"))
    if tried:
        raise BackendUnavailable("the local backend cannot run here", tuple(tried))


def _yama_scope() -> int:
    """kernel.yama.ptrace_scope, or 0 where there is no Yama."""
    try:
        return int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text())
    except (OSError, ValueError):
        return 0


@functools.cache  # once is enough: it holds for the process
def _open_to_tracers() -> None:
    if allow_any_tracer():
        _log.warning("local: %s", _OPENED_TO_TRACERS)


def probe() -> str:
    """Say what is here: whether the kernel lets processes write into each other.

    Raises:
        BackendUnavailable: not Linux, or no sockets in the abstract namespace.
    """
    _check_system()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        try:
            sock.bind(b"\0tep/probe/" + os.urandom(8).hex().encode())
        except OSError as error:
            raise BackendUnavailable(
                "the local backend cannot run here", (("an abstract UNIX socket", str(error)),)
            ) from error
    mark = np.frombuffer(os.urandom(8), np.uint8)
    code = can_reach(os.getpid(), int(mark.ctypes.data), ctypes.string_at(mark.ctypes.data, 8))
    scope = _yama_scope()
    if code:
        return f"alloc_shared() memory only: process_vm_readv says {why(code)}"
    if scope > 1:
        return f"alloc_shared() memory only, unless as root: kernel.yama.ptrace_scope is {scope}"
    tracers = f": {_OPENED_TO_TRACERS}" if scope == _CHILDREN_ONLY else ""
    calls = "process_vm_writev, process_vm_readv"
    return f"{calls} and shared memory; kernel.yama.ptrace_scope {scope}{tracers}"
