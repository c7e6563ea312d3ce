"""Disaggregated prefill and decode: KV pages move layer by layer while later layers are computed.

For engines that own scheduler, memory and block tables: `KvSender` and `KvReceiver`, one of each a
rank. A whole system: `Prefiller`, `Decoder`, `Scheduler`, `PagePool`, and the `Model` that its user
fills in. `simulate` runs clusters of them, `ttft` predicts their times.
"""

from __future__ import annotations

from tep.apps.kvcache.blocks import (
    KvBlocks,
    KvEvent,
    KvLoad,
    KvReceiver,
    KvSend,
    KvSender,
    Patience,
)
from tep.apps.kvcache.decoder import Decoder, DecoderStats
from tep.apps.kvcache.layout import KvBuffer, KvLayout, RankShape
from tep.apps.kvcache.memory import (
    KvMemory,
    PagePool,
    PrefixCache,
    SideOptions,
    host_memory,
    no_memory,
)
from tep.apps.kvcache.model import Chunk, Completion, DecodeWork, Model, PrefillWork, Request
from tep.apps.kvcache.prefiller import Prefiller, PrefillerStats
from tep.apps.kvcache.scheduler import Lease, PrefillerCard, Router, Scheduler

__all__ = [
    "Chunk", "Completion", "DecodeWork", "Decoder", "DecoderStats", "KvBlocks", "KvBuffer",
    "KvEvent", "KvLayout", "KvLoad", "KvMemory", "KvReceiver", "KvSend", "KvSender", "Lease",
    "Model", "PagePool", "Patience", "PrefillWork", "Prefiller", "PrefillerCard",
    "PrefillerStats", "PrefixCache", "RankShape", "Request", "Router", "Scheduler", "SideOptions",
    "host_memory", "no_memory",
]  # fmt: skip
