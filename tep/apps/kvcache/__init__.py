"""Disaggregated prefill and decode: KV pages move layer by layer while later layers are computed.

The parts that an inference engine embeds: `Prefiller`, `Decoder`, `Scheduler`, `PagePool`, and the
`Model` that it fills in. `simulate` runs whole clusters of them, `ttft` predicts their times.
"""

from __future__ import annotations

from tep.apps.kvcache.attempt import DecoderStats
from tep.apps.kvcache.decoder import Decoder
from tep.apps.kvcache.heartbeat import Patience
from tep.apps.kvcache.job import PrefillerStats
from tep.apps.kvcache.layout import KvBuffer, KvLayout, RankShape
from tep.apps.kvcache.memory import KvMemory, host_memory, no_memory
from tep.apps.kvcache.model import Chunk, Completion, DecodeWork, Model, PrefillWork, Request
from tep.apps.kvcache.options import SideOptions
from tep.apps.kvcache.pool import PagePool, PrefixCache
from tep.apps.kvcache.prefiller import Prefiller
from tep.apps.kvcache.routing import Lease, PrefillerCard, Router
from tep.apps.kvcache.scheduler import Scheduler

__all__ = [
    "Chunk",
    "Completion",
    "DecodeWork",
    "Decoder",
    "DecoderStats",
    "KvBuffer",
    "KvLayout",
    "KvMemory",
    "Lease",
    "Model",
    "PagePool",
    "Patience",
    "PrefillWork",
    "Prefiller",
    "PrefillerCard",
    "PrefillerStats",
    "PrefixCache",
    "RankShape",
    "Request",
    "Router",
    "Scheduler",
    "SideOptions",
    "host_memory",
    "no_memory",
]
