"""NCCL's variables for RDMA NICs, read where a setting of ours is unset."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from tep.backends.verbs.settings import Settings
from tep.host.environment import HCA, Environ, NameList, Number, read_list, read_number, said

__all__ = ["NO_HINTS", "Hints"]

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
