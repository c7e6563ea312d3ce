"""One RDMA device: opened, its port, address and partition chosen, its queues as deep as it can.

The settings of the backend stand here too, by the user or NCCL's environment. Defaults suit
ConnectX and Soft-RoCE alike; each says where it comes from.

Rule: the completion queue holds the sum of all that can be in it at once, so it cannot overflow.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from itertools import starmap
from socket import ntohs
from typing import Any, Final, NamedTuple

from tep.backends.base import DomainCaps
from tep.backends.ffi.ibverbs import (
    ENUMS,
    NOT_FORK_SAFE,
    C,
    Context,
    DataPath,
    Library,
    Struct,
    fail,
    link_bps,
)
from tep.backends.verbs.handshake import control_bytes, gid_text, is_link_local, is_mapped
from tep.base.errors import BackendUnavailable, FabricError, UsageError
from tep.host.nics import HCA, Number, read_number

__all__ = [
    "DATAGRAMS_IN", "DATAGRAMS_OUT", "MEANT", "MESSAGES_OUT", "READS", "Depths", "Device",
    "GidChoice", "Settings", "plan_depths", "rank_gids",
]  # fmt: skip

_TIMEOUT_UNIT_S: Final = 4.096e-6
"""Unit of the local ACK timeout: 4.096 us times 2 to the power of the setting. Source: InfiniBand
specification 1.4, section 9.7.6.1.3; quoted."""


def _ranged(default: Any, low: float, high: float) -> Any:
    """The default of an option, with the smallest and the largest value."""
    return field(default=default, metadata={"range": (low, high)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Limits and timeouts of one NIC.

    Attributes:
        port: of the device, from 1.
        pkey: partition key that packets carry, e.g. 0x8001; None = the first of the port's table
            with full membership, or else the first. Both ends have to be in the same partition; on
            Azure the first full one belongs to an availability set (quoted).
        gid_index: entry of the port's address table; None = NCCL_IB_GID_INDEX of the environment,
            or else the best of the ranking.
        sq_depth: rows outstanding on this NIC, whatever peer they go to; None = 1,920, or what the
            device can do. Every queue pair can take as many, and the reads besides, and the
            completion queue holds them all, so that neither can overflow. On ConnectX a peer costs
            a send queue of so many requests and the reads, 64 bytes each, rounded up to a power of
            two: 128 KiB (512 KiB where the provider has no ibv_create_qp_ex).
        reads: rows of reads outstanding on this NIC besides; None = 128, or what the device has
            room for; 0 = none. Of those from one peer 16 are on the wire at a time, or as many as
            both devices can; further ones hold up the rows behind them.
        imm_recvs: receives without buffers that wait for immediates; None = what the device can
            do, up to 32,767: at 11 million a second that is 3 ms in which nobody polls. Then
            senders wait (RNR).
        msg_recvs_max: message buffers posted at a time; more of them wait their turn; None = 512,
            or what the device can do.
        timeout: local ACK timeout exponent: 4.096 us times 2 to its power; 14 is 67 ms. Source:
            fabric-lib. With retry_cnt it says how long packets may fail to pass before rows end as
            UNREACHABLE and failover begins: `ack_timeout_s`, 1.9 s by default. The subnet manager
            of a large InfiniBand fabric may take longer to find a way around a dead link; where
            there is no second NIC to fail over to, 18 (30 s) rides that out.
        retry_cnt: tries after a timeout. 7 is for ever on Soft-RoCE (measured), hence 6.
        rnr_retry: tries while the peer has no receive posted; 7 is for ever: a peer that is slow to
            poll is not dead.
        handshake_s: give a peer up that does not answer for so long, seconds. Its engine answers
            when it is turned, so this is also how long a busy one may take. A connection costs a
            NIC eight commands, 1 ms together (guessed): raise this where more than a thousand peers
            connect at the same time.
        resend_s: first pause before a handshake datagram is sent again, seconds; it doubles.
        drain_s: how long a failed queue pair may take to return what it holds, seconds.
        traffic_class: of all packets with a routing header; None = NCCL_IB_TC of the environment,
            or else 106 over RoCE v2, and 0 elsewhere. What it means is the network's business. 106
            is DSCP 26 with ECN: what UCX sends by default, and commonly the lossless class of a
            network with PFC. Class 0 is dropped under load.
        service_level: of all packets, the virtual lane on InfiniBand; None = NCCL_IB_SL of the
            environment, or else 0.
    """

    port: int = _ranged(1, 1, 255)
    pkey: int | None = _ranged(None, 1, 0xFFFF)
    gid_index: int | None = _ranged(None, 0, 0xFFFF)
    sq_depth: int | None = _ranged(None, 1, 32768)
    reads: int | None = _ranged(None, 0, 4096)
    imm_recvs: int | None = _ranged(None, 1, 32767)
    msg_recvs_max: int | None = _ranged(None, 1, 32767)
    timeout: int = _ranged(14, 1, 31)
    retry_cnt: int = _ranged(6, 0, 7)
    rnr_retry: int = _ranged(7, 0, 7)
    handshake_s: float = _ranged(3.0, 0.01, 3600.0)
    resend_s: float = _ranged(0.02, 0.001, 60.0)
    drain_s: float = _ranged(1.0, 0.01, 60.0)
    traffic_class: int | None = _ranged(None, 0, 255)
    service_level: int | None = _ranged(None, 0, 15)

    def __post_init__(self) -> None:
        for each in fields(self):
            value, (low, high) = getattr(self, each.name), each.metadata["range"]
            if value is not None and not low <= value <= high:
                raise UsageError(f"verbs: {each.name}={value}; {low} to {high} is possible")

    @property
    def ack_timeout_s(self) -> float:
        """The longest time for which a dead peer can keep a posted row, seconds.

        A NIC may take up to four times the timeout for each try (InfiniBand specification 1.4,
        section 9.7.6.1.3; quoted; Soft-RoCE takes it once, measured).
        """
        return 4 * _TIMEOUT_UNIT_S * (1 << self.timeout) * (self.retry_cnt + 1)

    def hints(self) -> tuple[Number, Number, Number]:
        """Read from the environment what is left open: GID index, traffic class, service level."""

        def read(name: str, mine: int | None, high: int) -> Number:
            return read_number(name, os.environ.get if mine is None else _unset, (0, high))

        return (
            read("NCCL_IB_GID_INDEX", self.gid_index, 1023),
            read("NCCL_IB_TC", self.traffic_class, 255),
            read("NCCL_IB_SL", self.service_level, 15),
        )

    @property
    def peer_timeout_s(self) -> float:
        """Within this a dead peer ends in an error: it may die just after it has answered."""
        return self.handshake_s + self.ack_timeout_s + self.drain_s


