"""`tep sim whatif`: the effect of a changed machine on the three systems.

The systems are small ones, so that an answer takes seconds; only the ratio counts. A node of the
simulated network is an engine, that is a GPU with its NICs; several of them are a host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

import numpy as np

from tep import Pages, UsageError
from tep.apps.kvcache.simulate import Load, Plant, simulate
from tep.apps.moe.predict import Workload, predict
from tep.apps.rl import study
from tep.apps.rl.models import PUBLISHED, InferLayout, TrainLayout, model_from_config
from tep.apps.rl.predict import SlowNic
from tep.apps.rl.predict import predict as predict_update
from tep.base.units import PS_PER_US, GiB
from tep.sim import Cluster, Network, Profile
from tep.sim.profile import with_number

__all__ = ["Effect", "Machine", "change", "effects"]

_THREE: Final = ("moe", "kvcache", "rl")
_PAIRS: Final = 2  # prefillers, and decoders


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A cluster of equal machines, or of two halves.

    Attributes:
        profile: profile of each machine.
        other: profile of the second half, if it differs: the second half of MoE's ranks,
            KvCache's decoders, RL's rollout workers, the receiver of a failover.
        network: the network between them; None: one perfect switch.
        slow_nic: factor by which one NIC takes longer for every byte.
    """

    profile: Profile
    other: Profile | None = None
    network: Network | None = None
    slow_nic: float = 1.0


@dataclass(frozen=True, slots=True)
class Effect:
    """One figure of one system, before and after the change.

    Attributes:
        system, figure, unit: names of the figure.
        before, after: its values.
    """

    system: str
    figure: str
    unit: str
    before: float
    after: float

    @property
    def factor(self) -> float:
        """The factor by which it takes longer."""
        return self.after / self.before


