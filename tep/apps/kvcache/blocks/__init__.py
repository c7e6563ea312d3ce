"""KV blocks between engines that own their scheduler, memory and block tables: one object a rank.

The receiver names the request and its blocks; the ticket goes to the sender by any way; the sender
claims it, is granted an immediate for it, and writes layer by layer. See `KvSender`, `KvReceiver`.
"""

from __future__ import annotations

from tep.apps.kvcache.blocks.cache import KvBlocks
from tep.apps.kvcache.blocks.handle import KvEvent, KvRequest, Patience
from tep.apps.kvcache.blocks.receiver import KvLoad, KvReceiver
from tep.apps.kvcache.blocks.sender import KvSend, KvSender

__all__ = [
    "KvBlocks", "KvEvent", "KvLoad", "KvReceiver", "KvRequest", "KvSend", "KvSender", "Patience",
]  # fmt: skip
