"""The cache of one rank: its tensors, registered, and the messages of one engine. No protocol.

Rule: every field of a sender, a receiver and their requests is guarded by `KvBlocks.lock`, which
callbacks of the engine's thread and the user's calls share. Whoever holds it calls no verb that
waits for the engine's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from threading import RLock
from typing import Any

from tep import BadDescriptor, MrDesc, MrHandle, NetAddr, TepError, TransferEngine, UsageError
from tep.apps.kvcache.blocks.messages import Card, Message, Note, decode, decode_as, encode
from tep.apps.kvcache.blocks.strided import KvTensor, Placed, describe_tensor
from tep.apps.kvcache.layout import held_heads

__all__ = ["KvBlocks", "PeerCache"]

MESSAGE_BYTES = 32 * 1024
BUFFERS = 64
NOTE_BYTES = 6 * 1024
"""Longest piece of a note: it fits into a datagram of every backend."""

NOTES_MAX = 1024
"""Notes of which pieces are missing; the oldest makes room."""


class PeerCache:
    """Another rank's cache, from its card.

    Attributes:
        card: as it was given.
        addr: of its engine.
        descs: of its regions.
        tensors: by name.
    """

    def __init__(self, raw: bytes) -> None:
        card = self.card = decode_as(Card, raw)
        self.addr = NetAddr.from_bytes(card.addr)
        self.descs = [MrDesc.from_bytes(one) for one in card.regions]
        self.tensors = {one.tensor.name: one for one in card.tensors}
        for one in card.tensors:
            if not 0 <= one.region < len(self.descs):
                raise BadDescriptor(f"card of {self.addr.name}: no region {one.region}: {one}")


class KvBlocks:
    """The KV cache of one rank, for engines that own their memory and their block tables.

    Add every tensor, then make a KvSender, a KvReceiver or both.

    Args:
        engine: of this rank; its messages (`submit_recvs`) belong to this object.
        tp, rank: degree of tensor parallelism, and this rank.

    Attributes:
        engine, tp, rank: as given.
        placed: the tensors added so far.
        garbled: messages that were none.
    """

    def __init__(self, engine: TransferEngine, *, tp: int = 1, rank: int = 0) -> None:
        if not 0 <= rank < tp:
            raise UsageError(f"KvBlocks: rank={rank} of tp={tp}")
        self.engine, self.tp, self.rank = engine, tp, rank
        self.lock = RLock()
        self.placed: dict[str, Placed] = {}
        self.garbled = 0
        self._added: list[tuple[KvTensor, int, dict[str, tuple[int, int]], str, object]] = []
        self._regions: list[tuple[MrHandle, MrDesc]] = []
        self._under_way: dict[Hashable, tuple[int, int]] = {}
        self._handlers: dict[type[Message], Callable[..., object]] = {}
        self._pieces: dict[tuple[object, ...], dict[int, bytes]] = {}

    def add(
        self,
        name: str,
        layer: int,
        array: Any,
        axes: str,
        *,
        heads: int | None = None,
        group: int = 0,
    ) -> None:
        """Describe one tensor: the K, the V or both of one layer.

        Args:
            name: unique, and the same on both sides.
            layer: of the model, as `layer_done` counts.
            array: numpy array or torch tensor, or a view of one.
            axes: a letter for each dimension: b block, h head, t token, d what is contiguous.
            heads: of the whole model; None: as many as here, times tp. 1 for an MLA cache.
            group: which of a request's lists of blocks it uses.
        """
        address, dims, run, device = describe_tensor(array, axes)
        here, tokens = dims.get("h", (1, 0)), dims.get("t", (1, 0))
        total = heads if heads is not None else here[0] * self.tp
        held = len(held_heads(total, self.tp, self.rank, f"KvBlocks.add: {name!r}"))
        if held != here[0]:
            raise UsageError(
                f"KvBlocks.add: {name!r} has {here[0]} heads here; rank {self.rank} of {self.tp} "
                f"holds {held} of heads={total}"
            )
        if self._regions or any(name == one[0].name for one in self._added):
            raise UsageError(f"KvBlocks.add: {name!r} was added before, or the cache is in use")
        tensor = KvTensor(name, layer, total, tokens[0], run, group)
        self._added.append((tensor, address, dims, device, array))

    def card(self) -> bytes:
        """What senders must know of this cache; the first call registers the memory."""
        self.register()
        engine = self.engine
        regions = tuple(desc.to_bytes() for _, desc in self._regions)
        addr = engine.main_address.to_bytes()
        return encode(Card(addr, self.tp, self.rank, tuple(self.placed.values()), regions))

    def mr(self, region: int) -> MrHandle:
        """The handle of a region."""
        return self._regions[region][0]

    def register(self) -> None:
        """Register the memory of all tensors, overlapping ones together. Idempotent."""
        if self._regions:
            return
        if not self._added:
            raise UsageError("KvBlocks: no tensor was added")
        spans = sorted(
            (device, address, address + sum((n - 1) * step for n, step in dims.values()) + tail)
            for tensor, address, dims, device, _ in self._added
            for tail in (tensor.run // dims["d"][0],)
        )
        merged: list[tuple[str, int, int]] = []
        for device, start, stop in spans:
            if merged and merged[-1][0] == device and start <= merged[-1][2]:
                merged[-1] = (device, merged[-1][1], max(stop, merged[-1][2]))
            else:
                merged.append((device, start, stop))
        for device, start, stop in merged:
            self._regions.append(self.engine.reg_mr((start, stop - start, device)))
        for tensor, address, dims, device, _ in self._added:
            region = next(
                k for k, (d, a, b) in enumerate(merged) if d == device and a <= address < b
            )
            steps = (dims["b"][1], dims.get("h", (1, 0))[1], dims.get("t", (1, 0))[1])
            at = Placed(tensor, region, address - merged[region][1], dims["b"][0], *steps)
            self.placed[tensor.name] = at
        self.engine.submit_recvs(MESSAGE_BYTES, BUFFERS, self._on_message)

    @property
    def groups(self) -> int:
        """How many lists of blocks a request has."""
        return 1 + max(one.tensor.group for one in self.placed.values())

    def check_blocks(self, what: str, block_ids: Sequence[Sequence[int]]) -> list[list[int]]:
        """One list of distinct blocks a group, as integers; UsageError if they cannot be."""
        if len(block_ids) != self.groups:
            raise UsageError(
                f"{what}: {len(block_ids)} lists of blocks, the cache has {self.groups} groups"
            )
        found = [[int(block) for block in group] for group in block_ids]
        for one in self.placed.values():
            ids = found[one.tensor.group]
            if ids and not 0 <= min(ids) <= max(ids) < one.blocks:
                raise UsageError(
                    f"{what}: blocks {min(ids)} .. {max(ids)}; {one.tensor.name!r} has 0 .. "
                    f"{one.blocks - 1}"
                )
        for group, ids in enumerate(found):
            if len(set(ids)) != len(ids):
                raise UsageError(f"{what}: group {group} lists a block twice: {ids}")
        return found

    # ------------------------------------------------------------------ messages

    def handle(self, kinds: dict[type[Message], Callable[..., object]]) -> None:
        """Have messages of these kinds handed to these functions, under the lock."""
        taken = self._handlers.keys() & kinds.keys()
        if taken:
            raise UsageError("KvBlocks: it has such a sender or receiver already")
        self.register()
        self._handlers.update(kinds)

    def send(self, peer: NetAddr, message: Message) -> None:
        """Send a message that may be lost: whoever needs it sends it again.

        Where copies of it are on their way, only every second, fourth, eighth call sends another:
        a loss can take long to be known, and messages must not pile up at a NIC that is slow.
        """
        part = message.part if isinstance(message, Note) else 0
        key = (peer.name, peer.epoch, type(message), message.claim, part)
        copies, calls = self._under_way.get(key, (0, 0))
        self._under_way[key] = (copies, calls + 1)
        if calls + 1 >= 1 << copies:
            self._under_way[key] = (copies + 1, 0)
            try:
                self.engine.submit_send(peer, encode(message), on_done=lambda _: self._sent(key))
            except TepError:
                self._sent(key)

    def _sent(self, key: Hashable) -> None:
        with self.lock:
            copies, calls = self._under_way[key]
            if copies > 1:
                self._under_way[key] = (copies - 1, calls)
            else:
                del self._under_way[key]

    def send_note(self, peer: NetAddr, number: int, body: bytes) -> None:
        """Send something of one's own to whoever stands on a peer's cache.

        Notes may be lost, repeated and overtake each other. Who needs one sends it again.

        Args:
            peer: its engine.
            number: of the note; the same number has the same body.
            body: bytes of any length; they travel in pieces.
        """
        addr = self.engine.main_address.to_bytes()
        parts = max(1, -(-len(body) // NOTE_BYTES))
        with self.lock:
            for part in range(parts):
                piece = body[part * NOTE_BYTES : (part + 1) * NOTE_BYTES]
                self.send(peer, Note(peer.epoch, number, addr, part, parts, piece))

    def on_note(self, callback: Callable[[NetAddr, bytes], object]) -> None:
        """Have callback(peer, body) called with each note, under the lock."""

        def take(note: Note) -> None:
            try:
                addr = NetAddr.from_bytes(note.addr)
            except TepError:
                self.garbled += 1
                return
            body = self._join(note, (addr.name, addr.epoch, note.claim, note.parts))
            if body is not None:
                callback(addr, body)

        self.handle({Note: take})

    def _join(self, note: Note, key: tuple[object, ...]) -> bytes | None:
        """The whole note, once its last piece is here."""
        if not 0 <= note.part < note.parts:
            self.garbled += 1
            return None
        pieces = self._pieces.setdefault(key, {})
        pieces[note.part] = note.body
        if len(pieces) < note.parts:
            if len(self._pieces) > NOTES_MAX:
                del self._pieces[next(iter(self._pieces))]
            return None
        del self._pieces[key]
        return b"".join(pieces[part] for part in sorted(pieces))

    def _on_message(self, payload: memoryview) -> None:
        try:
            message = decode(payload)
        except BadDescriptor:
            self.garbled += 1
            return
        handler = self._handlers.get(type(message))
        if handler is not None and message.epoch == self.engine.main_address.epoch:
            with self.lock:
                handler(message)
