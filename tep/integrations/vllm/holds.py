"""The prefiller's half of a worker: blocks that are kept, and written to decoders that ask.

Rule 1: a request is reported as sent when no NIC reads its blocks and none will. Rule 2: a key that
was given up is never begun again, and a decoder that asks for it is answered so. Rule 3: the
cache's lock guards all.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tep import NetAddr, TepError, UsageError
from tep.apps.kvcache import KvBlocks, KvSend, KvSender, Patience
from tep.integrations.vllm.terms import Step, Terms, Told, Want

__all__ = ["Holds"]

GONE_MAX = 4096
"""Limit of keys that are remembered as gone, with the reason."""

SENDS_MAX = 1024
"""Limit of one key's loads."""

_REASON = 1000
"""Limit of a reason, characters."""

Receiver = tuple[str, int, bytes]
"""One load of a decoder's rank: name and epoch of its engine, and its ticket."""


class _Held:
    """The blocks of one key."""

    def __init__(self, order: Step) -> None:
        self.request, self.key = order.request, order.key
        self.blocks, self.ntokens = order.blocks, order.ntokens
        self.done: dict[int, int] = {}  # tokens of each layer
        self.until_s = math.inf  # finite from the end of the prefill on
        self.sends: dict[Receiver, KvSend] = {}
        self.served: set[int] = set()  # the decoder's ranks that have begun a load
        self.wanted = 0  # number of the decoder's ranks
        self.final = False
        self.why = ""  # the reason, if it was given up

    @property
    def still(self) -> bool:
        """True if no NIC reads its blocks."""
        return all(send.finished for send in self.sends.values())


