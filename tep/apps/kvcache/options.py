"""What a prefiller and a decoder are told alike: sizes, times, and where memory comes from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tep import TransferEngine
from tep.apps.kvcache.heartbeat import Patience
from tep.apps.kvcache.layout import KvLayout
from tep.apps.kvcache.memory import Allocate, KvMemory, host_memory

__all__ = ["SideOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SideOptions:
    """Settings of one side.

    Attributes:
        npages: pages of its cache.
        tail_slots: how many tails can be under way.
        tail_bytes: length of one; the decoder's is at least the prefiller's.
        patience: times.
        allocate: makes the memory.
        message_bytes: longest message; a dispatch has 4 bytes for each page and each token id.
        buffers: messages that can arrive at one time.
    """

    npages: int
    tail_slots: int = 64
    tail_bytes: int = 1024
    patience: Patience = field(default_factory=Patience)
    allocate: Allocate = host_memory
    message_bytes: int = 8192
    buffers: int = 32

    def memory(self, engines: Sequence[TransferEngine], layout: KvLayout) -> KvMemory:
        """Allocate and register the memory of one side, one engine a rank."""
        return KvMemory(
            engines,
            layout,
            npages=self.npages,
            tail_slots=self.tail_slots,
            tail_bytes=self.tail_bytes,
            allocate=self.allocate,
        )
