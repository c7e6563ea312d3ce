"""Disaggregated prefill and decode: KV pages move layer by layer while later layers are computed.

For engines that own scheduler, memory and block tables: `KvSender` and `KvReceiver`, one of each a
rank. A whole system: `Prefiller`, `Decoder`, `Scheduler`, and the `Model` that its user fills in.
`simulate` runs clusters of them, `ttft` predicts their times.
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
from tep.apps.kvcache.decoder import Decoder
from tep.apps.kvcache.layout import KvBuffer, KvLayout
from tep.apps.kvcache.memory import KvMemory, SideOptions
from tep.apps.kvcache.model import Chunk, Completion, DecodeWork, Model, PrefillWork, Request
from tep.apps.kvcache.prefiller import Prefiller
from tep.apps.kvcache.scheduler import PrefillerCard, Scheduler

__all__ = [
    "Chunk", "Completion", "DecodeWork", "Decoder", "KvBlocks", "KvBuffer", "KvEvent", "KvLayout",
    "KvLoad", "KvMemory", "KvReceiver", "KvSend", "KvSender", "Model", "Patience", "PrefillWork",
    "Prefiller", "PrefillerCard", "Request", "Scheduler", "SideOptions",
]  # fmt: skip
