"""The messages of one scenario: node a sends small payloads to b, which has few buffers for them.

Plays them and judges them: each is delivered once if it is done, at most once if not, and unharmed.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Final

from tep.base.errors import ClosedError
from tep.base.units import PS_PER_NS
from tep.core.handles import Message, State
from tests.world.lab import Host
from tests.world.specs import RECEIVERS
from tests.world.stage import Stage

_BUFFER_BYTES: Final = 64
_EVERY_PS: Final = 60 * PS_PER_NS


class Mail:
    """All messages of one run.

    Attributes:
        handles: of those that the engine took.

    """

    def __init__(self, stage: Stage) -> None:
        self.handles: dict[int, Message] = {}
        self._stage = stage
        self._to: dict[int, Host] = {}
        self._settled: defaultdict[int, int] = defaultdict(int)
        self._got: defaultdict[int, int] = defaultdict(int)
        self.open(stage.lab.hosts[RECEIVERS[0]])
        for number in range(stage.scenario.messages):
            stage.lab.env.call_at(1 + number * _EVERY_PS, self._send, number)

    def open(self, host: Host) -> None:
        """Give a receiver its buffers."""
        scenario = self._stage.scenario
        if scenario.messages and host.name == RECEIVERS[0]:
            host.engine.submit_recvs(_BUFFER_BYTES, scenario.buffers, self._receive)

    def _send(self, number: int) -> None:
        sender, host = self._stage.sender, self._stage.lab.hosts[RECEIVERS[0]]
        try:
            handle = sender.engine.submit_send(host.desc.addr, _payload(number))
        except ClosedError:
            if not self._stage.may_refuse((host,)):
                self._stage.fail(f"message {number} refused by an engine that is open")
            return
        self.handles[number] = handle
        self._to[number] = host
        handle.add_done_callback(lambda _: self._end(number))

    def _end(self, number: int) -> None:
        self._settled[number] += 1
        if self._settled[number] != 1:
            self._stage.blame(f"message {number} settled twice")

    def _receive(self, view: memoryview) -> None:
        number = view[0]
        self._got[number] += 1
        if bytes(view) != _payload(number):
            self._stage.blame(f"message {number} arrived as {bytes(view)!r}")

    def judge(self) -> None:
        """Look at every message once all is quiet."""
        stage = self._stage
        may_fail = stage.harmed
        for number, handle in self.handles.items():
            got, sure = self._got[number], handle.ok and self._to[number].live
            if not self._settled[number]:
                stage.blame(f"message {number} never ended")
            if not sure <= got <= 1:
                stage.blame(f"message {number} is {handle.state.value}, and arrived {got} times")
            if handle.state is State.FAILED and not may_fail:
                stage.blame(f"message {number} failed without a cause: {handle.error}")


def _payload(number: int) -> bytes:
    return bytes([number]) * (1 + 9 * number % _BUFFER_BYTES)
