"""What an EFA device reads from its work queues and writes to its completion queue, as dtypes.

Source: providers/efa/efa_io_defs.h of rdma-core 64 (tx_wqe, rx_desc, cdesc_common, tx_cdesc,
rx_cdesc), written anew; tests/abi compares offsets and sizes with that header's. All numbers are
little-endian. Immediates too: libefa swaps them on their way to and from ibv_wr_*, which take them
in network byte order.

    work queue entry, 64 bytes (on some devices 128, whose second half a write leaves alone)
    offset  size  field     content
    0       2     req_id    comes back in the completion
    2       1     ctrl1     operation, bit 4 has an immediate, bit 7 always
    3       1     ctrl2     bit 0 phase; bits 2 and 3, first and last, always; bit 4 completion
    4       2     dest_qp   queue pair number there
    6       2     length    buffers: 1
    8       4     imm
    12      2     ah        number of the address handle
    14      2     hints     0
    16      4     qkey      of the queue pair there
    20      12              0
    32      16    remote    of a write: length, rkey, address
    48      16    local     of a write: length, lkey, address; of a message they stand at 32

A read looks as a write without an immediate.

Rule: nothing is read from a work queue. On a device it is memory of the NIC, mapped for writing.
"""

from __future__ import annotations

from typing import Final

import numpy as np

__all__ = [
    "ALWAYS_1",
    "ALWAYS_2",
    "ARM",
    "COMPLETION_ENTRY",
    "HAS_IMM",
    "KINDS",
    "LKEY_MASK",
    "OP_READ",
    "OP_SEND",
    "OP_WRITE",
    "RX_ALWAYS",
    "RX_ENTRY",
    "TX_ENTRY",
]

_Field = tuple[str, int]


def _layout(itemsize: int, **fields: _Field) -> np.dtype[np.void]:
    return np.dtype(
        {
            "names": list(fields),
            "formats": [form for form, _ in fields.values()],
            "offsets": [at for _, at in fields.values()],
            "itemsize": itemsize,
        }
    )


TX_ENTRY: Final = _layout(
    64,
    req_id=("<u2", 0),
    ctrl1=("u1", 2),
    ctrl2=("u1", 3),
    dest_qp=("<u2", 4),
    length=("<u2", 6),
    imm=("<u4", 8),
    ah=("<u2", 12),
    qkey=("<u4", 16),
    remote_length=("<u4", 32),
    rkey=("<u4", 36),
    remote_addr=("<u8", 40),
    local_length=("<u4", 48),
    lkey=("<u4", 52),
    local_addr=("<u8", 56),
    send_length=("<u4", 32),
    send_lkey=("<u4", 36),
    send_addr=("<u8", 40),
)
OP_SEND: Final = 0
OP_READ: Final = 1
OP_WRITE: Final = 2
HAS_IMM: Final = 1 << 4
ALWAYS_1: Final = 1 << 7
"""Of ctrl1: this is a meta descriptor."""
ALWAYS_2: Final = 1 << 2 | 1 << 3 | 1 << 4
"""Of ctrl2: first and last of its request, which is to end in a completion."""
LKEY_MASK: Final = (1 << 24) - 1

RX_ENTRY: Final = _layout(
    16, addr=("<u8", 0), req_id=("<u2", 8), length=("<u2", 10), lkey_ctrl=("<u4", 12)
)
RX_ALWAYS: Final = 1 << 30 | 1 << 31
"""Of lkey_ctrl: first and last descriptor of its request."""

COMPLETION_ENTRY: Final = _layout(
    16,
    req_id=("<u2", 0),
    status=("u1", 2),
    flags=("u1", 3),
    qp=("<u2", 4),
    length=("<u2", 6),
    ah=("<u2", 8),
    src_qp=("<u2", 10),
    imm=("<u4", 12),
)
"""flags: bit 0 phase, bits 1 and 2 the queue (1 send, 2 receive), bit 3 has an immediate, bits 4 to
6 the operation, bit 7 unsolicited. From `length` on only of receives; entries of 32 bytes go on."""

KINDS: Final = _layout(16, kind=("<u2", 2))
"""A completion's status and flags as one number: status, flags << 8."""

ARM: Final = 1 << 31
"""Of the completion queue's doorbell: wake me; bits 29 and 30 count, the low 16 are the consumer's.
Source: efa_io_regs_defs.h."""