def _unset(_: str) -> None:
    """Stand for an environment in which nothing is set."""


MEANT: Final = {
    "NCCL_IB_GID_INDEX": "gid_index, where the port is Ethernet",
    "NCCL_IB_TC": "traffic_class",
    "NCCL_IB_SL": "service_level",
    HCA: "which NICs are taken",
}
"""NCCL's variables that are read where the user leaves something open, and what each stands for."""


_IB: Final = ENUMS["IBV_LINK_LAYER_INFINIBAND"]
_ETHERNET: Final = ENUMS["IBV_LINK_LAYER_ETHERNET"]
_ACTIVE: Final = ENUMS["IBV_PORT_ACTIVE"]
_GRH_REQUIRED: Final = ENUMS["IBV_QPF_GRH_REQUIRED"]
_HOPS: Final = 64  # as fabric-lib
_ROCE_CLASS: Final = 106  # DSCP 26, ECN-capable; UCX's UCT_IB_DEFAULT_ROCEV2_DSCP (quoted)
_V2: Final = ENUMS["IBV_GID_TYPE_ROCE_V2"]
_READS_AT_A_TIME: Final = 16  # of one queue pair: what ConnectX has (quoted)

# What is posted on our queue pairs; a provider then leaves no room for more. mlx5 makes requests of
# 64 bytes in place of 256 of it (_sq_overhead of rdma-core 44; quoted).
_OPS: Final = ("RDMA_WRITE", "RDMA_WRITE_WITH_IMM", "SEND", "RDMA_READ")
_SEND_OPS: Final = sum(ENUMS[f"IBV_QP_EX_WITH_{op}"] for op in _OPS)
_EX_MASK: Final = ENUMS["IBV_QP_INIT_ATTR_PD"] | ENUMS["IBV_QP_INIT_ATTR_SEND_OPS_FLAGS"]
_INLINE_BYTES: Final = 28
"""A row up to this length is copied into its request when it is posted singly: the NIC reads once
less. A request of 64 bytes has room for so much (mlx5_calc_send_wqe of rdma-core 44; quoted)."""

_MSG_BYTES_MAX: Final = 1 << 20
_RC: Final = ENUMS["IBV_QPT_RC"]
_FULL_MEMBER: Final = 0x8000
_DEFAULT_PKEY: Final = 0xFFFF
_NO_EX: Final = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})


