"""What libibverbs' data path moves by the thousand: numpy dtypes of work requests and completions.

Above each stands its C declaration, word for word (<infiniband/verbs.h> of rdma-core 44.0); the
enum values that go into them and into the control calls are here too. Layouts and numbers only.
imm_data is big-endian in all of them: '>u4' makes numpy swap it, and nobody else has to.
"""

from __future__ import annotations

from typing import Final

import numpy as np

__all__ = ["DTYPES", "ENUMS", "MEMBERS", "RECV_WR", "SEND_WR", "SGE", "WC"]


def _layout(itemsize: int, **fields: tuple[str, int]) -> np.dtype[np.void]:
    """A dtype of (format, offset) fields."""
    return np.dtype(
        {
            "names": list(fields),
            "formats": [form for form, _ in fields.values()],
            "offsets": [offset for _, offset in fields.values()],
            "itemsize": itemsize,
        }
    )


# struct ibv_send_wr {
#     uint64_t wr_id;
#     struct ibv_send_wr *next;
#     struct ibv_sge *sg_list;
#     int num_sge;
#     enum ibv_wr_opcode opcode;
#     unsigned int send_flags;
#     /* When opcode is *_WITH_IMM: Immediate data in network byte order.
#      * When opcode is *_INV: Stores the rkey to invalidate
#      */
#     union {
#             __be32 imm_data;
#             uint32_t invalidate_rkey;
#     };
#     union {
#             struct {
#                     uint64_t remote_addr;
#                     uint32_t rkey;
#             } rdma;
#             struct {
#                     uint64_t remote_addr;
#                     uint64_t compare_add;
#                     uint64_t swap;
#                     uint32_t rkey;
#             } atomic;
#             struct {
#                     struct ibv_ah *ah;
#                     uint32_t remote_qpn;
#                     uint32_t remote_qkey;
#             } ud;
#     } wr;
#     union {
#             struct {
#                     uint32_t remote_srqn;
#             } xrc;
#     } qp_type;
#     union {
#             struct {
#                     struct ibv_mw *mw;
#                     uint32_t rkey;
#                     struct ibv_mw_bind_info bind_info;
#             } bind_mw;
#             struct {
#                     void *hdr;
#                     uint16_t hdr_sz;
#                     uint16_t mss;
#             } tso;
#     };
# };
SEND_WR: Final = _layout(
    128,
    wr_id=("<u8", 0),
    next=("<u8", 8),
    sg_list=("<u8", 16),
    num_sge=("<i4", 24),
    opcode=("<u4", 28),
    send_flags=("<u4", 32),
    imm_data=(">u4", 36),
    remote_addr=("<u8", 40),
    rkey=("<u4", 48),
    ah=("<u8", 40),
    remote_qpn=("<u4", 48),
    remote_qkey=("<u4", 52),
)

# struct ibv_recv_wr {
#     uint64_t wr_id;
#     struct ibv_recv_wr *next;
#     struct ibv_sge *sg_list;
#     int num_sge;
# };
RECV_WR: Final = _layout(
    32, wr_id=("<u8", 0), next=("<u8", 8), sg_list=("<u8", 16), num_sge=("<i4", 24)
)

# struct ibv_sge {
#     uint64_t addr;
#     uint32_t length;
#     uint32_t lkey;
# };
SGE: Final = _layout(16, addr=("<u8", 0), length=("<u4", 8), lkey=("<u4", 12))

# struct ibv_wc {
#     uint64_t wr_id;
#     enum ibv_wc_status status;
#     enum ibv_wc_opcode opcode;
#     uint32_t vendor_err;
#     uint32_t byte_len;
#     /* When (wc_flags & IBV_WC_WITH_IMM): Immediate data in network byte order.
#      * When (wc_flags & IBV_WC_WITH_INV): Stores the invalidated rkey.
#      */
#     union {
#             __be32 imm_data;
#             uint32_t invalidated_rkey;
#     };
#     uint32_t qp_num;
#     uint32_t src_qp;
#     unsigned int wc_flags;
#     uint16_t pkey_index;
#     uint16_t slid;
#     uint8_t sl;
#     uint8_t dlid_path_bits;
# };
WC: Final = _layout(
    48,
    wr_id=("<u8", 0),
    status=("<u4", 8),
    opcode=("<u4", 12),
    vendor_err=("<u4", 16),
    byte_len=("<u4", 20),
    imm_data=(">u4", 24),
    qp_num=("<u4", 28),
    src_qp=("<u4", 32),
    wc_flags=("<u4", 36),
    pkey_index=("<u2", 40),
    slid=("<u2", 42),
    sl=("u1", 44),
    dlid_path_bits=("u1", 45),
)

DTYPES: Final[dict[str, np.dtype[np.void]]] = {
    "ibv_send_wr": SEND_WR,
    "ibv_recv_wr": RECV_WR,
    "ibv_sge": SGE,
    "ibv_wc": WC,
}
"""Each dtype by the name of its C struct."""

