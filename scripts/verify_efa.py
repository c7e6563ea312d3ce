"""The program of scripts/verify_efa and scripts/cx7_smoke: claims that only real NICs can test.

Each check prints a line; the last line is the verdict. It runs on any provider, so that the script
itself can be tested without EFA.
"""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import numpy as np

from tep import Access, FabricError, MrDesc, Pages, TepError, ThreadDriver, TransferEngine, sim
from tep.backends import BACKENDS, efa, local, verbs
from tep.backends.libfabric import open_domains, probe
from tep.base.units import KiB, MiB

__all__ = ["main"]

SRD = "srd"  # the backend `efa`, without libfabric
ALL = "efa-all"
_CURES = {
    **dict.fromkeys(("efa", SRD), BACKENDS["efa"].cure),
    **{name: BACKENDS[name].cure for name in ("verbs", "local")},
    "tcp": BACKENDS["libfabric"].cure,
    "sim": "nothing is needed",
}
"""What each can be asked to verify, and what brings it."""


class _Site:
    """Two engines of this machine, and their findings."""

    def __init__(self, provider: str) -> None:
        self.provider = provider
        self._simulated = contextlib.ExitStack()
        if provider == "sim":
            cluster = self._simulated.enter_context(sim.Cluster(nodes=2, profile="cx7_400"))
            self.a, self.b = cluster.engines
        else:
            self.a, self.b = self._engine("verify-a"), self._engine("verify-b")
        self.now_s = self.a.driver.now_s

    def _engine(self, name: str) -> TransferEngine:
        if self.provider == "local":
            return TransferEngine.open("local", name=name)
        if self.provider == "verbs":
            opened = verbs.open_domains(nics=self._nics(), name=name)
        elif self.provider == SRD:
            opened = efa.open_domains(name=name)
        else:
            opened = open_domains(provider=self.provider, name=name)
        driver = ThreadDriver(name)
        return TransferEngine(opened.domains, driver=driver, name=name, epoch=opened.epoch)

    def _nics(self) -> int:
        """Count the RDMA NICs that belong together here."""
        found = verbs.facts()["nics"]
        assert isinstance(found, list)
        return len(found)

    def nics(self) -> str:
        """List NICs, rates, limits."""
        caps = [domain.caps for domain in self.a._domains]
        return "; ".join(
            f"{one.nic} {one.link_bps / 1e9:.0f} Gbps, rows to {one.max_write_bytes} B"
            for one in caps
        )

    def pages(self, page_bytes: int, npages: int) -> str:
        """Check pages in random order over all NICs: bytes and counts are exact."""
        rng = np.random.default_rng(page_bytes)
        source = rng.integers(0, 256, page_bytes * npages, np.uint8)
        target = np.zeros_like(source)
        order = rng.permutation(npages)
        mr, _ = self.a.reg_mr(source)
        _, desc = self.b.reg_mr(target)
        start = self.now_s()
        got = self.b.expect_imm_count(page_bytes, npages)
        sent = self.a.submit_paged_writes(
            page_bytes, (mr, Pages(np.arange(npages))), (desc, Pages(order)), page_bytes
        )
        got.wait(300)
        sent.wait(300)
        took_s = self.now_s() - start
        placed = target.reshape(npages, page_bytes)[order]
        assert bool((placed == source.reshape(npages, page_bytes)).all()), "bytes differ"
        assert page_bytes not in dict(self.b.stats().imms_unexpected), "more immediates than pages"
        rate = source.nbytes / took_s / 1e9
        return f"{npages} x {page_bytes} B, {rate:.2f} GB/s, {npages / took_s / 1e3:.0f} k pages/s"

    def immediates(self) -> str:
        """Check all 32 bits of an immediate, and an empty row."""
        _, desc = self.b.reg_mr(bytearray(4096))
        mr, _ = self.a.reg_mr(bytearray(4096))
        values = (0, 1, 0x01020304, 0x80000000, 2**32 - 1)
        for value in values:
            got = self.b.expect_imm_count(value, 2)
            self.a.submit_single_write(8, (mr, 0), (desc, 0), value).wait(20)
            self.a.submit_barrier([desc], value).wait(20)
            got.wait(20)
        return ", ".join(map(hex, values))

    def reads(self) -> str:
        """Check pages that are read in random order: bytes are exact."""
        caps = self.a._domains[0].caps
        if not caps.reads:
            return f"none: {caps.no_reads}"
        npages, page_bytes = 1024, 64 * KiB
        rng = np.random.default_rng(1)
        there = rng.integers(0, 256, page_bytes * npages, np.uint8)
        here = np.zeros_like(there)
        order = rng.permutation(npages)
        mr, _ = self.a.reg_mr(here, access=Access.SINK)
        _, desc = self.b.reg_mr(there, access=Access.READABLE)
        start = self.now_s()
        self.a.submit_paged_reads(
            page_bytes, (desc, Pages(order)), (mr, Pages(np.arange(npages)))
        ).wait(300)
        took_s = self.now_s() - start
        pages = here.reshape(npages, page_bytes)
        assert bool((pages == there.reshape(npages, page_bytes)[order]).all()), "bytes differ"
        return f"{npages} x {page_bytes} B, {here.nbytes / took_s / 1e9:.2f} GB/s"

    def bad_key(self) -> str:
        """Check that a wrong key is a named error, and the next good row arrives."""
        mr, _ = self.a.reg_mr(bytearray(4096))
        _, good = self.b.reg_mr(bytearray(4096))
        wrong = MrDesc(
            good.addr,
            good.region + 1,
            good.nbytes,
            good.device,
            good.writable,
            tuple(key ^ 0x5A5A for key in good.rkeys),
            good.bases,
        )
        code = "no error at all"
        try:
            self.a.submit_single_write(64, (mr, 0), (wrong, 0), 77).wait(20)
        except FabricError as error:
            code = error.code
        got = self.b.expect_imm_count(78, 1)
        self.a.submit_single_write(64, (mr, 0), (good, 0), 78).wait(20)
        got.wait(20)
        assert code in {"REMOTE_KEY", "REMOTE_RANGE"}, f"a wrong key ended as {code}"
        return code

    def dead_peer(self) -> str:
        """Check that rows to a peer that is gone end in an error in time."""
        mr, _ = self.a.reg_mr(bytearray(4096))
        _, desc = self.b.reg_mr(bytearray(4096))
        self.b.close()
        start = self.now_s()
        try:
            self.a.submit_single_write(64, (mr, 0), (desc, 0), 79).wait(30)
        except FabricError as error:
            return f"{error.code} after {self.now_s() - start:.2f} s"
        raise AssertionError("a write to a closed peer was reported as done")

    def close(self) -> None:
        self.a.close()
        self.b.close()
        self._simulated.close()


