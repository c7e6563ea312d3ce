"""Playing a scenario: everybody on the stage, what breaks, and the run until all is quiet."""

from __future__ import annotations

from itertools import repeat
from typing import Final

from tep.engine import TransferEngine
from tep.sim.clock import FabricEnv
from tep.sim.faults import Drift, Fault, Restart
from tep.sim.row_log import RowLog
from tests.world.company import Company
from tests.world.mail import Mail
from tests.world.reader import Reader
from tests.world.receivers import Receivers
from tests.world.scenario import Scenario
from tests.world.sender import Sender
from tests.world.stage import Stage

_EVENTS_MAX: Final = 20_000
"""A correct run takes about 100, the longest ones some 2,000; five times as many where a peer that
is gone has to be told something: that is tried 30 times."""


class Play:
    """One scenario while it is played.

    Attributes:
        stage: what is judged afterwards.
        mail: the messages.
        reader: the reads.
        company: what node a hears of node b.
    """

    def __init__(
        self,
        scenario: Scenario,
        engine_class: type[TransferEngine],
        row_log: RowLog | None,
        env: FabricEnv | None = None,
    ) -> None:
        self.stage = stage = Stage(scenario, engine_class, row_log, env)
        stage.seen["steady"] += scenario.steady
        stage.seen["more than three nodes"] += len(scenario.names) > 3
        self.company = Company(stage)
        self.mail = Mail(stage)
        self._receivers = Receivers(stage)
        self._sender = Sender(stage)
        self.reader = Reader(stage)
        stage.find_read = self.reader.find
        if scenario.close is not None:
            t_ps, name = scenario.close
            stage.lab.env.call_at(t_ps, self._close, name)
        for t_ps, fault in scenario.faults:
            stage.lab.env.call_at(t_ps, self._inflict, fault)

    def run(self) -> None:
        """Let it all happen. Raises Violation if there is no end of it."""
        scenario = self.stage.scenario
        # Where of 256 fences one holds, a path is asked for so often until it is open again.
        longer = 25 if scenario.chaos.fence_fails or scenario.bar_ps is not None else 5
        most = _EVENTS_MAX * longer
        try:
            self.stage.lab.env.run_until(repeat(False, most).__next__)
        except StopIteration:
            self.stage.fail(f"still not quiet after {most} events")

    def _inflict(self, fault: Fault) -> None:
        stage = self.stage
        if fault.node not in stage.lab.hosts:
            return
        stage.seen[type(fault).__name__] += 1
        if isinstance(fault, Drift):  # no excuse for anything
            stage.lab.fabric.inflict(fault)
            return
        stage.broken.append(fault)
        if not isinstance(fault, Restart):
            stage.lab.fabric.inflict(fault)
            return
        stage.seen["restart"] += 1
        stage.gone.setdefault(fault.node, stage.lab.env.now)
        host = stage.lab.restart(fault.node)
        if host is stage.sender:
            stage.seen["sender restarted"] += 1
            self._sender.restarted()
            return
        self.mail.open(host)
        self.reader.open(host)
        self._receivers.restarted(host)

    def _close(self, name: str) -> None:
        stage = self.stage
        host = stage.lab.hosts.get(name)
        if host is not None:
            stage.seen["closed"] += 1
            stage.closed.add(name)
            stage.gone.setdefault(name, stage.lab.env.now)
            host.live = False
            host.engine.close()
