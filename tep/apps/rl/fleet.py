"""A simulated cluster at full scale: engines that keep time and count, and move no bytes.

Regions are addresses without memory behind them. Shared by the prediction and the baselines.
"""

from __future__ import annotations

import dataclasses
from typing import Final, Self

import tep
from tep.base.units import MiB
from tep.sim import load_profile

__all__ = ["QUANTUM_BYTES", "Fleet"]

QUANTUM_BYTES: Final = 4 * MiB
"""What a NIC sends of one flow before it turns to the next. The profiles' 64 KiB would be ninety
million turns for six terabytes; rows here are megabytes, so the share of each flow is the same."""

_BASE: Final = 1 << 40
_SLOT: Final = 1 << 41


class Fleet:
    """Training ranks and rollout workers.

    Args:
        trains, rollouts: how many.
        profile: of the machines.
        seed: of the fabric's jitter.
        region_bytes: of every region.
        network: as of sim.Cluster.
        rollout_profile: of the rollout workers' machines, where those are others.

    Attributes:
        cluster: underneath.
        machine, rollout_machine: of the training ranks, and of the rollout workers.
        trains, rollouts: engines.
        sources: a region of each training rank.
        targets: a region of each rollout worker, as its peers see it.
    """

    def __init__(
        self,
        trains: int,
        rollouts: int,
        profile: str | tep.sim.Profile,
        *,
        seed: int = 0,
        region_bytes: int,
        quantum_bytes: int = QUANTUM_BYTES,
        network: tep.sim.Network | None = None,
        rollout_profile: str | tep.sim.Profile | None = None,
    ) -> None:
        self.machine, self.rollout_machine = (
            dataclasses.replace(
                load_profile(one) if isinstance(one, str) else one, quantum_bytes=quantum_bytes
            )
            for one in (profile, rollout_profile or profile)
        )
        self.cluster = tep.sim.Cluster(
            nodes=trains + rollouts,
            profile=[self.machine] * trains + [self.rollout_machine] * rollouts,
            seed=seed,
            names=[
                *(f"train{k}" for k in range(trains)),
                *(f"rollout{k}" for k in range(rollouts)),
            ],
            move_bytes=False,
            network=network,
            options=tep.EngineOptions(wait_timeout_s=3600.0),
        )
        engines = self.cluster.engines
        self.trains = engines[:trains]
        self.rollouts = engines[trains:]
        regions = [
            engine.reg_mr((_BASE + k * _SLOT, region_bytes, "cpu"))
            for k, engine in enumerate(engines)
        ]
        self.sources = [mr for mr, _ in regions[:trains]]
        self.staging = [desc for _, desc in regions[:trains]]
        self.relays = [mr for mr, _ in regions[trains:]]
        self.targets = [desc for _, desc in regions[trains:]]

    @property
    def nics(self) -> tuple[int, int]:
        """NICs of a training rank, and of a rollout worker."""
        return self.machine.nics, self.rollout_machine.nics

    def machine_of(self, node: str) -> tep.sim.Profile:
        """The machine of a node of this name, or of this kind."""
        return self.machine if node.startswith("train") else self.rollout_machine

    def slow_down(self, node: str, nic: int, times: float) -> None:
        """Let one NIC take so many times as long for every byte, both ways.

        Raises:
            UsageError: there is no such NIC.
        """
        self.cluster.slow_down(node, nic, times)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cluster.close()
