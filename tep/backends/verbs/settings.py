"""The settings of the verbs backend, by the user or NCCL's environment, and what follows from them.

Values only. Defaults suit ConnectX and Soft-RoCE alike; each says where it comes from.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final

from tep.base.errors import UsageError
from tep.host.environment import HCA, Environ, NameList, Number, read_list, read_number, said

__all__ = ["NO_HINTS", "Hints", "Settings"]

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
        sq_depth: rows outstanding on this NIC, whatever peer they go to; None = 1,904, or what the
            device can do. Every queue pair can take as many, and the reads besides, and the
            completion queue holds them all, so that neither can overflow. A peer costs a send queue
            of so many requests, the reads and 16 more, 64 bytes each, rounded up to a power of two:
            128 KiB (256 bytes each, 512 KiB, where the provider has no ibv_create_qp_ex).
        reads: rows of reads outstanding on this NIC besides; None = 128, or what the device has
            room for; 0 = none. Of those from one peer 16 are on the wire at a time, or as many as
            both devices can; further ones hold up the rows behind them.
        imm_recvs: receives without buffers that wait for immediates; None = what the device can
            do, up to 32,767: at 11 million a second that is 3 ms in which nobody polls. Then
            senders wait (RNR).
        msg_recvs_max: message buffers posted at a time; more of them wait their turn; None = 512,
            or what the device can do.
        qps_per_peer: queue pairs for writes; more than one spreads rows over them, which undoes the
            order that a reliable connection keeps. The firmware binds a queue pair to one port of a
            bond (RoCE LAG), so with one of them a peer gets half of the bandwidth of two ports.
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
    sq_depth: int | None = _ranged(None, 1, 32752)
    reads: int | None = _ranged(None, 0, 4096)
    imm_recvs: int | None = _ranged(None, 1, 32767)
    msg_recvs_max: int | None = _ranged(None, 1, 32767)
    qps_per_peer: int = _ranged(1, 1, 16)
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

    @property
    def peer_timeout_s(self) -> float:
        """Within this a dead peer ends in an error: it may die just after it has answered."""
        return self.handshake_s + self.ack_timeout_s + self.drain_s


_UNSET: Final = Number("", "", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hints:
    """The variables, read once for an engine; those that a setting overrides are left out.

    Attributes:
        gid_index: NCCL_IB_GID_INDEX; on Ethernet ports only, as NCCL does.
        traffic_class: NCCL_IB_TC.
        service_level: NCCL_IB_SL.
        hca: NCCL_IB_HCA, which NICs are taken where none are named.
    """

    gid_index: Number = _UNSET
    traffic_class: Number = _UNSET
    service_level: Number = _UNSET
    hca: NameList = field(default_factory=lambda: read_list(HCA, lambda _: None))

    @classmethod
    def read(cls, settings: Settings, nics: int | str | Sequence[str] | None = None) -> Hints:
        """Read what the settings and `nics` leave open."""
        given: Environ = os.environ.get

        def number(name: str, mine: int | None, high: int) -> Number:
            return read_number(name, given, (0, high)) if mine is None else _UNSET

        return cls(
            gid_index=number("NCCL_IB_GID_INDEX", settings.gid_index, 1023),
            traffic_class=number("NCCL_IB_TC", settings.traffic_class, 255),
            service_level=number("NCCL_IB_SL", settings.service_level, 15),
            hca=read_list(HCA, given if nics is None or isinstance(nics, int) else lambda _: None),
        )

    def said(self) -> str:
        """Spell what was read, for `explain`; "" = nothing."""
        meant = {
            "NCCL_IB_GID_INDEX": "gid_index, where the port is Ethernet",
            "NCCL_IB_TC": "traffic_class",
            "NCCL_IB_SL": "service_level",
            HCA: "which NICs are taken",
        }
        return said((self.hca, self.gid_index, self.traffic_class, self.service_level), meant)


NO_HINTS: Final = Hints()
"""An environment in which nothing is set."""
