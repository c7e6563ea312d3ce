"""KvSender: writes blocks to the ranks that expect them, layer by layer as they are computed.

Rule 1: nothing is written before the receiver has granted an immediate for this very request, and
nothing after it took that back. Rule 2: a claim has ended when no row of it is with a NIC; this is
said again until the receiver knows. Rule 3: the lock of the cache guards everything here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from operator import attrgetter
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from tep import (
    BadDescriptor,
    NetAddr,
    Pages,
    Prepared,
    Sender,
    TepError,
    Transfer,
    UsageError,
    checksum,
)
from tep.apps.kvcache.blocks.cache import KvBlocks, PeerCache, PeerLayout
from tep.apps.kvcache.blocks.handle import KvRequest, KvSide, Patience
from tep.apps.kvcache.blocks.messages import (
    Cancel,
    Claim,
    Ended,
    Go,
    Over,
    Refuse,
    Stopping,
    Ticket,
    decode_as,
)
from tep.apps.kvcache.layout import Placed, rows_of, served_heads

__all__ = ["KvSend", "KvSender"]

Blocks = npt.NDArray[np.int64]
Row = tuple[Placed, Placed, tuple[int, npt.NDArray[np.int64], npt.NDArray[np.int64]]]


class _Run:
    """Tensors of one layer whose rows leave together: rows of one length between two regions.

    `fewest` is the target's tensor with the fewest blocks. `kind` is equal for runs that differ
    alone in their starts, those of the first tensor here and there: layers of a cache mostly do.
    """

    def __init__(
        self,
        group: int,
        regions: tuple[int, int],
        length: int,
        rows: list[Row],
        kinds: dict[tuple[object, ...], int],
    ) -> None:
        self.group, self.regions, self.length, self.rows = group, regions, length, rows
        self.fewest = min((there for _, there, _ in rows), key=attrgetter("blocks"))
        mine, theirs = self.starts = rows[0][0].start, rows[0][1].start
        shapes = [
            (here.block_stride, there.block_stride, here.start - mine, there.start - theirs)
            for here, there, _ in rows
        ]
        offsets = [(id(here), id(there)) for _, _, (_, here, there) in rows]  # which the rows hold
        self.kind = kinds.setdefault((group, regions, length, *shapes, *offsets), len(kinds))

    def check_blocks(self, claim: _Claim, highest: int) -> None:
        """Refuse a claim whose target has not so many blocks."""
        if highest >= self.fewest.blocks:
            raise UsageError(
                f"begin: {claim.send.request!r}: {claim.ticket.name} expects block {highest} "
                f"of {self.fewest.tensor.name!r}, which has {self.fewest.blocks}"
            )


class _Claim:
    """One receiving rank of one request."""

    def __init__(self, send: KvSend, number: int, peer: PeerCache, ticket: Ticket) -> None:
        self.send, self.number, self.peer, self.ticket = send, number, peer, ticket
        self.runs: dict[int, list[_Run]] = {}  # by layer
        self.prepared: dict[int, tuple[tuple[int, int], _Run, Prepared]] = {}  # by kind of run
        self.dst = [np.frombuffer(raw, "<u4").astype(np.int64) for raw in ticket.blocks]
        self.src = [
            np.array(ids[len(ids) - len(dst) :], np.int64)
            for ids, dst in zip(send.blocks, self.dst, strict=True)
        ]
        self.sent: dict[tuple[int, int], int] = {}  # blocks of (layer, group) that were sent
        self.unsent = 0  # those that were not sent whole
        self.missing = [np.zeros(len(dst), np.int64) for dst in self.dst]  # writes yet to succeed
        self.sums: Counter[str] = Counter()  # of the rows of each tensor that were submitted
        self.imm: int | None = None
        self.open: set[Transfer] = set()
        self.under_way = 0
        self.doubt = self.ended = self.over = False
        self.why = ""
        self.told_s = -math.inf


class KvSend(KvRequest):
    """A request that is being written; see KvRequest. Its blocks must stay until it is finished."""

    def __init__(
        self,
        sender: KvSender,
        request: str,
        blocks: list[list[int]],
        timeout_s: float | None,
        ntokens: int | None,
    ) -> None:
        super().__init__(sender, request, blocks, timeout_s)
        self._sender = sender
        self._ntokens = math.inf if ntokens is None else ntokens
        self._claims: list[_Claim] = []
        self._done: dict[int, float] = {}

    def layer_done(self, layer: int, ntokens: int | None = None) -> None:
        """A layer is computed, up to `ntokens` tokens of the prompt: write its whole blocks.

        None, or all tokens: the last block too, however full it is. A NIC reads the memory from
        now on: on a GPU the layer's kernels must have ended. Calls that say less than an earlier
        one do nothing.

        Raises:
            UsageError: the cache has no such layer.
        """
        sender = self._sender
        with sender.blocks.lock:
            if layer not in sender.layers:
                raise UsageError(f"layer_done: no layer {layer}; there are {sorted(sender.layers)}")
            whole = ntokens is None or ntokens >= self._ntokens
            done = math.inf if whole else float(ntokens or 0)
            self._done[layer] = max(done, self._done.get(layer, 0.0))
            for claim in self._claims:
                sender._write(claim, layer)
                sender._look(claim)

    def cancel(self, reason: str = "cancelled by the sender") -> None:
        """Write nothing more. It is "free" once no NIC reads its blocks. Idempotent."""
        with self._sender.blocks.lock:
            self._sender._fail(self, reason)


class KvSender(KvSide):
    """Writes this rank's blocks to the caches of other instances.

    Args:
        blocks: this rank's cache.
        patience: `cancel_s` between repeats of a message, `request_s` for one request, `linger_s`
            how long the end of a request is told to a receiver that does not answer.
        checksums: the end of a request brings `tep.checksum` of the rows that were written; the
            receiver compares it with its memory before the load is done.

    Attributes:
        layers: of the model that this cache holds.
        writes, rows, nbytes: transfers that have ended, the rows and the bytes they had.
    """

    def __init__(
        self, blocks: KvBlocks, *, patience: Patience = Patience(), checksums: bool = False
    ) -> None:
        stop = self._on_stop
        blocks.handle({Go: self._on_go, Refuse: stop, Cancel: stop, Over: self._on_over})
        super().__init__(blocks, patience)
        self.checksums = checksums
        self.layers = {one.tensor.layer for one in blocks.placed.values()}
        self._peers: dict[tuple[str, int], PeerCache] = {}
        self._runs: WeakKeyDictionary[PeerLayout, dict[int, list[_Run]]] = WeakKeyDictionary()
        self._claims: dict[int, _Claim] = {}
        self._open: set[KvSend] = set()
        self._number = 0
        self.writes = self.rows = self.nbytes = 0

    @property
    def idle(self) -> bool:
        """Whether nothing is under way, and every receiver knows the end of what was."""
        return not (self._claims or self._open)

    def connect(self, card: bytes, peer: NetAddr | None = None) -> PeerLayout:
        """Get to know a receiver's cache; again after it has restarted.

        Args:
            card: of the cache.
            peer: who handed it in, if it is not known to be trusted: the card must be its own.

        Returns:
            The degree of its instance's tensor parallelism, its rank, and its tensors.

        Raises:
            BadDescriptor: no card.
            UsageError: its cache holds something else; the message says what.
        """
        found = PeerCache(card, self.blocks.named)
        if peer not in {None, found.addr}:
            raise BadDescriptor(f"{peer} handed in the card of {found.addr}")
        with self.blocks.lock:
            self._runs_to(found)
            self._peers[found.addr.name, found.addr.epoch] = found
        return found.layout

    def begin(
        self,
        request: str,
        block_ids: Sequence[Sequence[int]],
        target: bytes | Sequence[bytes],
        *,
        ntokens: int | None = None,
        timeout_s: float | None = None,
    ) -> KvSend:
        """Begin to write a request's blocks to those who expect it; then call `layer_done`.

        Args:
            request: its name, which the tickets must bear.
            block_ids: for each group, the blocks here. Where the target wants fewer, because it has
                the beginning already or keeps a window only, it gets the last ones.
            target: tickets of the target's ranks, one a rank; those that other ranks of ours serve
                are left to them.
            ntokens: of the prompt; None: the blocks are full and begin with its first token.
            timeout_s: to write everything; None: the patience's.

        Raises:
            UsageError: a ticket of another request, of an unknown receiver, or for more blocks.
            BadDescriptor: no ticket.
        """
        ids = self.blocks.check_blocks("begin", block_ids)
        tickets = [target] if isinstance(target, bytes) else list(target)
        send = KvSend(self, request, ids, timeout_s, ntokens)
        with self.blocks.lock:
            for raw in tickets:
                self._add_claim(send, decode_as(Ticket, raw))
            for claim in send._claims:
                self._claims[claim.number] = claim
            self._open.add(send)
            self._settle(send)
        self.turn()
        return send

    # ------------------------------------------------------------------ making claims

    def _add_claim(self, send: KvSend, ticket: Ticket) -> None:
        if ticket.request != send.request:
            raise UsageError(f"begin: {send.request!r} got a ticket of {ticket.request!r}")
        peer = self._peers.get((ticket.name, ticket.epoch))
        if peer is None:
            raise UsageError(
                f"begin: {send.request!r} is for {ticket.name}, epoch {ticket.epoch}, which is "
                "unknown; call connect() with its card"
            )
        lengths = [len(raw) // 4 for raw in ticket.blocks]
        held = [len(ids) for ids in send.blocks]
        if any(len(raw) % 4 for raw in ticket.blocks):
            raise UsageError(f"begin: {send.request!r}: a ticket with a part of a block's number")
        if len(held) != len(lengths) or any(n > have for n, have in zip(lengths, held)):
            raise UsageError(
                f"begin: {send.request!r}: {ticket.name} expects {lengths} blocks, here are {held}"
            )
        self._number += 1
        claim = _Claim(send, self._number, peer, ticket)
        for layer, runs in self._runs_to(peer).items():
            for run in runs:
                dst = claim.dst[run.group]
                if len(dst):
                    run.check_blocks(claim, int(dst.max()))
                    claim.runs.setdefault(layer, []).append(run)
                    claim.sent[layer, run.group] = 0
                    claim.missing[run.group] += len(run.rows)
        claim.unsent = len(claim.sent)
        if claim.runs:
            send._claims.append(claim)

    def _runs_to(self, peer: PeerCache) -> dict[int, list[_Run]]:
        """The runs of each layer that this rank writes to a peer, the same for peers of one layout.

        Raises:
            UsageError: the peer's cache holds something else.
        """
        layout = peer.layout
        known = self._runs.get(layout)
        if known is not None:
            return known
        found: dict[int, list[_Run]] = {}
        rows: dict[tuple[int, int, tuple[int, int], int], list[Row]] = {}
        placed, name = self.blocks.placed, peer.addr.name
        common = [(placed[k], there) for k, there in layout.tensors.items() if k in placed]
        if not common:
            raise UsageError(f"{name}'s KV cache has no tensor in common with ours")
        ranks = (self.blocks.tp, self.blocks.rank), (layout.tp, layout.rank)
        for here, there in common:
            tensor = here.tensor
            if tensor != there.tensor:
                raise UsageError(
                    f"{name} has another KV cache:\n  here:  {tensor}\n  there: {there.tensor}"
                )
            served = served_heads(tensor.heads, *ranks, tensor.name)
            if served[2]:
                row = (here, there, rows_of(here, there, served))
                key = tensor.layer, tensor.group, (here.region, there.region), row[2][0]
                rows.setdefault(key, []).append(row)
        kinds: dict[tuple[object, ...], int] = {}
        for (layer, group, regions, length), together in rows.items():
            run = _Run(group, regions, length, together, kinds)
            found.setdefault(layer, []).append(run)
        self._runs[layout] = found
        return found

    def _ask(self, claim: _Claim) -> None:
        rows = {
            here.tensor.name: run.length
            for runs in claim.runs.values()
            for run in runs
            for here, _, _ in run.rows
        }
        ticket, mine = claim.ticket, self.blocks
        what = (mine.address, ticket.serial, ticket.request, mine.tp, mine.rank, rows)
        mine.send(claim.peer.addr, Claim(ticket.epoch, claim.number, *what, self.checksums))

    # ------------------------------------------------------------------ writing

    def _write(self, claim: _Claim, layer: int) -> None:
        """Write what is computed of a layer and was not written yet."""
        if claim.imm is None or claim.why or layer not in claim.runs:
            return
        done = claim.send._done.get(layer, 0.0)
        stops = {}
        for run in claim.runs[layer]:
            first = claim.sent[layer, run.group]
            stop = self._ready(claim, run.group, run.rows[0][0].tensor.tokens, done)
            stops[run.group] = max(first, stop)
            if stop > first and not claim.why:
                self._submit(claim, run, (first, stop))
        for group, stop in stops.items():
            whole = len(claim.dst[group])
            claim.unsent -= claim.sent[layer, group] < stop == whole
            claim.sent[layer, group] = stop

    @staticmethod
    def _ready(claim: _Claim, group: int, tokens: int, done: float) -> int:
        """Count the target's blocks that are whole once `done` tokens are computed."""
        wanted, held = len(claim.dst[group]), len(claim.send.blocks[group])
        if done == math.inf:
            return wanted
        ntokens = claim.send._ntokens
        total = held if ntokens == math.inf else max(held, -(-int(ntokens) // tokens))
        return min(wanted, max(0, int(done) // tokens - (total - wanted)))

    @staticmethod
    def _starts(
        claim: _Claim, run: _Run, span: tuple[int, int]
    ) -> Iterator[tuple[str, Blocks, Blocks]]:
        """Name of each tensor of a run, and where the rows of some blocks begin, here and there."""
        src, dst = (blocks[run.group][slice(*span), None] for blocks in (claim.src, claim.dst))
        for here, there, (_, mine, theirs) in run.rows:
            starts = src * here.block_stride + (here.start + mine)
            yield (
                here.tensor.name,
                starts.ravel(),
                (dst * there.block_stride + (there.start + theirs)).ravel(),
            )

    def _prepare(self, claim: _Claim, run: _Run, span: tuple[int, int]) -> Prepared:
        _, here, there = zip(*self._starts(claim, run, span))
        source = (self.blocks.mr(run.regions[0]), Pages(np.concatenate(here), stride=1))
        sink = (claim.peer.descs[run.regions[1]], Pages(np.concatenate(there), stride=1))
        return self.blocks.engine.prepare_paged_writes(run.length, source, sink)

    def _submit(self, claim: _Claim, run: _Run, span: tuple[int, int]) -> None:
        """Write some blocks of a run: the layers of a chunk are one prepared write."""
        on_done = partial(self._written, claim, run, span)
        claim.under_way += 1
        try:
            of_span, laid, prepared = claim.prepared.get(run.kind, (None, run, None))
            if prepared is None or of_span != span:
                laid, prepared = run, self._prepare(claim, run, span)
                claim.prepared[run.kind] = span, run, prepared
            transfer = prepared.submit(
                claim.imm,
                src_offset=run.starts[0] - laid.starts[0],
                dst_offset=run.starts[1] - laid.starts[1],
                on_done=on_done,
            )
        except TepError as error:
            claim.under_way -= 1
            self._stop(claim, f"{type(error).__name__}: {error}")
            return
        if not transfer.finished:
            claim.open.add(transfer)

    def _add_sums(self, claim: _Claim, run: _Run, span: tuple[int, int]) -> None:
        """Add the checksums of rows that were written.

        Before NICs have read them a copy to the host would wait for what else the GPU does, and so
        hide that the layer was not computed when it was said to be.
        """
        try:
            for name, here, there in self._starts(claim, run, span):
                mr = self.blocks.mr(run.regions[0])
                claim.sums[name] += checksum(mr, here, run.length, places=there)
        except TepError as error:
            self._stop(claim, f"checksums: {error}")

    def _written(self, claim: _Claim, run: _Run, span: tuple[int, int], transfer: Transfer) -> None:
        with self.blocks.lock:
            claim.open.discard(transfer)
            claim.under_way -= 1
            self.writes += 1
            self.rows += transfer.rows
            self.nbytes += transfer.job.total
            if transfer.ok:
                claim.missing[run.group][slice(*span)] -= len(run.rows)
                if self.checksums:
                    self._add_sums(claim, run, span)
            else:
                claim.doubt = claim.doubt or bool(transfer.failed_rows)
                self._stop(claim, str(transfer.error))
            self._look(claim)

    # ------------------------------------------------------------------ ends

    def _stop(self, claim: _Claim, reason: str) -> None:
        """Write nothing more of a claim; what NICs have comes back."""
        if claim.ended or claim.why:
            return
        claim.why = reason
        for transfer in tuple(claim.open):
            transfer.cancel()

    def _fail(self, send: KvSend, reason: str) -> None:
        if send.state == "open":
            for claim in send._claims:
                self._stop(claim, reason)
            send._to("failed", reason)
        self._settle(send)

    def _look(self, claim: _Claim) -> None:
        """Settle a request if one of its claims can have ended."""
        if claim.why or not claim.unsent:
            self._settle(claim.send)

    def _settle(self, send: KvSend) -> None:
        """Look what has ended, and say so."""
        for claim in send._claims:
            over = claim.why or (claim.imm is not None and not claim.unsent)
            if over and not claim.under_way and not claim.ended:
                claim.ended = True
                if not claim.over:
                    self._tell(claim)
        broken = next((claim for claim in send._claims if claim.why), None)
        if broken is not None and send.state == "open":
            self._fail(send, f"{broken.ticket.name}: {broken.why}")
        if send.finished or not all(claim.ended for claim in send._claims):
            return
        self._open.discard(send)
        if send.state == "open":
            send._to("done")
        else:
            missing = [np.zeros(len(ids), bool) for ids in send.blocks]
            for claim in send._claims:
                for all_of, some in zip(missing, claim.missing, strict=True):
                    all_of[len(all_of) - len(some) :] |= some > 0
            send.failed_blocks = tuple(
                tuple(np.array(ids, np.int64)[bad].tolist())
                for ids, bad in zip(send.blocks, missing, strict=True)
            )
            send._to("free")

    def _tell(self, claim: _Claim) -> None:
        good = tuple(np.packbits(left == 0).tobytes() for left in claim.missing)
        sums = {name: total & 0xFFFFFFFF for name, total in claim.sums.items()}
        end = (self.blocks.address, claim.ticket.serial, good, claim.doubt, claim.why, sums)
        self.blocks.send(claim.peer.addr, Ended(claim.ticket.epoch, claim.number, *end))

    def _tell_forgotten(self, message: Cancel, sender: Sender) -> None:
        """Answer for a claim whose end was told for long enough, and then forgotten."""
        peer = self.blocks.peer_of(message.addr, sender)
        if peer is not None:
            end = (self.blocks.address, message.serial, (), False, "ended long ago")
            self.blocks.send(peer, Ended(peer.epoch, message.claim, *end, {}))

    # ------------------------------------------------------------------ messages and time

    def _claim_of(self, message: Go | Refuse | Cancel | Over, sender: Sender) -> _Claim | None:
        """The claim that a message is about, if it comes from the claim's receiver."""
        claim = self._claims.get(message.claim)
        if claim is not None and not sender.owns(claim.peer.addr):
            self.blocks.foreign += 1
            return None
        return claim

    def _on_go(self, message: Go, sender: Sender) -> None:
        claim = self._claim_of(message, sender)
        if claim is None or claim.imm is not None or claim.why:
            return  # whoever asks about it is told that it has ended
        claim.imm = message.imm
        for layer in tuple(claim.send._done):
            self._write(claim, layer)
        self._settle(claim.send)

    def _on_stop(self, message: Refuse | Cancel, sender: Sender) -> None:
        claim = self._claim_of(message, sender)
        if claim is None:
            if isinstance(message, Cancel):
                self._tell_forgotten(message, sender)
            return
        if isinstance(message, Refuse):
            if claim.imm is not None or claim.ended:
                return  # the answer to a copy of the claim
            claim.over = True  # the receiver knows of nothing that would have to end
        self._stop(claim, message.reason)
        if claim.ended:
            self._tell(claim)
        elif claim.under_way:
            what = (claim.number, self.blocks.address, claim.ticket.serial)
            self.blocks.send(claim.peer.addr, Stopping(claim.ticket.epoch, *what))
        self._settle(claim.send)

    def _on_over(self, message: Over, sender: Sender) -> None:
        claim = self._claim_of(message, sender)
        if claim is not None and claim.ended:
            del self._claims[message.claim]

    def turn(self) -> float:
        """Repeat what was not answered, and end what is late; return when to look again."""
        now_s, patience = self.now_s(), self.patience
        with self.blocks.lock:
            for send in [one for one in self._open if one.deadline_s <= now_s]:
                self._fail(send, "not written before its deadline")
            for claim in tuple(self._claims.values()):
                late_s = claim.send.deadline_s + patience.linger_s
                if claim.ended and (claim.over or now_s > late_s):
                    del self._claims[claim.number]
                elif now_s - claim.told_s >= patience.cancel_s:
                    claim.told_s = now_s
                    if claim.ended:
                        self._tell(claim)
                    elif claim.imm is None and not claim.why:
                        self._ask(claim)
        return patience.cancel_s
