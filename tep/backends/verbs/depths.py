"""How deep each queue of one NIC is: the settings against the device's limits, and what it costs.

Rule: the completion queue holds the sum of all that can be in it at once, so it cannot overflow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from tep.errors import FabricError, UsageError

if TYPE_CHECKING:
    from tep.backends.verbs.device import Device

__all__ = [
    "DATAGRAMS_IN",
    "DATAGRAMS_OUT",
    "MARKERS_MAX",
    "MESSAGES_OUT",
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

ROWS: Final = 2048 - SPARE_WRS
"""Rows outstanding, where the user names no number: the queue is as long as a power of two."""

_MESSAGES_IN: Final = 512
_IMMS_MAX: Final = 32767


class Depths(NamedTuple):
    """Entries of each queue.

    Attributes:
        rows: rows outstanding; a queue pair for rows has SPARE_WRS requests more.
        imms: receives that wait for immediates.
        messages_in: receives that wait for messages.
        cq: completions that the completion queue holds.
    """

    rows: int
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
    rows = _find_rows(device)
    messages_in = _within(
        device, "msg_recvs_max", settings.msg_recvs_max, _MESSAGES_IN, int(attr.max_srq_wr)
    )
    # A row has one completion, and may have a tail behind it with one more.
    rest = 2 * rows + messages_in + MESSAGES_OUT + DATAGRAMS_IN + DATAGRAMS_OUT + MARKERS_MAX
    left = int(attr.max_cqe) - rest
    if left < 1:
        raise UsageError(
            f"verbs: sq_depth={rows} msg_recvs_max={messages_in} need a completion queue of more "
            f"than {rest}; {device.name} has {attr.max_cqe} at the most: set smaller ones"
        )
    most = min(int(attr.max_srq_wr), left)
    imms = _within(device, "imm_recvs", settings.imm_recvs, _IMMS_MAX, most)
    return Depths(rows, imms, messages_in, rest + imms)


def _within(device: Device, name: str, wanted: int | None, usual: int, most: int) -> int:
    if wanted is None:
        return min(usual, most)
    if wanted > most:
        raise UsageError(f"verbs: {name}={wanted}; 1 to {most} is possible on {device.name} here")
    return wanted


def _find_rows(device: Device) -> int:
    """Try how many rows a queue pair takes: limits in bytes are not among what a device reports."""
    named = device.settings.sq_depth
    most = int(device.attr.max_qp_wr) - SPARE_WRS
    rows = min(ROWS if named is None else named, most)
    refusal = ""
    while named is None or rows == named:
        try:
            device.try_queue_pair(rows + SPARE_WRS)
        except FabricError as error:
            if rows == 1:
                raise
            refusal = f" ({error})"
            if named is not None:
                break
            rows = max(1, (rows + SPARE_WRS) // 2 - SPARE_WRS)
        else:
            return rows
    assert named is not None
    raise UsageError(
        f"verbs: sq_depth={named} is more than {device.name} can do{refusal}; "
        f"{_most_rows(device, min(named, most))} is possible"
    )


def _most_rows(device: Device, most: int) -> int:
    """How many rows a device takes, looked for between 1 and `most`."""
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        try:
            device.try_queue_pair(middle + SPARE_WRS)
        except FabricError:
            high = middle - 1
        else:
            low = middle
    return low


def peer_bytes(device: Device, rows: int) -> int:
    """What the send queues for one peer take on ConnectX, at `rows` outstanding."""
    row_queues = device.settings.qps_per_peer * queue_bytes(rows + SPARE_WRS, device.wqe_bytes)
    return row_queues + queue_bytes(MESSAGES_OUT + SPARE_WRS, device.wqe_bytes)


def queue_bytes(requests: int, request_bytes: int) -> int:
    """What a send queue takes: ConnectX rounds its bytes up to a power of two.

    Source: mlx5_calc_sq_size of rdma-core 44; quoted.
    """
    return 1 << (requests * request_bytes - 1).bit_length()