def main(argv: list[str]) -> int:
    """Run all checks on one provider; return 0 if every one held."""
    provider = argv[0] if argv else "efa"
    if provider == ALL:
        return _side_by_side()
    if provider not in _CURES:
        _say(f"FAILED  {provider!r} is none of: {', '.join([*_CURES, ALL])}")
        return 2
    logging.getLogger("tep").setLevel(logging.ERROR)  # two checks provoke what it would warn of
    failed: list[str] = []

    def check(name: str, run: Callable[[], str]) -> None:
        try:
            _say(f"ok      {name}: {run()}")
        except (TepError, AssertionError) as error:
            failed.append(name)
            _say(f"FAILED  {name}: {type(error).__name__}: {error}")

    probes = {
        "verbs": verbs.probe,
        SRD: efa.probe,
        "local": local.probe,
        "sim": lambda: "cx7_400; times are simulated",
    }
    check("library", probes.get(provider, probe))
    try:
        site = None if failed else _Site(provider)
    except TepError as error:
        _say(f"FAILED  open: {error}")
        site = None
    if site is None:
        _say(f"what brings it: {_CURES[provider]}; .venv/bin/tep doctor says more")
        return 1
    try:
        check("nics", site.nics)
        check("immediates", site.immediates)
        for page_bytes, npages in ((4 * KiB, 4096), (64 * KiB, 1024), (MiB, 128)):
            check(f"pages of {page_bytes}", partial(site.pages, page_bytes, npages))
        check("reads", site.reads)
        check("wrong key", site.bad_key)
        check("dead peer", site.dead_peer)
    finally:
        site.close()
    _say(f"{provider}: " + (f"FAILED: {', '.join(failed)}" if failed else "all checks held"))
    return int(bool(failed))


def _side_by_side() -> int:
    """Run every provider in its own process; print the results of each check below each other."""
    found: dict[str, list[tuple[str, str]]] = {}
    status = 0
    for provider in ("efa", SRD):
        ran = subprocess.run(  # noqa: S603  # this script itself
            [sys.executable, __file__, provider], capture_output=True, text=True, check=False
        )
        status = status or ran.returncode
        for line in (ran.stdout + ran.stderr).splitlines():
            check, _, _ = line.partition(": ")
            found.setdefault(check.split(maxsplit=1)[-1], []).append((provider, line))
    for check, lines in found.items():
        _say(check)
        for provider, line in lines:
            _say(f"  {provider:10} {line}")
    return status


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
