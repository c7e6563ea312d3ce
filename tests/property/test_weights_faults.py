"""tep.integrations.weights among drawn faults: no rank gives out a mixture, or what others lack."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

import tep
from tep.integrations.weights.hub import Hub
from tep.integrations.weights.ranks import WeightReceiver, WeightSender
from tep.sim import Faults
from tests.property.test_rl_faults import _serves_while_rows_move
from tests.support.effort import fresh

RANKS, WORKERS, VERSIONS = 2, 3, 4
FAULTY_PS = 400_000_000
PAUSE_S = 7e-6


def weights_of(version):
    return [(f"w{k}", np.full((40 + k, 33), version, np.float32)) for k in range(5)]


class Trial:
    """A hub whose receivers are read all the time, while links and rollout ranks fail."""

    def __init__(self, seed):
        names = [chr(ord("a") + k) for k in range(RANKS + WORKERS)]
        faults = Faults.draw(seed, dict.fromkeys(names, 2), to_ps=FAULTY_PS)
        self.cluster = tep.sim.Cluster(
            nodes=len(names), nics=2, seed=seed, chaos=faults.chaos, names=names
        )
        engines = self.cluster.engines
        self.senders = [WeightSender(engines[k], k, RANKS) for k in range(RANKS)]
        self.hub = Hub(self.senders, timeout_s=20.0)
        self.receivers = {}
        self.pause_s = PAUSE_S
        for t_ps, event in faults.events:
            if getattr(event, "node", names[-1]) not in names[:RANKS]:  # trainers live
                self.cluster.at(t_ps / 1e6, event)

    async def join(self):
        """Put a new rollout rank where there is none, or its engine has gone."""
        for k, engine in enumerate(self.cluster.engines[RANKS:]):
            old = self.receivers.get(k)
            if old is None or old.engine is not engine or old.name not in self.hub.receivers:
                self.receivers[k] = WeightReceiver(engine, f"r{k}")
                await self.hub.welcome(f"r{k}", self.receivers[k])

    async def read(self):
        while True:
            for receiver in self.receivers.values():
                version = receiver.serving
                if version is None:
                    continue
                try:
                    with receiver.read(version) as weights:
                        found = {int(v) for w in weights for v in np.unique(w.values)}
                        assert {version} == found, f"{receiver.name}: {found}"
                except tep.UsageError:
                    pass  # not given out: a new one is on its way
            self.pause_s *= 1.02
            await asyncio.sleep(self.pause_s)

    async def send(self, version):
        self.pause_s = PAUSE_S  # look often while rows move, seldom while everybody waits
        for sender in self.senders:
            sender.load(weights_of(version))
        sending = [asyncio.ensure_future(one.send(version, 100.0)) for one in self.senders]
        try:
            await self.hub.update(version)
        except tep.TepError:
            for receiver in self.receivers.values():
                with pytest.raises(tep.UsageError, match="not given out"), receiver.read(version):
                    pass
            return False
        finally:
            await asyncio.gather(*sending, return_exceptions=True)
        for receiver in self.receivers.values():
            with receiver.read(version):
                pass
        return True

    async def main(self):
        reading = asyncio.ensure_future(self.read())
        done = []
        for version in range(1, VERSIONS + 1):
            await self.join()
            done.append(await self.send(version))
        self.cluster.heal()
        for k in range(WORKERS):
            self.cluster.restart(RANKS + k)
        await self.join()
        self.hub.keep([one.name for one in self.receivers.values()])
        alive = all(all(sender.engine.stats().nics_up) for sender in self.senders)
        assert await self.send(VERSIONS + 1) or not alive, "nothing is wrong any more"
        reading.cancel()
        (ended,) = await asyncio.gather(reading, return_exceptions=True)
        if not isinstance(ended, asyncio.CancelledError):
            raise ended
        return done


def run_trial(seed):
    trial = Trial(seed)
    with trial.cluster:
        return trial.cluster.run(trial.main())


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 22, 26, 62])
def test_no_fault_mixes_versions_or_ranks(seed):
    """A version that half of the ranks load, or that half of the weights are of, is a wrong answer
    that nobody can tell from a right one.
    """
    run_trial(seed)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_no_fault_of_many_does():
    """Some updates fail in these and some do not, and both are told truly."""
    outcomes = {tuple(run_trial(seed)) for seed in fresh(300)}

    assert len(outcomes) > 3


@pytest.mark.slow
def test_a_planted_bug_is_found(monkeypatch):
    """Trials that pass whatever the code does prove nothing: here a version is still read while the
    next one is written over it.
    """
    _serves_while_rows_move(monkeypatch)
    begin = WeightReceiver.begin

    async def keeps(self, *args):
        before = self._complete
        regions = await begin(self, *args)
        self._complete = before
        return regions

    monkeypatch.setattr(WeightReceiver, "begin", keeps)

    with pytest.raises(AssertionError, match=r"r\d: \{"):
        run_trial(0)