class Device(Context):
    """An open device with its port, which is up and has an address, or BackendUnavailable.

    Attributes:
        reads_asked, reads_served: reads that one queue pair may have on the wire, and can answer,
            at a time.
        inline_max: bytes of a row that the provider copies into its request; 0: none.
    """

    def __init__(self, lib: Library, name: str, settings: Settings) -> None:
        super().__init__(lib, name)
        self.settings = settings
        self._closed = False
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            self._read()
            undo.pop_all()
        self._create_ex = lib.extended_create(self.pointer)
        self.inline_max = 0
        self.data = DataPath(self.pointer)

    def _read(self) -> None:
        port = self.settings.port
        self.port = C.ibv_port_attr()
        self.ok("ibv_query_port", self.pointer, port, ctypes.byref(self.port), port=port)
        if self.port.state != _ACTIVE:
            raise BackendUnavailable(
                f"{self.name}: port {port} is not active (state {self.port.state}); is the link up?"
            )
        if self.port.link_layer not in {_IB, _ETHERNET}:
            raise BackendUnavailable(
                f"{self.name}: its link layer is {self.port.link_layer}, neither InfiniBand nor "
                "Ethernet. So say EFA devices, which have no reliable connections: open them by "
                "the backend libfabric with provider='efa', or by the backend efa"
            )
        self.is_ib = bool(self.port.link_layer == _IB)
        gid_index, traffic_class, service_level = self.settings.hints()
        self.gids = self._rank()
        self.gid = self._pick(gid_index)
        self.pkey_index, self.pkey = self._pick_pkey()
        self.reads_asked = min(_READS_AT_A_TIME, int(self.limits.max_qp_init_rd_atom))
        self.reads_served = min(_READS_AT_A_TIME, int(self.limits.max_qp_rd_atom))
        settings = self.settings
        usual = _ROCE_CLASS if not self.is_ib and self.gid.gid_type == _V2 else 0
        self.traffic_class = _first(settings.traffic_class, traffic_class.value, usual)
        self.service_level = _first(settings.service_level, service_level.value, 0)

    def _rank(self) -> list[GidChoice]:
        room = int(self.port.gid_tbl_len) * max(1, int(self.limits.phys_port_cnt))
        entries = (C.ibv_gid_entry * room)()
        each = ctypes.sizeof(C.ibv_gid_entry)
        n = self.lib.ask("_ibv_query_gid_table", self.pointer, ctypes.byref(entries), room, 0, each)
        if n < 0:
            fail("ibv_query_gid_table", -n, device=self.name)
        table = [
            (int(entry.gid_index), bytes(entry.gid.raw), int(entry.gid_type))
            for entry in entries[:n]
            if entry.port_num == self.settings.port
        ]
        if self.is_ib:
            return [GidChoice(0, *seen, "InfiniBand") for seen in table[:1]]
        return rank_gids(table)

    def _pick(self, hint: Number) -> GidChoice:
        wanted = self.settings.gid_index
        if not self.gids:
            raise BackendUnavailable(
                f"{self.name}: port {self.settings.port} has no address; give its network "
                "interface an IP address"
            )
        option = f"gid_index={wanted}"
        if wanted is None and not self.is_ib:
            wanted, option = hint.value, f"{hint.name}={hint.text}"
        if wanted is None:
            return self.gids[0]
        for choice in self.gids:
            if choice.entry == wanted:
                return choice
        there = "; ".join(map(str, self.gids))
        raise UsageError(f"verbs: {option} is empty on {self.name}; there are: {there}")

    def _pick_pkey(self) -> tuple[int, int]:
        """(index, key) of the partition that is wanted."""
        found, key = {}, ctypes.c_uint16()
        for index in range(int(self.port.pkey_tbl_len)):
            port = self.settings.port
            if self.lib.ask("ibv_query_pkey", self.pointer, port, index, ctypes.byref(key)):
                break
            if key.value:  # 0 marks an entry that is not in use
                found[index] = ntohs(key.value)
        wanted = self.settings.pkey
        full = [index for index, seen in found.items() if seen & _FULL_MEMBER]
        # The top bit only tells full members from limited ones: 0x0001 names 0x8001 as well.
        named = [
            index
            for mask in (0, _FULL_MEMBER)
            for index, seen in found.items()
            if wanted is not None and seen ^ wanted == mask
        ]
        if wanted is not None and not named:
            there = ", ".join(f"{seen:#06x}" for seen in found.values()) or "none"
            raise UsageError(f"verbs: pkey={wanted:#06x} is not in {self.name}'s table: {there}")
        index = next(iter([*named, *full, *found]), 0)
        return index, found.get(index, _DEFAULT_PKEY)

    @property
    def link_bps(self) -> int:
        return link_bps(self.sysfs, self.settings.port)

    @property
    def no_reads(self) -> str:
        """Why there are no reads, or "" where there are."""
        if self.settings.reads == 0:
            return "it was opened with reads=0"
        if self.reads_asked and self.reads_served:
            return ""
        limits = self.limits
        return (
            f"{self.name} cannot read: its max_qp_init_rd_atom is {limits.max_qp_init_rd_atom} and "
            f"its max_qp_rd_atom {limits.max_qp_rd_atom}"
        )

    def route(self, gid: bytes, lid: int) -> Struct:
        found = C.ibv_ah_attr()
        found.port_num = self.settings.port
        found.sl = self.service_level
        if self.is_ib:
            found.dlid = lid
        if not self.is_ib or self.port.flags & _GRH_REQUIRED:
            found.is_global = 1
            found.grh.dgid = C.ibv_gid.from_buffer_copy(gid)
            found.grh.sgid_index = self.gid.entry
            found.grh.hop_limit = _HOPS
            found.grh.traffic_class = self.traffic_class
        return found

    def make_rc(self, cq: int, srq: int, requests: int) -> int:
        """Make a reliable queue pair for `requests`; raise FabricError if the device refuses."""
        attr = C.ibv_qp_init_attr_ex(send_cq=cq, recv_cq=cq, srq=srq or None, qp_type=_RC)
        attr.cap.max_send_wr, attr.cap.max_send_sge = requests, 1
        attr.cap.max_inline_data = _INLINE_BYTES
        if self._create_ex is not None:
            attr.comp_mask, attr.pd, attr.send_ops_flags = _EX_MASK, self.pd, _SEND_OPS
            found = self._create_ex(ctypes.addressof(attr))
            if found:
                self.inline_max = min(_INLINE_BYTES, int(attr.cap.max_inline_data))
                return found
            if ctypes.get_errno() not in _NO_EX:
                fail("ibv_create_qp_ex", ctypes.get_errno(), device=self.name, requests=requests)
        found = self.make("ibv_create_qp", self.pd, ctypes.byref(attr), requests=requests)
        self._create_ex = None  # refused there and possible here: it has no send_ops_flags
        self.inline_max = min(_INLINE_BYTES, int(attr.cap.max_inline_data))
        return found

    def make_srq(self, depth: int) -> int:
        attr = C.ibv_srq_init_attr()
        attr.attr.max_wr, attr.attr.max_sge = depth, 1
        return self.make("ibv_create_srq", self.pd, ctypes.byref(attr), max_wr=depth)

    def try_queue_pair(self, requests: int) -> None:
        """Make a queue pair for so many requests, and free it again; raises as make_rc()."""
        cq = self.make("ibv_create_cq", self.pointer, 1, None, None, 0)
        try:
            self.free("ibv_destroy_qp", self.make_rc(cq, 0, requests))
        finally:
            self.free("ibv_destroy_cq", cq)

    def has_link(self) -> bool:
        if self._closed:
            return False
        port = C.ibv_port_attr()
        rc = self.lib.ask("ibv_query_port", self.pointer, self.settings.port, ctypes.byref(port))
        return rc == 0 and bool(port.state == _ACTIVE)

    def close(self) -> None:
        self._closed = True
        super().close()

    def caps(self, sq_depth: int, reads: int, memory_kinds: tuple[str, ...]) -> DomainCaps:
        settings, port = self.settings, self.port
        longest_control = control_bytes(port.active_mtu)
        return DomainCaps(
            backend="verbs",
            nic=self.name,
            link_bps=self.link_bps,
            sq_depth=sq_depth,
            max_write_bytes=int(port.max_msg_sz),
            max_msg_bytes=min(_MSG_BYTES_MAX, int(port.max_msg_sz)),
            ordered=True,
            memory_kinds=memory_kinds,
            peer_timeout_s=settings.peer_timeout_s,
            control_bytes=longest_control,
            imm_source=longest_control > 0,
            reads=reads,
            no_reads=self.no_reads or f"sq_depth={sq_depth} leaves no room for them",
        )

    def describe(self) -> str:
        rate = f"{self.link_bps / 1e9:g} Gb/s" if self.link_bps else "rate unknown"
        layer = "InfiniBand" if self.is_ib else "Ethernet"
        partition = "" if self.pkey == _DEFAULT_PKEY else f", P_Key {self.pkey:#06x}"
        return (
            f"{self.name} port {self.settings.port}: {layer}, {rate}, MTU "
            f"{128 << self.port.active_mtu}, {self.gid}{partition}, traffic class "
            f"{self.traffic_class}, service level {self.service_level}"
            f"{'' if self.lib.fork_safe else NOT_FORK_SAFE}"
        )


