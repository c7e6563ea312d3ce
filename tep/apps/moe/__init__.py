"""MoE dispatch and combine over tep: an all-to-all of tokens by counted immediates."""

from __future__ import annotations

from tep.apps.moe.alltoall import AllToAll
from tep.apps.moe.config import Format, MoeConfig
from tep.apps.moe.group import Group, Nvlink, local_groups
from tep.apps.moe.kernels import Gpu, load_gpu
from tep.apps.moe.payload import Received

__all__ = [
    "AllToAll", "Format", "Gpu", "Group", "MoeConfig", "Nvlink", "Received", "load_gpu",
    "local_groups",
]  # fmt: skip
