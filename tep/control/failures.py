"""Immediates that will not come: fail the expectations of what peers say they do not send.

The receiver's half; of `engine.fail` the sender's half as well. What transfers that fail owe their
peers is in `telling`. `imm` counts, `channel` sends; nothing here posts. Rule 1: a message that
arrives twice is applied once. Rule 2: an expectation that names its sender can be failed by that
engine only. Rule 3: what came of a transfer that failed is not counted any more, so that the same
immediate can be sent again; what an expectation has used up stays used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, cast

from tep.backends.base import ControlDomain, Domain
from tep.control.channel import Channel, Drop
from tep.control.messages import Answer, Failed, Missing, given_up
from tep.core.handle import Handle, State
from tep.core.imm import ImmTable
from tep.core.sums import Arrivals
from tep.core.transfer import Expectation, Notice
from tep.errors import FabricError, TepError

__all__ = ["SERIALS_MAX", "Failures"]

_HEARD_MAX: Final = 256
"""Message numbers that are remembered of each engine, so that a repeated message counts once."""

SERIALS_MAX: Final = 128
"""The same of lists of missing immediates, whose sender says which ones it may send again."""

_ENGINES_MAX: Final = 4096
"""Engines whose message numbers are remembered; beyond that the first engine is forgotten."""

_BROKEN_MAX: Final = 4096
"""Immediates that `fail` gave up before anybody expected them. A message about one more is not
answered, and its sender learns that this engine could not be told."""

_MISSING_MAX: Final = 1024
"""Immediates of one engine that did not come, and that nobody expected; beyond that its first one
is forgotten, and who expects it waits for its timeout."""


class _GivenUp(NamedTuple):
    """An immediate that a peer gave up while nobody expected it.

    Attributes:
        address: the NIC that said so.
        error: what the next expectation fails with.
        seen: how many had come when it said so; if more than `late` have come since, it has sent
            it again. None: it does not matter.
        late: how many of those that it gave up may have come since; 0 once their paths are fenced.
    """

    address: bytes
    error: FabricError
    seen: int | None
    late: int = 0


class _Arrived(NamedTuple):
    """What came from one engine.

    Attributes:
        sums: how many of each immediate that was asked about, less what was pruned.
        generations: how many lists of its NICs were pruned.
        pruned: how many immediates were in these lists, of any value.
    """

    sums: list[int]
    generations: int
    pruned: int


class _Heard:
    """Lists of missing immediates of one engine that were applied.

    Attributes:
        done: the engine does not send lists with lower serials again.
        serials: those applied, from `done` on.
    """

    __slots__ = ("done", "serials")

    def __init__(self) -> None:
        self.done = 0
        self.serials: set[int] = set()


class Failures:
    """Messages between one engine and its peers that immediates fail.

    Args:
        name: the name of this engine and its incarnation, for error texts of peers.
        imms: the table of expectations.
        channel: control messages to the peers.
        opened: every handle that has not settled.
        settle: ends a handle.
        domains: the engine's NICs.
        arrivals: the immediates that arrived on each NIC, by sender; empty if they are not counted.

    Attributes:
        broken: immediates that peers gave up while nobody expected them, by engine.
    """

    def __init__(
        self,
        name: str,
        imms: ImmTable[Expectation],
        channel: Channel,
        opened: dict[Handle, None],
        settle: Callable[[Handle, State, TepError | None], None],
        domains: Sequence[Domain],
        arrivals: Sequence[Arrivals],
    ) -> None:
        self.broken: dict[int, dict[bytes, _GivenUp]] = {}
        self._missing: dict[bytes, dict[int, None]] = {}  # immediates in `broken`, by engine
        self._heard: dict[bytes, dict[int, None]] = {}  # numbers, by engine
        self._lists: dict[bytes, _Heard] = {}
        self._name = name
        self._imms, self._channel = imms, channel
        self._opened, self._settle = opened, settle
        self._nics = [cast("ControlDomain", domain) for domain in domains]
        self._arrivals = arrivals
        channel.hear(Failed, self._hear)
        channel.hear(Missing, self._hear_missing)

    def tell(self, notice: Notice) -> None:
        """Make a peer's expectation of an immediate end in an error."""

        def told(_: Answer) -> None:
            self._settle(notice, State.DONE, None)

        def lost(why: str) -> None:
            name = notice.link.addr.name
            text = f"{name} could not be told that imm {notice.imm:#x} fails: {why}"
            error = FabricError(text, code="UNREACHABLE", peer=name)
            self._settle(notice, State.FAILED, error)

        self._channel.ask(
            notice.link, lambda n: Failed(n, self._name, notice.imm, notice.reason), told, lost
        )

    def fail(
        self,
        meant: Callable[[Expectation], bool],
        error: Callable[[Expectation, str], FabricError],
        before: Callable[[], object] = lambda: None,
    ) -> set[int]:
        """Fail the open expectations for which meant(expectation) is true.

        Each fails with error(expectation, text that says how many immediates came); before() is
        called once it is known how many came.

        Returns:
            Their immediates.
        """
        waiting = [h for h in self._opened if isinstance(h, Expectation) and meant(h)]
        for handle in waiting:
            if not handle.finished:
                handle.fix_arrived()
        before()
        found: set[int] = set()
        for handle in reversed(
            waiting
        ):  # the last one first, so that cancelling one completes none behind it
            if self._imms.cancel(handle):
                found.add(handle.imm)
                came = f"{handle.arrived} of {handle.count} came"
                self._settle(handle, State.FAILED, error(handle, came))
        return found

    def take(self, expectation: Expectation) -> FabricError | None:
        """Take the error of a new expectation that a peer gave up already; it is used once."""
        imm = expectation.imm
        given = self.broken.get(imm, {})
        for engine, news in tuple(given.items()):
            if not _is_from(expectation, news.address):
                continue
            del given[engine]
            if not given:
                self.broken.pop(imm, None)
            if news.seen is None:
                return news.error
            since = self._seen(engine, imm) - news.seen
            short = self._imms.counts.get(imm) < expectation.count
            if since <= 0 or (since <= news.late and short):
                return news.error
        return None

    # ------------------------------------------------------------------ what peers say

    def _hear(self, nic: int, address: bytes, message: Failed) -> None:
        """A peer gives an immediate up: fail its open expectation, or else the next one."""
        engine = self._channel.engine_of(nic, address)
        heard = self._heard.get(engine, {})
        if message.number not in heard:  # else it is a repetition, because our answer was late

            def meant(handle: Expectation) -> bool:
                return handle.imm == message.imm and _is_from(handle, address)

            if not self.fail(meant, lambda _, came: given_up(message.imm, message, f"; {came}")):
                if sum(map(len, self.broken.values())) >= _BROKEN_MAX:
                    text = f"{_BROKEN_MAX} immediates were given up that nobody expects"
                    self._channel.drop(Drop.FULL, address, text)
                    return
                error = given_up(message.imm, message, "")
                self.broken.setdefault(message.imm, {})[engine] = _GivenUp(address, error, None)
            heard[message.number] = None
            if len(heard) > _HEARD_MAX:
                del heard[next(iter(heard))]
            self._heard[engine] = heard
            if len(self._heard) > _ENGINES_MAX:
                del self._heard[next(iter(self._heard))]
        self._channel.tell(nic, address, message.number)

    def _hear_missing(self, nic: int, address: bytes, message: Missing) -> None:
        """Immediates of a peer's transfers do not come: apply its list, if it is a new one."""
        engine = self._channel.engine_of(nic, address)
        heard = self._lists.get(engine) or _Heard()
        why = ""
        if message.serial >= heard.done and message.serial not in heard.serials:
            if len(heard.serials) >= SERIALS_MAX:
                self._channel.drop(Drop.FULL, address, "too many lists of missing immediates")
                return
            imms = [imm for first, n, *_ in message.imms for imm in range(first, first + n)]
            arrived = self._arrived(engine, imms)
            why = _not_yet(message, arrived)
            if not why:
                heard.serials.add(message.serial)
                self._apply(engine, address, message, arrived)
        if message.done > heard.done:
            heard.done = message.done
            heard.serials = {serial for serial in heard.serials if serial >= message.done}
        self._lists[engine] = heard
        if len(self._lists) > _ENGINES_MAX:
            gone = next(iter(self._lists))
            del self._lists[gone]
            for imm in self._missing.pop(gone, ()):
                self._forget(gone, imm)
        self._channel.tell(nic, address, message.number, why)

    def _apply(
        self, engine: bytes, address: bytes, message: Missing, arrived: _Arrived | None
    ) -> None:
        """Fail expectations of the immediates in a list, and do not count what came of them."""
        imms = self._imms
        # To come, came, came besides, and may come.
        short: dict[int, tuple[int, int, int, int]] = {}
        place = 0
        for first, n, sent, came, late, total in message.imms:
            for imm in range(first, first + n):
                more, mine = 0, came
                if arrived is not None:  # then no peer can take back more than it has sent
                    mine = min(came, arrived.sums[place] + arrived.pruned)
                    more = arrived.sums[place] - total if total >= 0 else 0
                place += 1
                if not imms.is_claimed(imm):
                    short[imm] = sent, mine, more, late
        # A transfer of which all came after all, and was used up: its sender only missed that.
        over = {
            imm
            for imm, (sent, came, more, _) in short.items()
            if sent and more >= sent - came and imms.counts.get(imm) < sent
        }

        def meant(handle: Expectation) -> bool:
            found = short.get(handle.imm)
            return found is not None and found[0] > 0 and _is_from(handle, address)

        def take_back() -> None:
            for imm in short.keys() - over:
                imms.take_back(imm, short[imm][1])

        def error(handle: Expectation, came: str) -> FabricError:
            return given_up(handle.imm, message, f"; {came}")

        failed = self.fail(meant, error, take_back)
        for imm, (sent, _, _, late) in short.items():
            known = self.broken.get(imm, {}).get(engine)
            if sent and imm not in failed and imm not in over:
                news = given_up(imm, message, "")
                given = _GivenUp(address, news, self._seen(engine, imm), late)
                self._keep(engine, imm, given)
            elif not sent and known is not None and known.seen is not None:  # its paths are fenced
                given = known._replace(seen=self._seen(engine, imm), late=0)
                self.broken[imm][engine] = given

    def _keep(self, engine: bytes, imm: int, given: _GivenUp) -> None:
        """Keep what the next expectation of an immediate fails with."""
        mine = self._missing.setdefault(engine, {})
        mine.pop(imm, None)
        mine[imm] = None
        self.broken.setdefault(imm, {})[engine] = given
        if len(mine) > _MISSING_MAX:
            first = next(iter(mine))
            del mine[first]
            self._forget(engine, first)

    def _forget(self, engine: bytes, imm: int) -> None:
        given = self.broken.get(imm, {})
        if engine in given and given[engine].seen is not None:
            del given[engine]
        if not given:
            self.broken.pop(imm, None)

    # ------------------------------------------------------------------ how many came

    def _arrived(self, engine: bytes, imms: Sequence[int]) -> _Arrived | None:
        """How many of each immediate an engine sent here; None: not known."""
        if not self._arrivals:
            return None
        sums, generations, pruned = [0] * len(imms), 0, 0
        for number, (nic, arrivals) in enumerate(zip(self._nics, self._arrivals, strict=True)):

            def is_its(address: bytes, number: int = number) -> bool:
                return self._channel.engine_of(number, address) == engine

            found = arrivals.totals(nic, is_its, imms)
            if found is None:
                return None
            sums = [one + other for one, other in zip(sums, found[0], strict=True)]
            generations += found[1]
            pruned += found[2]
        return _Arrived(sums, generations, pruned)

    def _seen(self, engine: bytes, imm: int) -> int:
        """How many of an immediate came from an engine; if that is not known, how many are here."""
        arrived = self._arrived(engine, (imm,))
        return self._imms.counts.get(imm) if arrived is None else arrived.sums[0]


def _not_yet(message: Missing, arrived: _Arrived | None) -> str:
    """Why a list cannot be applied yet: of what was acknowledged not all has been counted here."""
    if arrived is None or any(total < 0 for *_, total in message.imms):
        return ""
    if arrived.generations != message.pruned:
        return "sums are being pruned"
    totals = [total for _, n, *_, total in message.imms for _ in range(n)]
    if any(total > came for total, came in zip(totals, arrived.sums, strict=True)):
        return "not all that were acknowledged have been counted yet"
    return ""


def _is_from(expectation: Expectation, address: bytes) -> bool:
    """Whether the engine with a NIC at an address may fail an expectation."""
    sender = expectation.sender
    return sender is None or address in sender.addr.domains
