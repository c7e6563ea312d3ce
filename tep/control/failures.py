"""Immediates that will not come: tell a peer that one fails, and handle what peers tell.

See `engine.fail`. `imm` counts, `channel` sends; nothing here posts. Rule 1: a message that arrives
twice fails an expectation once. Rule 2: an expectation that names its sender can be failed by that
engine only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tep.control.channel import Channel, Drop
from tep.control.messages import Answer, Failed, given_up
from tep.core.handle import Handle, State
from tep.core.imm import ImmTable
from tep.core.transfer import Expectation, Notice
from tep.errors import FabricError, TepError

__all__ = ["Failures"]

_HEARD_MAX: Final = 256
"""Message numbers that are remembered of each engine, so that a repeated message counts once."""

_ENGINES_MAX: Final = 4096
"""Engines whose message numbers are remembered; beyond that the first engine is forgotten."""

_BROKEN_MAX: Final = 4096
"""Immediates that peers gave up before anybody expected them. A message about one more is not
answered, and its sender learns that this engine could not be told."""


class Failures:
    """Messages between one engine and its peers that immediates fail.

    Args:
        name: the name of this engine and its incarnation, for error texts of peers.
        imms: the table of expectations.
        channel: control messages to the peers.
        opened: every handle that has not settled.
        settle: ends a handle.

    Attributes:
        broken: immediates that peers gave up while nobody expected them: for each the errors, by
            the address of the NIC that sent the message.
    """

    def __init__(
        self,
        name: str,
        imms: ImmTable[Expectation],
        channel: Channel,
        opened: dict[Handle, None],
        settle: Callable[[Handle, State, TepError | None], None],
    ) -> None:
        self.broken: dict[int, dict[bytes, FabricError]] = {}
        self._heard: dict[bytes, dict[int, None]] = {}  # numbers, by engine
        self._name = name
        self._imms, self._channel = imms, channel
        self._opened, self._settle = opened, settle
        channel.hear(Failed, self._hear)

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
    ) -> bool:
        """Fail the open expectations for which meant(expectation) is true.

        Each fails with error(expectation, text that says how many immediates came).

        Returns:
            Whether there was one.
        """
        waiting = [h for h in self._opened if isinstance(h, Expectation) and meant(h)]
        found = False
        for handle in reversed(
            waiting
        ):  # the last one first, so that cancelling one completes none behind it
            came = f"{handle.arrived} of {handle.count} came"
            if self._imms.cancel(handle):
                found = True
                self._settle(handle, State.FAILED, error(handle, came))
        return found

    def take(self, expectation: Expectation) -> FabricError | None:
        """Take the error of a new expectation that a peer gave up already; it is used once."""
        errors = self.broken.get(expectation.imm, {})
        for address in errors:
            if _is_from(expectation, address):
                error = errors.pop(address)
                if not errors:
                    del self.broken[expectation.imm]
                return error
        return None

    def _hear(self, nic: int, address: bytes, message: Failed) -> None:
        """A peer gives an immediate up: fail its open expectation, or else the next one."""
        engine = self._channel.engine_of(nic, address)
        heard = self._heard.get(engine, {})
        if message.number not in heard:  # else it is a repetition, because our answer was late

            def meant(handle: Expectation) -> bool:
                return handle.imm == message.imm and _is_from(handle, address)

            if not self.fail(meant, lambda _, came: given_up(message, f"; {came}")):
                if sum(map(len, self.broken.values())) >= _BROKEN_MAX:
                    text = f"{_BROKEN_MAX} immediates were given up that nobody expects"
                    self._channel.drop(Drop.FULL, address, text)
                    return
                self.broken.setdefault(message.imm, {})[address] = given_up(message, "")
            heard[message.number] = None
            if len(heard) > _HEARD_MAX:
                del heard[next(iter(heard))]
            self._heard[engine] = heard
            if len(self._heard) > _ENGINES_MAX:
                del self._heard[next(iter(self._heard))]
        self._channel.tell(nic, address, message.number)


def _is_from(expectation: Expectation, address: bytes) -> bool:
    """Whether the engine with a NIC at an address may fail an expectation."""
    sender = expectation.sender
    return sender is None or address in sender.addr.domains
