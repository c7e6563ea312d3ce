"""One RDMA device: found, chosen, opened; its port, its address table and its protection domain.

What is made on it (queues, regions, queue pairs) is held here until close, so that nothing is freed
while something that needs it lives.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
from pathlib import Path
from socket import ntohs
from typing import Final

from tep.backends.base import DomainCaps
from tep.backends.ffi.ibverbs import NOT_FORK_SAFE, DataPath, Library, fail
from tep.backends.ffi.ibverbs_structs import (
    ENUMS,
    AhAttr,
    DeviceAttr,
    Gid,
    GidEntry,
    Mr,
    PortAttr,
    QpInitAttrEx,
)
from tep.backends.verbs.gids import GidChoice, GidSeen, rank_gids
from tep.backends.verbs.handshake import control_bytes
from tep.backends.verbs.hints import NO_HINTS, Hints
from tep.backends.verbs.settings import Settings
from tep.base.errors import BackendUnavailable, FabricError, UsageError

__all__ = ["Device"]

_IB: Final = ENUMS["IBV_LINK_LAYER_INFINIBAND"]
_ETHERNET: Final = ENUMS["IBV_LINK_LAYER_ETHERNET"]
_ACTIVE: Final = ENUMS["IBV_PORT_ACTIVE"]
_GRH_REQUIRED: Final = ENUMS["IBV_QPF_GRH_REQUIRED"]
_HOPS: Final = 64  # as fabric-lib
_ROCE_CLASS: Final = 106  # DSCP 26, ECN-capable; UCX's UCT_IB_DEFAULT_ROCEV2_DSCP (quoted)
_V2: Final = ENUMS["IBV_GID_TYPE_ROCE_V2"]
_READS_AT_A_TIME: Final = 16  # of one queue pair: what ConnectX has (quoted)

# What is posted on our queue pairs; a provider then leaves no room for more. Requests of 64 bytes
# in place of 256 are what _sq_overhead in mlx5 of rdma-core 44 makes of it; quoted.
_SEND_OPS: Final = (
    ENUMS["IBV_QP_EX_WITH_RDMA_WRITE"]
    | ENUMS["IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM"]
    | ENUMS["IBV_QP_EX_WITH_SEND"]
    | ENUMS["IBV_QP_EX_WITH_RDMA_READ"]
)
_EX_MASK: Final = ENUMS["IBV_QP_INIT_ATTR_PD"] | ENUMS["IBV_QP_INIT_ATTR_SEND_OPS_FLAGS"]
_WQE_BYTES, _WQE_BYTES_PLAIN = 64, 256
_RC: Final = ENUMS["IBV_QPT_RC"]
_FULL_MEMBER: Final = 0x8000
_DEFAULT_PKEY: Final = 0xFFFF
_NO_EX: Final = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})


class Device:
    """An open device.

    Args:
        lib: the library.
        name: of the device, e.g. "mlx5_0".
        settings: which port, which address.
        hints: what the environment says where the settings say nothing.

    Attributes:
        dead: it has failed for good; freeing what is on it may fail too, and is no error.
        wqe_bytes: what a request takes in a send queue of ConnectX.
        inline_max: bytes of a row that the provider copies into its request; 0: none.

    Raises:
        BackendUnavailable: it cannot be opened, or its port is down or has no address.
    """

    def __init__(
        self, lib: Library, name: str, settings: Settings, hints: Hints = NO_HINTS
    ) -> None:
        self.lib = lib
        self._hints = hints
        self.name = name
        self.settings = settings
        self.dead = False
        self._closed = False
        try:
            self.context, self._sysfs = lib.open_device(name)
        except LookupError:
            there = ", ".join(name for name, _ in lib.devices()) or "none"
            raise BackendUnavailable(f"no RDMA device {name!r}; there are: {there}") from None
        with contextlib.ExitStack() as undo:
            undo.callback(lib.ask, "ibv_close_device", self.context)
            self._read()
            self.pd = lib.make("ibv_alloc_pd", self.context, device=name)
            undo.pop_all()
        self._create_ex = lib.extended_create(self.context)
        self.wqe_bytes = _WQE_BYTES if self._create_ex else _WQE_BYTES_PLAIN
        self.inline_max = 0
        self.data = DataPath(self.context)

    def _read(self) -> None:
        lib, port = self.lib, self.settings.port
        self.attr = DeviceAttr()
        lib.ok("ibv_query_device", self.context, ctypes.byref(self.attr), device=self.name)
        self.port = PortAttr()
        lib.ok(
            "ibv_query_port",
            self.context,
            port,
            ctypes.byref(self.port),
            device=self.name,
            port=port,
        )
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
        self.gids = self._rank()
        self.gid = self._pick()
        self.pkey_index, self.pkey = self._pick_pkey()

    def _rank(self) -> list[GidChoice]:
        room = int(self.port.gid_tbl_len) * max(1, int(self.attr.phys_port_cnt))
        entries = (GidEntry * room)()
        n = self.lib.ask(
            "_ibv_query_gid_table",
            self.context,
            ctypes.byref(entries),
            room,
            0,
            ctypes.sizeof(GidEntry),
        )
        if n < 0:
            fail("ibv_query_gid_table", -n, device=self.name)
        table = [
            GidSeen(int(entry.gid_index), bytes(entry.gid.raw), int(entry.gid_type))
            for entry in entries[:n]
            if entry.port_num == self.settings.port
        ]
        if self.is_ib:
            return [GidChoice(0, seen, "InfiniBand") for seen in table[:1]]
        return rank_gids(table)

    def _pick(self) -> GidChoice:
        wanted = self.settings.gid_index
        if not self.gids:
            raise BackendUnavailable(
                f"{self.name}: port {self.settings.port} has no address; give its network "
                "interface an IP address"
            )
        option = f"gid_index={wanted}"
        if wanted is None and not self.is_ib:
            wanted, hint = self._hints.gid_index.value, self._hints.gid_index
            option = f"{hint.name}={hint.text}"
        if wanted is None:
            return self.gids[0]
        for choice in self.gids:
            if choice.seen.entry == wanted:
                return choice
        there = "; ".join(map(str, self.gids))
        raise UsageError(f"verbs: {option} is empty on {self.name}; there are: {there}")

    def _pick_pkey(self) -> tuple[int, int]:
        """(index, key) of the partition that is wanted."""
        found, key = {}, ctypes.c_uint16()
        for index in range(int(self.port.pkey_tbl_len)):
            port = self.settings.port
            if self.lib.ask("ibv_query_pkey", self.context, port, index, ctypes.byref(key)):
                break
            if key.value:  # 0 marks an entry that is not in use
                found[index] = ntohs(key.value)
        wanted = self.settings.pkey
        full = [index for index, seen in found.items() if seen & _FULL_MEMBER]
        # The top bit only tells full members from limited ones: 0x0001 names 0x8001 as well.
        named = (
            []
            if wanted is None
            else [
                index
                for mask in (0, _FULL_MEMBER)
                for index, seen in found.items()
                if seen ^ wanted == mask
            ]
        )
        if wanted is not None and not named:
            there = ", ".join(f"{seen:#06x}" for seen in found.values()) or "none"
            raise UsageError(f"verbs: pkey={wanted:#06x} is not in {self.name}'s table: {there}")
        index = next(iter([*named, *full, *found]), 0)
        return index, found.get(index, _DEFAULT_PKEY)

    @property
    def is_ib(self) -> bool:
        """Whether the port is InfiniBand and not Ethernet."""
        return bool(self.port.link_layer == _IB)

    @property
    def link_bps(self) -> int:
        """Nominal rate, bits a second, from sysfs; 0 where it says nothing."""
        try:
            text = Path(self._sysfs, "ports", str(self.settings.port), "rate").read_text("ascii")
            return round(float(text.split()[0]) * 1e9)
        except (OSError, ValueError, IndexError):
            return 0

    @property
    def reads_asked(self) -> int:
        """Reads that one queue pair may have on the wire at a time; more of them wait in it."""
        return min(_READS_AT_A_TIME, int(self.attr.max_qp_init_rd_atom))

    @property
    def reads_served(self) -> int:
        """Reads of its peer's that one queue pair can answer at a time."""
        return min(_READS_AT_A_TIME, int(self.attr.max_qp_rd_atom))

    @property
    def no_reads(self) -> str:
        """Why there are no reads, or "" where there are."""
        if self.settings.reads == 0:
            return "it was opened with reads=0"
        if self.reads_asked and self.reads_served:
            return ""
        return (
            f"{self.name} cannot read: its max_qp_init_rd_atom is {self.attr.max_qp_init_rd_atom} "
            f"and its max_qp_rd_atom {self.attr.max_qp_rd_atom}"
        )

    @property
    def traffic_class(self) -> int:
        """The class of packets with a routing header, see Settings."""
        if self.settings.traffic_class is not None:
            return self.settings.traffic_class
        if self._hints.traffic_class.value is not None:
            return self._hints.traffic_class.value
        return _ROCE_CLASS if not self.is_ib and self.gid.seen.gid_type == _V2 else 0

    @property
    def service_level(self) -> int:
        """The service level of all packets, see Settings."""
        if self.settings.service_level is not None:
            return self.settings.service_level
        return self._hints.service_level.value or 0

    def route(self, gid: bytes, lid: int) -> AhAttr:
        """How packets get to a peer."""
        found = AhAttr()
        found.port_num = self.settings.port
        found.sl = self.service_level
        if self.is_ib:
            found.dlid = lid
        if not self.is_ib or self.port.flags & _GRH_REQUIRED:
            found.is_global = 1
            found.grh.dgid = Gid.from_buffer_copy(gid)
            found.grh.sgid_index = self.gid.seen.entry
            found.grh.hop_limit = _HOPS
            found.grh.traffic_class = self.traffic_class
        return found

    def make_rc(self, cq: int, srq: int, requests: int) -> int:
        """Make a reliable queue pair for `requests`.

        Raises:
            FabricError: the device refuses.
        """
        attr = QpInitAttrEx(send_cq=cq, recv_cq=cq, srq=srq or None, qp_type=_RC)
        attr.cap.max_send_wr, attr.cap.max_send_sge = requests, 1
        attr.cap.max_inline_data = self.settings.inline_bytes
        if self._create_ex is not None:
            attr.comp_mask, attr.pd, attr.send_ops_flags = _EX_MASK, self.pd, _SEND_OPS
            found = self._create_ex(ctypes.addressof(attr))
            if found:
                self.inline_max = min(self.settings.inline_bytes, int(attr.cap.max_inline_data))
                return found
            if ctypes.get_errno() not in _NO_EX:
                fail("ibv_create_qp_ex", ctypes.get_errno(), device=self.name, requests=requests)
        found = self.lib.make(
            "ibv_create_qp",
            self.pd,
            ctypes.byref(attr),
            device=self.name,
            requests=requests,
        )
        # What is refused there and possible here: this provider has no send_ops_flags. What that
        # costs is in the NIC's report.
        self._create_ex, self.wqe_bytes = None, _WQE_BYTES_PLAIN
        self.inline_max = min(self.settings.inline_bytes, int(attr.cap.max_inline_data))
        return found

    def try_queue_pair(self, requests: int) -> None:
        """Make a queue pair for so many requests, and free it again.

        Raises:
            FabricError: the device refuses.
        """
        cq = self.lib.make("ibv_create_cq", self.context, 1, None, None, 0, device=self.name)
        try:
            self.free("ibv_destroy_qp", self.make_rc(cq, 0, requests))
        finally:
            self.free("ibv_destroy_cq", cq)

    def reg_mr(self, ptr: int, nbytes: int, access: int) -> Mr:
        """Register memory; the caller keeps it mapped until dereg_mr."""
        found = self.lib.make(
            "ibv_reg_mr_iova2",
            self.pd,
            ptr,
            nbytes,
            ptr,
            access,
            device=self.name,
            ptr=hex(ptr),
            nbytes=nbytes,
        )
        return Mr.from_address(found)

    def reg_dmabuf_mr(self, fd: int, offset: int, ptr: int, nbytes: int, access: int) -> Mr:
        """Register device memory that was exported as a dma-buf.

        Raises:
            FabricError: the library is too old for it, or the device refuses.
        """
        if not self.lib.has_dmabuf:
            raise FabricError(
                f"{self.lib.path} has no ibv_reg_dmabuf_mr; rdma-core 34 or later does",
                code="PROVIDER",
            )
        found = self.lib.make(
            "ibv_reg_dmabuf_mr",
            self.pd,
            offset,
            nbytes,
            ptr,
            fd,
            access,
            device=self.name,
            fd=fd,
            nbytes=nbytes,
        )
        return Mr.from_address(found)

    def dereg_mr(self, mr: Mr) -> None:
        """Withdraw a region."""
        self.free("ibv_dereg_mr", ctypes.addressof(mr))

    def has_link(self) -> bool:
        """Whether the port is up now."""
        if self._closed:
            return False
        port = PortAttr()
        rc = self.lib.ask("ibv_query_port", self.context, self.settings.port, ctypes.byref(port))
        return rc == 0 and bool(port.state == _ACTIVE)

    def free(self, name: str, *arguments: object) -> None:
        """Give something back."""
        try:
            self.lib.ok(name, *arguments, device=self.name)
        except FabricError:
            if not self.dead:
                raise

    def close(self) -> None:
        """Let go. What was made on the device must be gone: EBUSY says that something is left."""
        self._closed = True
        self.free("ibv_dealloc_pd", self.pd)
        self.free("ibv_close_device", self.context)

    def caps(self, sq_depth: int, reads: int, memory_kinds: tuple[str, ...]) -> DomainCaps:
        """What a NIC on this device can do."""
        settings, port = self.settings, self.port
        longest_control = control_bytes(port.active_mtu)
        return DomainCaps(
            backend="verbs",
            nic=self.name,
            link_bps=self.link_bps,
            sq_depth=sq_depth,
            max_write_bytes=int(port.max_msg_sz),
            max_msg_bytes=min(settings.max_msg_bytes, int(port.max_msg_sz)),
            ordered=settings.qps_per_peer == 1,
            imm_eats_recv=True,
            memory_kinds=memory_kinds,
            peer_timeout_s=settings.peer_timeout_s,
            control_bytes=longest_control,
            imm_source=longest_control > 0,
            reads=reads,
            no_reads=self.no_reads or f"sq_depth={sq_depth} leaves no room for them",
        )

    def _bond(self) -> str:
        """Say so where several ports are behind the device (RoCE LAG); "" = there are not."""
        for slaves in Path(self._sysfs, "device", "net").glob("*/master/bonding/slaves"):
            count = len(slaves.read_text("ascii").split())
            if count > 1 and self.settings.qps_per_peer == 1:
                return f"; a bond of {count} ports, one for each peer: see qps_per_peer"
        return ""

    def describe(self) -> str:
        """Say in a line what this is and how it is addressed."""
        rate = f"{self.link_bps / 1e9:g} Gb/s" if self.link_bps else "rate unknown"
        layer = "InfiniBand" if self.is_ib else "Ethernet"
        partition = "" if self.pkey == _DEFAULT_PKEY else f", P_Key {self.pkey:#06x}"
        return (
            f"{self.name} port {self.settings.port}: {layer}, {rate}, MTU "
            f"{128 << self.port.active_mtu}, {self.gid}{partition}, traffic class "
            f"{self.traffic_class}, service level {self.service_level}"
            f"{self._bond()}{'' if self.lib.fork_safe else NOT_FORK_SAFE}"
        )
