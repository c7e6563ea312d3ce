"""The cache of one rank: its tensors, registered, and the messages of one engine. No protocol.

Rule: every field of a sender, a receiver and their requests is guarded by `KvBlocks.lock`, which
callbacks of the engine's thread and the user's calls share. Whoever holds it calls no verb that
waits for the engine's thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache, partial
from operator import itemgetter
from threading import RLock
from typing import Any

import msgspec

from tep import (
    BadDescriptor,
    MrDesc,
    MrHandle,
    NetAddr,
    PeerChange,
    PeerEvent,
    Sender,
    TepError,
    TransferEngine,
    UsageError,
)
from tep.apps.kvcache.blocks.messages import Card, Message, Note, Over, decode, decode_as, encode
from tep.apps.kvcache.layout import KvTensor, Placed, describe_tensor, held_heads

__all__ = ["KvBlocks", "PeerCache", "PeerLayout"]

MESSAGE_BYTES = 32 * 1024
BUFFERS = 64
NOTE_BYTES = 6 * 1024
"""Longest piece of a note: it fits into a datagram of every backend."""

NOTE_PARTS = 4096
"""Most pieces of a note: 24 MiB."""

NOTES_PEER_MAX = 64
PIECES_PEER_MAX = 2 * NOTE_PARTS
"""Unfinished notes of one engine, and their pieces; its oldest note makes room."""

UNFINISHED_MAX = 1024
"""Engines with unfinished notes; the one that was silent longest makes room."""

OUT_MAX = 2 * NOTE_PARTS
"""Messages on their way to one peer; beyond them its answers count as lost."""

PEERS_MAX = 4096
"""Peers whose names are remembered; the oldest makes room."""

_NOBODY = -1
"""A claim that does not exist: who is told about it does nothing."""


_tensor = lru_cache(maxsize=4096)(KvTensor)
_placed = lru_cache(maxsize=4096)(Placed)
_card = lru_cache(maxsize=64)(partial(decode_as, Card))
"""The ranks of one process have the same tensors, and are handed the same cards."""


class PeerLayout:
    """The tensors of another rank's cache, by name; one object for all whose cards say the same.

    `ends` has of each region the tensor that ends last, and that end.
    """

    def __init__(self, raw: bytes, tp: int, rank: int) -> None:
        self.tp, self.rank = tp, rank
        tensors = decode_as(tuple[Placed, ...], raw)
        self.tensors = {one.tensor.name: one for one in tensors}
        self.ends: dict[int, tuple[int, Placed]] = {}
        for one in tensors:
            tensor = one.tensor
            held = len(held_heads(tensor.heads, tp, rank, f"the card's {tensor.name!r}"))
            end = one.start + (one.blocks - 1) * one.block_stride + (held - 1) * one.head_stride
            end += (tensor.tokens - 1) * one.token_stride + (tensor.planes - 1) * one.plane_stride
            known = self.ends.get(one.region, (0, one))
            self.ends[one.region] = max(known, (end + tensor.run, one), key=itemgetter(0))


_layout = lru_cache(maxsize=64)(PeerLayout)


class PeerCache:
    """Another rank's cache, from its card; BadDescriptor where that is none, or cannot be.

    `named` says how its engine is called here: `KvBlocks.named`.
    """

    def __init__(self, raw: bytes, named: Callable[[NetAddr], NetAddr]) -> None:
        card = _card(raw)
        addr = NetAddr.from_bytes(card.addr)
        self.addr = named(addr)
        descs = [MrDesc.from_bytes(one) for one in card.regions]
        what = f"card of {addr.name}"
        if card.rank >= card.tp:
            raise BadDescriptor(f"{what}: rank {card.rank} of {card.tp}")
        for desc in descs:
            if desc.addr != addr:
                raise BadDescriptor(f"{what}: {desc} is another engine's memory")
        self.layout = _layout(bytes(card.tensors), card.tp, card.rank)
        for region, (end, one) in self.layout.ends.items():
            if region >= len(descs):
                raise BadDescriptor(f"{what}: no region {region}: {one}")
            if end > descs[region].nbytes:
                raise BadDescriptor(f"{what}: {one} ends at {end} of {descs[region].nbytes} bytes")
        self.descs = [msgspec.structs.replace(desc, addr=self.addr) for desc in descs]


class KvBlocks:
    """The KV cache of one rank, for engines that own their memory and their block tables.

    Add every tensor, then make a KvSender, a KvReceiver or both.

    Args:
        engine: of this rank; its messages (`submit_recvs`) belong to this object.
        tp, rank: degree of tensor parallelism, and this rank.

    Attributes:
        placed: the tensors, by name, once they are registered.
        garbled: messages that were none.
        foreign: messages that came from another engine than they said.
    """

    def __init__(self, engine: TransferEngine, *, tp: int = 1, rank: int = 0) -> None:
        if not 0 <= rank < tp:
            raise UsageError(f"KvBlocks: rank={rank} of tp={tp}")
        self.engine, self.tp, self.rank = engine, tp, rank
        self.lock = RLock()
        self.placed: dict[str, Placed] = {}
        self.garbled = self.foreign = 0
        self._smallest: dict[int, Placed] = {}  # of each group, the tensor with the fewest blocks
        self._by_address = False
        # By name: device, first and last address; the tensor, its blocks and strides; the array.
        self._added: dict[str, tuple[tuple[str, int, int], tuple[Any, ...], object]] = {}
        self._regions: list[tuple[MrHandle, MrDesc]] = []
        self._under_way: dict[Hashable, tuple[int, int]] = {}
        self._out: Counter[tuple[str, int]] = Counter()
        self._handlers: dict[type[Message], Callable[..., object]] = {}
        # Of each engine the unfinished notes by number and parts, and of each note its pieces.
        self._unfinished: dict[bytes, dict[tuple[int, int], dict[int, bytes]]] = {}
        self._spoken: dict[bytes, NetAddr] = {}  # by engine: what it said first that it is
        self._names: dict[str, NetAddr] = {}  # those of them that have each name
        self._lost: set[NetAddr] = set()
        engine.on_peer(self._on_peer)

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
            axes: a letter for each dimension: b block, p plane (K or V), h head, t token, d what is
                contiguous.
            heads: of the whole model; None: as many as here, times tp. 1 for an MLA cache.
            group: which of a request's lists of blocks it uses.
        """
        address, dims, run, device = describe_tensor(array, axes)
        here, tokens, planes = (dims.get(letter, (1, 0)) for letter in "htp")
        total = heads if heads is not None else here[0] * self.tp
        held = len(held_heads(total, self.tp, self.rank, f"KvBlocks.add: {name!r}"))
        if held != here[0]:
            raise UsageError(
                f"KvBlocks.add: {name!r} has {here[0]} heads here; rank {self.rank} of {self.tp} "
                f"holds {held} of heads={total}"
            )
        if self._regions or name in self._added:
            raise UsageError(f"KvBlocks.add: {name!r} was added before, or the cache is in use")
        tensor = _tensor(name, layer, total, tokens[0], run, group, planes[0])
        stop = address + sum((n - 1) * step for n, step in dims.values()) + run // dims["d"][0]
        extents = (tensor, *dims["b"], here[1], tokens[1], planes[1])
        self._added[name] = (device, address, stop), extents, array

    def card(self) -> bytes:
        """Describe this cache for senders; the first call registers the memory."""
        self.register()
        regions = tuple(desc.to_bytes() for _, desc in self._regions)
        tensors = msgspec.Raw(encode(tuple(self.placed.values())))
        return encode(Card(self.address, self.tp, self.rank, tensors, regions))

    @property
    def address(self) -> bytes:
        """The NetAddr of its engine."""
        return self.engine.main_address.to_bytes()

    def mr(self, region: int) -> MrHandle:
        """The handle of a region."""
        return self._regions[region][0]

    def register(self) -> None:
        """Register the memory of all tensors, overlapping ones together. Idempotent."""
        if self._regions:
            return
        if not self._added:
            raise UsageError("KvBlocks: no tensor was added")
        merged: list[tuple[str, int, int]] = []
        for device, start, stop in sorted(span for span, _, _ in self._added.values()):
            if merged and merged[-1][0] == device and start <= merged[-1][2]:
                merged[-1] = (device, merged[-1][1], max(stop, merged[-1][2]))
            else:
                merged.append((device, start, stop))
        self._regions = [self.engine.reg_mr((a, b - a, device)) for device, a, b in merged]
        for (device, at, _), (tensor, *extents), _ in self._added.values():
            region = next(k for k, (d, a, b) in enumerate(merged) if d == device and a <= at < b)
            found = _placed(tensor, region, at - merged[region][1], *extents)
            self.placed[tensor.name] = found
            least = self._smallest.setdefault(tensor.group, found)
            if found.blocks < least.blocks:
                self._smallest[tensor.group] = found
        self._arrays = [array for _, _, array in self._added.values()]  # which own the memory
        self._added.clear()
        self.engine.submit_recvs(MESSAGE_BYTES, BUFFERS, self._on_message, with_sender=True)

    @property
    def groups(self) -> int:
        """The number of lists of blocks that a request has."""
        return 1 + max(self._smallest)

    def check_blocks(self, what: str, block_ids: Sequence[Sequence[int]]) -> list[list[int]]:
        """One list of distinct blocks a group, as integers; UsageError if they cannot be."""
        if len(block_ids) != self.groups:
            raise UsageError(
                f"{what}: {len(block_ids)} lists of blocks, the cache has {self.groups} groups"
            )
        found = [[int(block) for block in group] for group in block_ids]
        for group, ids in enumerate(found):
            one = self._smallest.get(group)
            if ids and one is not None and not 0 <= min(ids) <= max(ids) < one.blocks:
                raise UsageError(
                    f"{what}: blocks {min(ids)} .. {max(ids)}; {one.tensor.name!r} has 0 .. "
                    f"{one.blocks - 1}"
                )
            if len(set(ids)) != len(ids):
                raise UsageError(f"{what}: group {group} lists a block twice: {ids}")
        return found

    # ------------------------------------------------------------------ messages

    def handle(self, kinds: dict[type[Message], Callable[..., object]]) -> None:
        """Have messages of these kinds, and their senders, handed to these functions.

        They are called under the lock.
        """
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
        who = (peer.name, peer.epoch)
        key = (who, type(message), message.claim, part)
        copies, calls = self._under_way.get(key, (0, 0))
        if not copies and self._out[who] >= OUT_MAX:
            return
        self._under_way[key] = (copies, calls + 1)
        if calls + 1 >= 1 << copies:
            self._under_way[key] = (copies + 1, 0)
            self._out[who] += 1
            done = partial(self._sent, who, key)
            try:
                self.engine.submit_send(peer, encode(message), on_done=lambda _: done())
            except TepError:
                done()

    def _sent(self, who: tuple[str, int], key: Hashable) -> None:
        with self.lock:
            self._out[who] -= 1
            if not self._out[who]:
                del self._out[who]
            copies, calls = self._under_way[key]
            if copies > 1:
                self._under_way[key] = (copies - 1, calls)
            else:
                del self._under_way[key]

    def send_note(self, peer: NetAddr, number: int, body: bytes) -> None:
        """Send something of one's own, up to 24 MiB, to whoever stands on a peer's cache.

        Notes travel in pieces. They may be lost, repeated and overtake each other. Who needs one
        sends it again, under the same `number`; another body has another number.

        Raises:
            UsageError: the body is longer.
        """
        addr = self.address
        parts = max(1, -(-len(body) // NOTE_BYTES))
        if parts > NOTE_PARTS:
            raise UsageError(
                f"send_note: {len(body)} bytes; {NOTE_PARTS * NOTE_BYTES} are possible"
            )
        with self.lock:
            for part in range(parts):
                piece = body[part * NOTE_BYTES : (part + 1) * NOTE_BYTES]
                self.send(peer, Note(peer.epoch, number, addr, part, parts, piece))

    def on_note(self, callback: Callable[[NetAddr, bytes], object]) -> None:
        """Have callback(peer, body) called with each note, under the lock."""

        def take(note: Note, sender: Sender) -> None:
            peer = self.peer_of(note.addr, sender)
            if peer is None:
                return
            body = self._join(note, sender.engine)
            if body is not None:
                callback(peer, body)

        self.handle({Note: take})

    def _join(self, note: Note, engine: bytes) -> bytes | None:
        """The whole note, once its last piece is here."""
        if note.part >= note.parts or len(note.body) > NOTE_BYTES:
            self.garbled += 1
            return None
        if note.parts == 1:
            return note.body
        notes, key = self._unfinished.pop(engine, {}), (note.claim, note.parts)
        pieces = notes.setdefault(key, {})
        pieces[note.part] = note.body
        whole = len(pieces) == note.parts
        if whole:
            del notes[key]
        while len(notes) > NOTES_PEER_MAX or sum(map(len, notes.values())) > PIECES_PEER_MAX:
            del notes[next(iter(notes))]
        if notes:
            self._unfinished[engine] = notes
        while len(self._unfinished) > UNFINISHED_MAX:
            del self._unfinished[next(iter(self._unfinished))]
        return b"".join(pieces[part] for part in range(note.parts)) if whole else None

    # ------------------------------------------------------------------ who speaks

    def name_by_address(self) -> None:
        """Call peers by `NetAddr.by_address`; before the first is met, and on both sides alike.

        Then no address that somebody hands in takes another peer's name. Nobody else may use the
        engine, which must not meet a peer under two names.
        """
        self._by_address = True

    def named(self, addr: NetAddr) -> NetAddr:
        """The address under which this cache's engine meets a peer."""
        return addr.by_address() if self._by_address else addr

    def peer_of(self, raw: bytes, sender: Sender) -> NetAddr | None:
        """The peer that a message says it is from; None: the engine saw it come from another."""
        try:
            addr = NetAddr.from_bytes(raw)
        except TepError:
            self.garbled += 1
            return None
        peer = self.named(addr)
        known = self._spoken.get(sender.engine)
        owned = sender.owns(addr)
        if known is None and owned and self._takes_name(peer):
            known = peer
            self._spoken[sender.engine] = peer
            if len(self._spoken) > PEERS_MAX:
                former = self._spoken.pop(next(iter(self._spoken)))
                self._lost.discard(former)
                if self._names.get(former.name) == former:
                    del self._names[former.name]
        if owned and known == peer:
            return peer
        self.foreign += 1
        return None

    def _takes_name(self, peer: NetAddr) -> bool:
        """Whether a peer may have its name: nobody has, or an earlier incarnation that is lost.

        The one that has it is asked whether it is there: a loss is noticed by that.
        """
        known = self._names.setdefault(peer.name, peer)
        if known == peer:
            return True
        if known.epoch < peer.epoch and known in self._lost:
            self._lost.discard(known)
            self._names[peer.name] = peer
            return True
        self.send(known, Over(known.epoch, _NOBODY))
        return False

    def has_spoken(self, peer: NetAddr) -> bool:
        """Whether a message of a peer was received, from all that it says of itself."""
        return self._names.get(peer.name) == peer

    def other_at(self, peer: NetAddr) -> NetAddr | None:
        """A peer that has spoken, and has a NIC that another one is said to have; None: none."""
        nics = set(peer.domains)
        found = (one for one in self._spoken.values() if one != peer)
        return next((one for one in found if not nics.isdisjoint(one.domains)), None)

    def _on_peer(self, event: PeerEvent) -> None:
        with self.lock:
            known = self._names.get(event.peer)
            if known is None or known.epoch != event.epoch:
                return
            if event.kind in {PeerChange.LOST, PeerChange.RESTARTED}:
                self._lost.add(known)
            elif event.kind is PeerChange.BACK:
                self._lost.discard(known)

    def _on_message(self, payload: memoryview, sender: Sender) -> None:
        try:
            message = decode(payload)
        except BadDescriptor:
            self.garbled += 1
            return
        handler = self._handlers.get(type(message))
        if handler is not None and message.epoch == self.engine.main_address.epoch:
            with self.lock:
                handler(message, sender)