MESSAGES_OUT: Final = 64
"""Messages on their way out at a time."""

DATAGRAMS_IN: Final = 1024
"""Datagrams that may wait for a poll: requests of as many peers that connect at the same time."""

DATAGRAMS_OUT: Final = 256

READS: Final = 128
"""Rows of reads outstanding, where the user names no number."""

_REQUESTS: Final = 2048  # the queue is as long as a power of two
_PARTS: Final = 16  # one of so many in a shorter queue is for reads

_MESSAGES_IN: Final = 512
_IMMS_MAX: Final = 32767


def _first(*values: int | None) -> int:
    return next(value for value in values if value is not None)


class Depths(NamedTuple):
    """Entries of each queue.

    Attributes:
        rows, reads: outstanding; a queue pair for rows has room for all of both.
        imms, messages_in: receives that wait for immediates, and for messages.
        cq: completions that the completion queue holds.
    """

    rows: int
    reads: int
    imms: int
    messages_in: int
    cq: int


def plan_depths(device: Device) -> Depths:
    """Choose the depths for one NIC.

    A depth that the user names is kept or refused (UsageError); one that is left open follows the
    device, which may refuse even the shortest queue (FabricError).
    """
    settings, attr = device.settings, device.limits
    rows, reads = _find_rows(device)
    messages_in = _within(
        device, "msg_recvs_max", settings.msg_recvs_max, _MESSAGES_IN, int(attr.max_srq_wr)
    )
    rest = rows + reads + messages_in + MESSAGES_OUT + DATAGRAMS_IN + DATAGRAMS_OUT
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
    settings, most = device.settings, int(device.limits.max_qp_wr)
    reads = 0 if device.no_reads else settings.reads
    refusal: FabricError | None = None
    for wanted in _candidates(settings.sq_depth, reads, most):
        try:
            device.try_queue_pair(sum(wanted))
            return wanted
        except FabricError as error:
            refusal = error
    if settings.sq_depth is None and settings.reads is None and refusal is not None:
        raise refusal
    raise UsageError(
        f"verbs: sq_depth={settings.sq_depth} reads={reads} is more than {device.name} can do: its "
        f"max_qp_wr is {most}, and {refusal or 'rows need room too'}; set smaller ones"
    ) from refusal


