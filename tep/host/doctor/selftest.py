"""Moving bytes over each backend that opens, between two engines of this process.

A NIC sends to itself. Bytes and counts are checked, and the NIC's own counters are read before and
after, to see whether the bytes went through it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np

from tep.backends import BACKENDS, load_backend
from tep.base.api import EngineOptions, Pages
from tep.base.errors import BackendUnavailable, TepError
from tep.base.units import KiB
from tep.engine import TransferEngine
from tep.host.doctor.devices import size_text
from tep.host.doctor.finding import Finding, bad, good, note, warn
from tep.host.doctor.nics import read_counters
from tep.host.hostfiles import HostFiles

__all__ = ["self_test", "ways"]

_PAGE: Final = 64 * KiB
_PAGES: Final = 64
_PINGS: Final = 50
_WAIT_S: Final = 20.0
_SENT: Final = ("rdma_write_bytes", "port_xmit_data", "sent_pkts", "tx_bytes")
"""Counters of sent bytes: EFA, mlx5 (in words of 4 bytes), Soft-RoCE (packets), EFA's all."""

_TOUCH: Final = (
    "sysctl kernel.yama.ptrace_scope=0 (3 lasts until the next boot); docker: "
    "--cap-add=SYS_PTRACE; or register memory of tep.alloc_shared()"
)

Way = tuple[str, dict[str, object]]


def ways() -> Iterator[tuple[str, Way | str]]:
    """List (name, arguments to open it or reason why not) of all that could move bytes here."""
    for name in BACKENDS:
        if name in {"auto", "sim"}:  # the first is another's name, the second has its own demo
            continue
        try:
            module = load_backend(name)
            module.probe()
        except BackendUnavailable as error:
            tried = "; ".join(f"{what}: {why}" for what, why in error.tried)
            yield name, f"{str(error).splitlines()[0]}{f' ({tried})' if tried else ''}"
            continue
        if name != "libfabric":
            yield name, (name, {})
            continue
        facts = getattr(module, "facts")()  # noqa: B009  # not every backend has it
        for provider in ("tcp", "efa", "efa-direct"):
            what = f"libfabric {provider}"
            offered = "efa" if provider.startswith("efa") else provider
            if offered in facts["providers"]:
                yield what, (name, {"provider": provider})
            elif provider != "efa-direct":
                yield what, f"{facts['library']} offers no provider {provider} here"


def self_test(files: HostFiles) -> Iterator[Finding]:
    """Try every backend; make one finding for each, and one for the NICs' counters."""
    for what, way in ways():
        if isinstance(way, str):
            cure = BACKENDS[what.split()[0]].cure
            yield note(f"backend {what}", f"not here: {way}", cure)
            continue
        before = read_counters(files)
        find = getattr(load_backend(way[0]), "restriction", None)  # local has it
        restricted = find() if find is not None else ""
        try:
            text = _move(*way, shared=bool(restricted))
        except (TepError, AssertionError, OSError) as error:
            yield bad(
                f"backend {what}",
                f"self-test failed: {type(error).__name__}: {error}",
                "tep info says what it found; attach the bundle (--bundle FILE) to a report",
            )
            continue
        yield good(f"backend {what}", text)
        if restricted:
            yield warn(f"backend {what}", restricted, _TOUCH)
        if way[0] == "verbs" or "efa" in what:
            yield from _counted(what, before, read_counters(files))


def _counted(
    what: str, before: dict[tuple[str, str], int], after: dict[tuple[str, str], int]
) -> Iterator[Finding]:
    """Report if the NICs' counters show that the bytes went through them."""
    grown = {
        key: after[key] - before.get(key, 0) for key in after if after[key] > before.get(key, 0)
    }
    sent = {key: value for key, value in grown.items() if key[1] in _SENT}
    if not after:
        yield note(f"backend {what}", "the NICs have no hw_counters here: not known which way")
    elif sent:
        shown = ", ".join(f"{nic} {counter} +{value}" for (nic, counter), value in sent.items())
        yield good(f"backend {what}", f"bytes went through the NICs: {shown}")
    else:
        yield warn(
            f"backend {what}",
            f"no counter of sent bytes moved: the NICs may not have been used ({len(after)} read)",
            "EFA: same_host_shm=False; others: is the driver's hw_counters supported?",
        )


def _open(backend: str, options: dict[str, object]) -> TransferEngine:
    return TransferEngine.open(
        backend, device=None, driver=None, options=EngineOptions(), **options
    )


def _move(backend: str, options: dict[str, object], *, shared: bool = False) -> str:
    """Move pages in another order, then single immediates back and forth; return the speeds.

    `shared`: into memory of alloc_shared().
    """
    from tep.backends.local import alloc_shared

    rng = np.random.default_rng(7)
    source = rng.integers(0, 256, _PAGE * _PAGES, np.uint8)
    target = alloc_shared(source.nbytes) if shared else np.zeros_like(source)
    order = rng.permutation(_PAGES)
    with (
        _open(backend, options) as a,
        _open(backend, options) as b,
    ):
        mr, _ = a.reg_mr(source)
        _, desc = b.reg_mr(target)
        started = time.perf_counter()
        got = b.expect_imm_count(1, _PAGES)
        sent = a.submit_paged_writes(_PAGE, (mr, Pages(np.arange(_PAGES))), (desc, Pages(order)), 1)
        got.wait(_WAIT_S)
        sent.wait(_WAIT_S)
        took_s = time.perf_counter() - started
        placed = target.reshape(_PAGES, _PAGE)[order]
        assert bool((placed == source.reshape(_PAGES, _PAGE)).all()), "bytes differ"
        assert not b.stats().imms_unexpected, "more immediates than pages"
        pings = [
            _ping(lambda: a.submit_single_write(8, (mr, 0), (desc, 0), 2), b) for _ in range(_PINGS)
        ]
        caps = [domain.caps for domain in a._domains]
        longest = min(one.max_write_bytes for one in caps)
        return (
            f"{len(caps)} NIC{'s' * (len(caps) > 1)} ({', '.join(one.nic for one in caps[:4])}), "
            f"{source.nbytes / took_s / 1e9:.2f} GB/s to itself, write to count "
            f"{statistics.median(pings) * 1e6:.0f} us, immediates of {caps[0].imm_bits} bits, rows "
            f"to {size_text(longest)}, messages to {size_text(caps[0].max_msg_bytes)}, "
            f"memory {'/'.join(caps[0].memory_kinds)}"
        )


def _ping(submit: Callable[[], object], receiver: TransferEngine) -> float:
    started = time.perf_counter()
    submit()
    receiver.expect_imm_count(2, 1).wait(_WAIT_S)
    return time.perf_counter() - started