class Holds:
    """All keys of one worker; meet() is called with the address of each decoder's engine.

    Attributes:
        held: the blocks that are kept, by key.
    """

    def __init__(self, blocks: KvBlocks, terms: Terms, meet: Callable[[NetAddr], object]) -> None:
        patience = Patience(cancel_s=terms.beat_s, request_s=terms.load_s)
        self.sender = KvSender(blocks, patience=patience, checksums=terms.checksums)
        self._blocks, self._terms, self._meet = blocks, terms, meet
        self.held: dict[str, _Held] = {}
        self._by_request: dict[str, _Held] = {}
        self._cards: dict[tuple[str, int], tuple[int, int]] = {}  # tp and rank of known decoders
        self._gone: dict[str, str] = {}
        self._sent: set[str] = set()

    # ------------------------------------------------------------------ the scheduler's orders

    def step(self, step: Step) -> None:
        """Add a request that is being computed and has its blocks."""
        if step.key not in self._gone and step.key not in self.held:
            self._add(step)

    def _add(self, order: Step) -> _Held:
        held = self.held[order.key] = self._by_request[order.request] = _Held(order)
        return held

    def layer_saved(self, step: Step, layer: int) -> None:
        held = self.held.get(step.key)
        if held is not None and not held.why:
            held.done[layer] = max(step.upto, held.done.get(layer, 0))
            for send in held.sends.values():
                send.layer_done(layer, step.upto)

    def hold(self, order: Step) -> None:
        """Keep the blocks of a request that is computed completely."""
        held = self.held.get(order.key)
        if order.key in self._gone if held is None else held.request != order.request:
            self._sent.add(order.request)  # the key was given up, or is another request's
            return
        if held is None:
            held = self._add(order)
        held.final = True
        held.until_s = self._now_s() + self._terms.lease_s
        for layer in self.sender.layers:
            held.done[layer] = order.ntokens
            for send in held.sends.values():
                send.layer_done(layer)
        self._settle(held)

    def end(self, request: str, key: str) -> None:
        """Give up an aborted request; report it when nothing reads its blocks."""
        held = self._by_request.get(request)
        if held is None:
            if key not in self.held:
                self._forget(key, "the prefill was aborted")
            self._sent.add(request)
        else:
            held.final = True
            self._give_up(held, "the prefill was aborted")

    def stop(self, request: str) -> bool:
        """Give up a preempted request's blocks; return True if nothing reads them."""
        held = self._by_request.get(request)
        if held is None or held.final:
            return True
        if not held.why:
            held.why = "the prefill was preempted"
            for send in held.sends.values():
                send.cancel(held.why)
        if held.still:
            del self.held[held.key], self._by_request[request]  # it will be computed again
        return held.still

    def poll(self) -> set[str]:
        """Return the requests that were sent since the last call; check the timeouts too."""
        self.sender.poll()
        with self._blocks.lock:
            now_s = self._now_s()
            for held in tuple(self.held.values()):
                if now_s >= held.until_s and held.still:
                    self._give_up(held, f"it expired: nobody asked for {self._terms.lease_s} s")
                self._settle(held)
            sent, self._sent = self._sent, set()
        return sent

    # ------------------------------------------------------------------ decoders

    def answer(self, peer: NetAddr, want: Want) -> Told:
        """Do what a decoder's rank asks for, and return the answer."""
        held = self.held.get(want.key)
        if held is None or held.why:
            why = held.why if held is not None else self._gone.get(want.key, "")
            if want.kind == "drop":
                self._forget(want.key, why or "the decoder dropped it")
            elif want.early and not why:
                return Told(want.number, want.key, "kept")
            why = why or "no such key here: the prefiller has restarted, or it expired long ago"
            return Told(want.number, want.key, "gone", why)
        if want.kind == "drop":
            self._give_up(held, "the decoder dropped it")
            return Told(want.number, want.key, "gone", held.why)
        if held.final:
            held.until_s = self._now_s() + self._terms.lease_s
        if want.kind == "keep":
            return Told(want.number, want.key, "kept")
        return self._begin(held, peer, want)

    def _begin(self, held: _Held, peer: NetAddr, want: Want) -> Told:
        who = (peer.name, peer.epoch)
        receiver = (*who, want.ticket)
        if receiver in held.sends:
            return Told(want.number, want.key, "taken")
        try:
            if want.card:
                theirs = self.sender.connect(want.card, peer)
                self._cards[who] = theirs.tp, theirs.rank
                self._meet(peer)
            if who not in self._cards:
                return Told(want.number, want.key, "card")
            if len(held.sends) >= SENDS_MAX:
                raise UsageError(f"{SENDS_MAX} loads of it have begun")
            send = self.sender.begin(
                held.key,
                held.blocks,
                want.ticket,
                ntokens=held.ntokens,
                timeout_s=self._terms.load_s,
            )
        except TepError as error:
            why = f"{type(error).__name__}: {error}"[:_REASON]
            return Told(want.number, want.key, "gone", why)
        held.sends[receiver] = send
        tp, rank = self._cards[who]
        held.wanted = tp
        held.served.add(rank)
        for layer, upto in held.done.items():
            send.layer_done(layer, None if held.final else upto)
        return Told(want.number, want.key, "taken")

    def lost(self, name: str, epoch: int) -> None:
        """Stop the transfers to a decoder that is lost or has restarted."""
        for held in tuple(self.held.values()):
            for (other, its_epoch, _), send in held.sends.items():
                if other == name and its_epoch <= epoch:
                    send.cancel(f"decoder {name} is lost")
        for who in [one for one in self._cards if one[0] == name and one[1] <= epoch]:
            del self._cards[who]

    def _give_up(self, held: _Held, why: str) -> None:
        if not held.why:
            held.why = why
            for send in held.sends.values():
                send.cancel(why)
        self._settle(held)

    def _settle(self, held: _Held) -> None:
        over = held.why or (held.wanted and len(held.served) == held.wanted)
        if held.final and over and held.still and self.held.get(held.key) is held:
            del self.held[held.key], self._by_request[held.request]
            self._sent.add(held.request)
            self._forget(held.key, held.why or "it was handed over")

    def _forget(self, key: str, why: str) -> None:
        self._gone[key] = why
        while len(self._gone) > GONE_MAX:
            del self._gone[next(iter(self._gone))]

    def _now_s(self) -> float:
        return self._blocks.engine.driver.now_s()