def _candidates(rows: int | None, reads: int | None, most: int) -> Iterator[tuple[int, int]]:
    """Yield (rows, reads) to be tried in turn, where some are named and requests are limited."""
    if rows is not None:
        yield from [(rows, each) for each in ((READS, 0) if reads is None else (reads,))]
        return
    total = min(_REQUESTS, most)
    while total > (reads or 0):
        some = min(READS, total // _PARTS) if reads is None else reads
        yield total - some, some
        total //= 2


class GidChoice(NamedTuple):
    """An entry of the table with its place in the ranking; `rank` 0 is best."""

    rank: int
    entry: int
    gid: bytes
    gid_type: int
    why: str

    def __str__(self) -> str:
        return f"GID {self.entry} {gid_text(self.gid)}: {self.why} (rank {self.rank})"


def rank_gids(table: Iterable[tuple[int, bytes, int]]) -> list[GidChoice]:
    """Sort the entries (number, GID, type) of an Ethernet port, best first; equal ranks by number.

    RoCE v2 with a routable IPv4 address is what every network of this kind carries; then routable
    IPv6, then link-local ones, which stay within a subnet; RoCE v1 is never routed.
    """
    return sorted(starmap(_rank, table))


def _rank(entry: int, gid: bytes, gid_type: int) -> GidChoice:
    local = is_link_local(gid)
    family = "IPv4" if is_mapped(gid) else "IPv6"
    reach = "link-local" if local else "routable"
    if gid_type == _V2:
        rank = 2 * local + (family == "IPv6")
        return GidChoice(rank, entry, gid, gid_type, f"RoCE v2, {reach} {family}")
    why = f"RoCE v1, {reach} {family}; never routed"
    return GidChoice(4 + local, entry, gid, gid_type, why)