MEMBERS: Final[dict[tuple[str, str], str]] = {
    ("ibv_send_wr", "remote_addr"): "wr.rdma.remote_addr",
    ("ibv_send_wr", "rkey"): "wr.rdma.rkey",
    ("ibv_send_wr", "ah"): "wr.ud.ah",
    ("ibv_send_wr", "remote_qpn"): "wr.ud.remote_qpn",
    ("ibv_send_wr", "remote_qkey"): "wr.ud.remote_qkey",
}
"""C's way to a field, where a union stands in between."""

ENUMS: Final[dict[str, int]] = {
    "IBV_WR_RDMA_WRITE": 0,
    "IBV_WR_RDMA_WRITE_WITH_IMM": 1,
    "IBV_WR_SEND": 2,
    "IBV_WR_RDMA_READ": 4,
    "IBV_SEND_SIGNALED": 1 << 1,
    "IBV_SEND_INLINE": 1 << 3,
    "IBV_QP_INIT_ATTR_PD": 1 << 0,
    "IBV_QP_INIT_ATTR_SEND_OPS_FLAGS": 1 << 6,
    "IBV_QP_EX_WITH_RDMA_WRITE": 1 << 0,
    "IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM": 1 << 1,
    "IBV_QP_EX_WITH_SEND": 1 << 2,
    "IBV_QP_EX_WITH_RDMA_READ": 1 << 4,
    "IBV_WC_SUCCESS": 0,
    "IBV_WC_LOC_LEN_ERR": 1,
    "IBV_WC_LOC_QP_OP_ERR": 2,
    "IBV_WC_LOC_PROT_ERR": 4,
    "IBV_WC_WR_FLUSH_ERR": 5,
    "IBV_WC_LOC_ACCESS_ERR": 8,
    "IBV_WC_REM_INV_REQ_ERR": 9,
    "IBV_WC_REM_ACCESS_ERR": 10,
    "IBV_WC_REM_OP_ERR": 11,
    "IBV_WC_RETRY_EXC_ERR": 12,
    "IBV_WC_RNR_RETRY_EXC_ERR": 13,
    "IBV_WC_REM_ABORT_ERR": 16,
    "IBV_WC_FATAL_ERR": 19,
    "IBV_WC_RESP_TIMEOUT_ERR": 20,
    "IBV_WC_GENERAL_ERR": 21,
    "IBV_ACCESS_LOCAL_WRITE": 1,
    "IBV_ACCESS_REMOTE_WRITE": 1 << 1,
    "IBV_ACCESS_REMOTE_READ": 1 << 2,
    "IBV_ACCESS_RELAXED_ORDERING": 1 << 20,
    "IBV_QPT_RC": 2,
    "IBV_QPT_UD": 4,
    "IBV_QPS_INIT": 1,
    "IBV_QPS_RTR": 2,
    "IBV_QPS_RTS": 3,
    "IBV_QPS_ERR": 6,
    "IBV_QP_STATE": 1 << 0,
    "IBV_QP_ACCESS_FLAGS": 1 << 3,
    "IBV_QP_PKEY_INDEX": 1 << 4,
    "IBV_QP_PORT": 1 << 5,
    "IBV_QP_QKEY": 1 << 6,
    "IBV_QP_AV": 1 << 7,
    "IBV_QP_PATH_MTU": 1 << 8,
    "IBV_QP_TIMEOUT": 1 << 9,
    "IBV_QP_RETRY_CNT": 1 << 10,
    "IBV_QP_RNR_RETRY": 1 << 11,
    "IBV_QP_RQ_PSN": 1 << 12,
    "IBV_QP_MAX_QP_RD_ATOMIC": 1 << 13,
    "IBV_QP_MIN_RNR_TIMER": 1 << 15,
    "IBV_QP_SQ_PSN": 1 << 16,
    "IBV_QP_MAX_DEST_RD_ATOMIC": 1 << 17,
    "IBV_QP_DEST_QPN": 1 << 20,
    "IBV_LINK_LAYER_INFINIBAND": 1,
    "IBV_LINK_LAYER_ETHERNET": 2,
    "IBV_PORT_ACTIVE": 4,
    "IBV_QPF_GRH_REQUIRED": 1,
    "IBV_GID_TYPE_IB": 0,
    "IBV_GID_TYPE_ROCE_V1": 1,
    "IBV_GID_TYPE_ROCE_V2": 2,
    "IBV_WC_RECV_RDMA_WITH_IMM": 129,
    "IBV_EVENT_CQ_ERR": 0,
    "IBV_EVENT_QP_FATAL": 1,
    "IBV_EVENT_DEVICE_FATAL": 8,
    "IBV_EVENT_SRQ_ERR": 14,
    "IBV_EVENT_QP_LAST_WQE_REACHED": 16,
}
"""The enum values that tep uses, by their C names."""
