"""The way between each GPU and the NICs beside it: bytes go there and back, checksums compared.

Where a switch or a virtual machine breaks GPUDirect nothing fails: a NIC reads or writes other
bytes than the GPU's kernels see, and a model answers with garbage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final
from zlib import crc32

import numpy as np

from tep.base.api import Pages
from tep.base.errors import BackendUnavailable, TepError
from tep.base.units import KiB
from tep.cuda.arena import alloc
from tep.cuda.checksum import checksum
from tep.engine import TransferEngine
from tep.host.cuda import list_devices
from tep.host.doctor import Finding, bad, good, note

__all__ = ["check_gpus"]

_PAGE: Final = 64 * KiB
_PAGES: Final = 64
_ROUNDS: Final = 2
"""The second round's bytes differ: what a NIC moves late or from elsewhere is the first's."""

_WAIT_S: Final = 20.0
_CURE: Final = (
    "PCIe: ACS off on the bridges (tep doctor names them), the IOMMU off or in pass-through mode; "
    "in a virtual machine ATS and ACS as its host's vendor says. Until then hold what NICs move in "
    "host memory (tep.cuda.Staged)"
)


def _beside(device: str) -> TransferEngine:
    """Open an engine with the NICs beside a GPU."""
    return TransferEngine.open("auto", device=device)


def check_gpus(open_engine: Callable[[str], TransferEngine] = _beside) -> Iterator[Finding]:
    """Make a finding for each GPU that the driver shows; none where there is no driver."""
    try:
        devices = list_devices()
    except BackendUnavailable:
        return
    for device in [f"cuda:{index}" for index, _ in enumerate(devices)]:
        area = f"{device} and its NICs"
        try:
            with open_engine(device) as a, open_engine(device) as b:
                caps = [domain.caps for domain in a._domains]
                names = ", ".join(cap.nic for cap in caps)
                if all("cuda" in cap.memory_kinds for cap in caps):
                    wrong = _there_and_back(a, b, device)
                else:
                    text = f"NICs {names} cannot reach the GPU's memory"
                    yield note(area, text, "tep.cuda.Staged copies it through host memory")
                    continue
        except (TepError, OSError) as error:
            yield bad(
                area, f"{type(error).__name__}: {error}", "docs/howto/gpus.md says what is needed"
            )
            continue
        if wrong:
            yield bad(area, f"through {names}: {wrong}", _CURE)
        else:
            text = f"{_PAGES * _PAGE // KiB} KiB through {names} to host memory and back are equal"
            yield good(area, text)


def _there_and_back(a: TransferEngine, b: TransferEngine, device: str) -> str:
    """Move pages from a GPU to the host and back; return what did not arrive whole, or ""."""
    dice, every = np.random.default_rng(5), Pages(np.arange(_PAGES))
    with alloc(_PAGE * _PAGES, device) as gpu, alloc(_PAGE * _PAGES) as host:
        ends = [(device, a, gpu, a.reg_mr(gpu)[0]), ("host memory", b, host, b.reg_mr(host)[0])]
        for (source, sender, memory, mr), (sink, receiver, _, there) in (ends, ends[::-1]):
            for _ in range(_ROUNDS):
                pages = dice.integers(0, 256, (_PAGES, _PAGE), np.uint8)
                memory.write(pages)
                got = receiver.expect_imm_count(1, _PAGES)
                sender.submit_paged_writes(_PAGE, (mr, every), (there.desc, every), 1).wait(_WAIT_S)
                got.wait(_WAIT_S)
                # The source's are computed here: a copy from the GPU would wait for what it does.
                wrong = [
                    f"offset {start}: {sent:#010x} was written, {arrived:#010x} is there"
                    for start, page in zip(range(0, _PAGE * _PAGES, _PAGE), pages)
                    for sent, arrived in [(crc32(page, start), checksum(there, [start], _PAGE))]
                    if sent != arrived
                ]
                if wrong:
                    count = f"{len(wrong)} of {_PAGES} pages of {source} did not reach {sink}"
                    return f"{count}; the checksum of the first, at {wrong[0]}"
    return ""
