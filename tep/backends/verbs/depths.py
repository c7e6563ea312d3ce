"""How deep each queue of one NIC is: the settings against the device's limits, and what it costs.

Rule: the completion queue holds the sum of all that can be in it at once, so it cannot overflow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from tep.base.errors import FabricError, UsageError

if TYPE_CHECKING:
    from tep.backends.verbs.device import Device

__all__ = [
    "DATAGRAMS_IN",
    "DATAGRAMS_OUT",
    "MARKERS_MAX",
    "MESSAGES_OUT",
    "READS",
    "ROWS",
    "SPARE_WRS",
    "Depths",
    "peer_bytes",
    "plan_depths",
    "queue_bytes",
]

SPARE_WRS: Final = 16
"""Requests a queue pair can hold beyond the rows: markers and tails."""

MARKERS_MAX: Final = 256
"""Markers on their way at a time, of all failed queue pairs of a NIC; others wait their turn."""

MESSAGES_OUT: Final = 64
"""Messages on their way out at a time."""

DATAGRAMS_IN: Final = 1024
"""Datagrams that may wait for a poll: requests of as many peers that connect at the same time."""

DATAGRAMS_OUT: Final = 256

READS: Final = 128
"""Rows of reads outstanding, where the user names no number."""

_REQUESTS: Final = 2048  # the queue is as long as a power of two
_PARTS: Final = 15  # one of so many in a shorter queue is for reads

ROWS: Final = _REQUESTS - SPARE_WRS - READS
"""Rows outstanding, where the user names no number."""

_MESSAGES_IN: Final = 512
_IMMS_MAX: Final = 32767


class Depths(NamedTuple):
    """Entries of each queue.

    Attributes:
        rows: rows outstanding; a queue pair for rows has the reads and SPARE_WRS requests more.
        reads: rows of reads outstanding.
        imms: receives that wait for immediates.
        messages_in: receives that wait for messages.
        cq: completions that the completion queue holds.
    """

    rows: int
    reads: int
    imms: int
    messages_in: int
    cq: int


def plan_depths(device: Device) -> Depths:
    """Choose the depths for one NIC.

    A depth that the user names is kept or refused; one that is left open follows the device.

    Raises:
        UsageError: a depth that is named is more than the device can do; says how much it can.
        FabricError: the device refuses even the shortest queue.
    """
    settings, attr = device.settings, device.attr
    rows, reads = _find_rows(device)
    messages_in = _within(
        device, "msg_recvs_max", settings.msg_recvs_max, _MESSAGES_IN, int(attr.max_srq_wr)
    )
    # A row has one completion, and may have a tail behind it with one more.
    rest = (
        2 * (rows + reads) + messages_in + MESSAGES_OUT + DATAGRAMS_IN + DATAGRAMS_OUT + MARKERS_MAX
    )
    left = int(attr.max_cqe) - rest
    if left < 1:
        raise UsageError(
            f"verbs: sq_depth={rows} msg_recvs_max={messages_in} need a completion queue of more "
            f"than {rest}; {device.name} has {attr.max_cqe} at the most: set smaller ones"
        )
    most = min(int(attr.max_srq_wr), left)
    imms = _within(device, "imm_recvs", settings.imm_recvs, _IMMS_MAX, most)
    return Depths(rows, reads, imms, messages_in, rest + imms)


def _within(device: Device, name: str, wanted: int | None, usual: int, most: int) -> int:
    if wanted is None:
        return min(usual, most)
    if wanted > most:
        raise UsageError(f"verbs: {name}={wanted}; 1 to {most} is possible on {device.name} here")
    return wanted


def _find_rows(device: Device) -> tuple[int, int]:
    """Try how many rows and reads a queue pair takes: a device does not report limits in bytes."""
    named, wanted = device.settings.sq_depth, device.settings.reads
    if device.no_reads:
        wanted = 0
    most = int(device.attr.max_qp_wr)
    if named is not None:
        return named, _reads_beside(device, named, wanted, most)
    total = min(_REQUESTS, most)
    while True:
        reads = min(READS, (total - SPARE_WRS) // _PARTS) if wanted is None else wanted
        rows = total - SPARE_WRS - reads
        if rows < 1:
            raise UsageError(f"verbs: reads={wanted} is more than {device.name} has room for")
        try:
            device.try_queue_pair(total)
        except FabricError:
            if rows == 1:
                raise
            total = max(SPARE_WRS + 1 + (wanted or 0), total // 2)
        else:
            return rows, reads


def _reads_beside(device: Device, rows: int, wanted: int | None, most: int) -> int:
    """How many reads there is room for beside rows whose number the user has named."""
    refusal = ""
    for reads in (READS, 0) if wanted is None else (wanted,):
        if rows + reads + SPARE_WRS > most:
            continue
        try:
            device.try_queue_pair(rows + reads + SPARE_WRS)
        except FabricError as error:
            refusal = f" ({error})"
        else:
            return reads
    raise UsageError(
        f"verbs: sq_depth={rows} is more than {device.name} can do{refusal}; "
        f"{_most_rows(device, min(rows, most - SPARE_WRS), wanted or 0)} is possible"
    )


def _most_rows(device: Device, most: int, reads: int) -> int:
    """How many rows a device takes beside reads, looked for between 1 and `most`."""
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        try:
            device.try_queue_pair(middle + reads + SPARE_WRS)
        except FabricError:
            high = middle - 1
        else:
            low = middle
    return low


def peer_bytes(device: Device, rows: int, reads: int = READS) -> int:
    """What the send queues for one peer take on ConnectX, at so many outstanding."""
    requests = rows + reads + SPARE_WRS
    row_queues = device.settings.qps_per_peer * queue_bytes(requests, device.wqe_bytes)
    return row_queues + queue_bytes(MESSAGES_OUT + SPARE_WRS, device.wqe_bytes)


def queue_bytes(requests: int, request_bytes: int) -> int:
    """What a send queue takes: ConnectX rounds its bytes up to a power of two.

    Source: mlx5_calc_sq_size of rdma-core 44; quoted.
    """
    return 1 << (requests * request_bytes - 1).bit_length()
