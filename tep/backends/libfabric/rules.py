"""What each provider needs of us: a table of data, asked once at opening.

Every line was learnt by experiment on libfabric 1.17 to 2.5, except EFA's, which is read from the
provider's source and manual and unproven on hardware. Nothing here calls libfabric.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from tep.backends.ffi import libfabric as fi
from tep.base.units import KiB, MiB

__all__ = ["RULES", "Rules", "SoftwareRules"]


_NEVER: Final = 1 << 63


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How one provider is driven.

    Attributes:
        provider: as the user names it, and addresses carry it.
        names: what libfabric calls it; the first that it offers is taken.
        fabric: which of its fabrics, where it has several; "" = any.
        caps, mr_mode: of the hints, besides FI_MSG | FI_RMA.
        delivery_complete: a local completion must wait for the target. Without it tcp completes
            writes that never arrive.
        copies_from: rows of this many bytes are copied inside the post.
        releases_from: rows of this many bytes take long enough to post to drop the interpreter's
            lock meanwhile, so that the user's own thread can have it. It costs 0.03 us a row.
        turn_rows: rows posted between two polls.
        turn_bytes: the same in bytes, for rows that are copied inside the post: what was copied
            should be taken while it is in the cache.
        window_rows, window_bytes: rows and bytes in flight; small, to keep them in the cache.
        tx_entries, rx_entries: of each endpoint's queues; 0 = the provider's own choice.
        frames_in, frames_out: buffers for messages that come in, and that go out.
        imm_takes_receive: an immediate takes one of `frames_in`, comes with the context of that
            receive, and it is posted again.
        more: the provider gathers writes that say FI_MORE, and rings its doorbell once.
        ordered: rows to one peer land in posting order.
        msg_bytes_max: longest message.
    """

    provider: str
    names: tuple[str, ...]
    fabric: str = ""
    caps: int = 0
    mr_mode: int = fi.FI_MR_LOCAL | fi.FI_MR_VIRT_ADDR | fi.FI_MR_ALLOCATED | fi.FI_MR_PROV_KEY
    delivery_complete: bool = False
    copies_from: int = _NEVER
    releases_from: int = _NEVER
    turn_rows: int = 1 << 30
    turn_bytes: int = 1 << 62
    window_rows: int = 1024
    window_bytes: int = _NEVER
    tx_entries: int = 0
    rx_entries: int = 0
    frames_in: int = 64
    frames_out: int = 64
    imm_takes_receive: bool = False
    more: bool = False
    ordered: bool = True
    msg_bytes_max: int = 64 * KiB


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftwareRules(Rules):
    """How a provider is driven that is software.

    They say nothing useful of a bad key, so that the target is asked for a region's bounds before
    the first row to it: its lease. Their NICs are named by IP addresses.

    Attributes:
        endpoint_per_peer: post to each peer through an endpoint of its own, so that a dead one can
            be cut off, and its errors flush nobody else's rows.
    """

    endpoint_per_peer: bool = False
    copies_from: int = 32 * KiB
    releases_from: int = 32 * KiB
    window_bytes: int = 4 * MiB


_EFA: Final = Rules(
    provider="efa",
    names=("efa",),
    fabric="efa",
    caps=fi.FI_LOCAL_COMM | fi.FI_REMOTE_COMM,
    # The provider registers a packet of 9 KB for each place in its queues: 111 MB a NIC if it may
    # choose, 28 GB for 8 engines that open all 32 NICs of a p5. With these sizes it is 14 MB, with
    # the frames' buffers 15, 3.8 GB in all. 512 rows of 4 KiB are four times what a NIC of
    # 100 Gbit/s has in flight within 20 us.
    tx_entries=512,
    rx_entries=1024,
    frames_in=8,
    frames_out=8,
    window_rows=512,
    ordered=False,
)

RULES: Final[Mapping[str, Rules]] = MappingProxyType(
    {
        rules.provider: rules
        for rules in (
            # "net" is what 1.17 calls today's tcp; asked for "tcp" it would give "tcp;ofi_rxm".
            SoftwareRules(
                provider="tcp",
                names=("net", "tcp"),
                releases_from=0,  # each is a system call of 5 us: 512 held it for 2.5 ms
                turn_bytes=MiB,  # 64 KiB rows cost a tenth less CPU than with a window at a time
                turn_rows=512,  # with 128 a write of 4 KiB costs a tenth more
                delivery_complete=True,
                endpoint_per_peer=True,
            ),
            SoftwareRules(
                provider="tcp;ofi_rxm",
                names=("tcp;ofi_rxm",),
                releases_from=0,
                turn_rows=512,
                tx_entries=256,  # its own choice costs 17 MB and 0.1 s a connection
                rx_entries=256,
                delivery_complete=True,
            ),
            _EFA,
            replace(
                _EFA,
                provider="efa-direct",
                fabric="efa-direct",
                msg_bytes_max=4 * KiB,  # its messages are one packet of about 8 KiB (its manual)
                # It registers no packets here. Each immediate takes a receive: 2,048 (9 MB a NIC)
                # last for 2 ms at a million a second; then the sender's device waits and retries.
                # The window and the frames fit into the queue: a chain of FI_MORE is never refused.
                tx_entries=1024 + 64,
                rx_entries=2048,
                frames_in=2048,
                frames_out=64,
                window_rows=1024,
                imm_takes_receive=True,
                more=True,
            ),
        )
    }
)
"""The providers that tep drives, by the name that the user gives."""