def change(
    machine: Machine,
    *,
    numbers: Sequence[str] = (),
    slow_nic: float = 1.0,
    leaf_gpus: int = 0,
    rails: bool = False,
    host_gpus: int = 8,
    oversubscription: float = 0.0,
    spine_us: float = 0.0,
    gpus: int = 32,
) -> Machine:
    """Change a machine.

    Args:
        machine: the machine before the change.
        numbers: "nic.wire=800 Gb/s": keys of a profile's file, with new values and units; for the
            first half, if there are two.
        slow_nic: same as for Machine.
        leaf_gpus: GPUs below one leaf.
        rails: True: every NIC of a host is on its own rail.
        host_gpus: GPUs of one host, for rails.
        oversubscription: ratio of the rate of a leaf's NICs to the rate of its uplink; 0: the
            spine is no limit.
        spine_us: latency that the spine adds.
        gpus: largest number of GPUs; determines how wide a rail is.

    Raises:
        UsageError: a key that no profile has, or numbers that contradict each other.
    """
    profile = machine.profile
    for assignment in numbers:
        profile = with_number(profile, assignment)
    if not (leaf_gpus or rails):
        if oversubscription or spine_us:
            raise UsageError("a spine needs leaves: name leaf_gpus, or rails")
        return replace(machine, profile=profile, slow_nic=slow_nic)
    both = profile, machine.other or profile  # all leaves are alike: as wide as the widest
    wide = -(-gpus // host_gpus) * max(one.wire_bps for one in both)
    if not rails:
        wide = leaf_gpus * max(one.nics * one.wire_bps for one in both)
    uplink = wide / oversubscription if oversubscription else 0.0
    network = Network(
        leaf_nodes=0 if rails else leaf_gpus,
        rails=rails,
        host_gpus=host_gpus if rails else 0,
        uplink_bps=round(uplink),
        spine_ps=round(spine_us * PS_PER_US),
    )
    return replace(machine, profile=profile, network=network, slow_nic=slow_nic)


def effects(before: Machine, after: Machine, systems: Sequence[str] = ()) -> list[Effect]:
    """Simulate the systems on both machines.

    Args:
        before: the machine before the change.
        after: the changed machine.
        systems: some of "moe", "kvcache", "rl" and "failover"; none: the first three.

    Raises:
        UsageError: a system that is none of these, or rails that can have no effect on them.
    """
    unknown = set(systems) - set(_SYSTEMS)
    if unknown:
        raise UsageError(f"unknown: {sorted(unknown)}; there are: {list(_SYSTEMS)}")
    alike = after.profile.nics == (after.other or after.profile).nics
    rails = after.network is not None and after.network.rails and after.network.host_gpus < 2
    if rails and alike and "failover" not in systems:
        raise UsageError(
            "rails: NIC k of a GPU writes to NIC k of the others, so nothing crosses from rail to "
            "rail until a NIC dies; name host_gpus, a machine beside of other NICs, or failover"
        )
    found = []
    for name in systems or _THREE:
        figures = _SYSTEMS[name]
        was, is_ = figures(before), figures(after)
        for (figure, unit), value in was.items():
            found.append(Effect(name, figure, unit, value, is_[figure, unit]))
    return found


_Figures = dict[tuple[str, str], float]


def _moe(machine: Machine) -> _Figures:
    nic = "cx7" if machine.profile.ordered else "efa"
    workload = Workload(ep=32, nic=nic, slow_nic=machine.slow_nic, turns=3)
    half = workload.ep // 2
    ranks = [machine.profile] * half + [machine.other or machine.profile] * half
    found = predict(workload, machine=ranks, network=machine.network)
    return {
        ("dispatch EP32 p50", "us"): found.dispatch_us,
        ("combine EP32 p50", "us"): found.combine_us,
        ("dispatch EP32 p99", "us"): found.p99_us[0],
    }


def _kvcache(machine: Machine) -> _Figures:
    plant = Plant(
        prefillers=_PAIRS,
        decoders=_PAIRS,
        profile=machine.profile,
        decode_profile=machine.other,
        network=machine.network,
        slow_nic=machine.slow_nic,
    )
    report = simulate(plant, Load(rate=1.5, duration_s=4.0, ntokens=(8192,)))
    return {("first token, p50", "ms"): report.ttft_s() * 1e3}


@lru_cache(maxsize=1)
def _deployment() -> study.Deployment:
    config = dict(PUBLISHED["qwen3-235b"]["config"]) | {"num_hidden_layers": 12}
    return study.Deployment(
        model=model_from_config(config, name="an eighth of qwen3-235b", source="its config.json"),
        train=TrainLayout(fsdp=2, pp=2, ep=4),
        infer=InferLayout(ep=4, replicas=2),
        watermark_bytes=6 * GiB,
    )


def _rl(machine: Machine) -> _Figures:
    slow = SlowNic("train0", 0, machine.slow_nic) if machine.slow_nic != 1 else None
    found = predict_update(
        _deployment().schedule(),
        study.published_times("bytes"),  # the least compute: the network shows as much as it may
        profile=machine.profile,
        slow=slow,
        network=machine.network,
        rollout_profile=machine.other,
    )
    return {("update, 16 to 8 GPUs", "ms"): found.total_ms, ("its waiting", "ms"): found.wait_ms}


def _failover(machine: Machine) -> _Figures:
    """Simulate 4 MiB over each NIC, two at the least, and the time that a NIC's death adds."""
    pair = machine.profile, machine.other or machine.profile
    profiles = [replace(profile, nics=max(2, profile.nics)) for profile in pair]

    def end_us(node: int | None, at_us: float = 0.0) -> float:
        npages = 64 * profiles[0].nics
        with Cluster(
            profile=profiles, network=machine.network, move_bytes=False, mortal=True
        ) as cluster:
            a, b = cluster.engines
            mr, _ = a.reg_mr((1 << 40, npages << 16, "cpu"))
            _, desc = b.reg_mr((1 << 41, npages << 16, "cpu"))
            if node is not None:
                cluster.at(at_us, lambda: cluster.kill_nic(node, 0))
            pages = Pages(np.arange(npages))
            a.submit_paged_writes(1 << 16, (mr, pages), (desc, pages), imm=1).wait()
            return cluster.now_us

    whole_us = end_us(None)
    return {
        ("write over all NICs, 2 or more", "us"): whole_us,
        ("a NIC of the sender dies: longer by", "us"): end_us(0, whole_us / 2) - whole_us,
        ("a NIC of the receiver dies: longer by", "us"): end_us(1, whole_us / 2) - whole_us,
    }


_SYSTEMS: Final = {"moe": _moe, "kvcache": _kvcache, "rl": _rl, "failover": _failover}
