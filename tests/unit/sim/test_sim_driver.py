"""The simulated driver and the cluster: waiting, awaiting, stalls, restarts, wrong use."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

import tep
from tep.base.errors import (
    ClosedError,
    FabricError,
    StallError,
    UsageError,
    WaitTimeout,
)
from tep.sim import Chaos, Cluster, KillNic, Restart, run

PAGE = 64
INDEX = np.arange(24)


class Pages:
    """A region full of pages on each side of a cluster's first two engines."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.src = np.random.default_rng(1).integers(1, 255, 24 * PAGE, np.uint8)
        self.dst = np.zeros_like(self.src)
        self.mr, _ = cluster.engines[0].reg_mr(self.src)
        _, self.desc = cluster.engines[1].reg_mr(self.dst)

    def send(self, imm: int = 42):
        """Start the paged write of all pages."""
        pages = tep.Pages(INDEX)
        return self.cluster.engines[0].submit_paged_writes(
            PAGE, (self.mr, pages), (self.desc, pages), imm=imm
        )

    def expect(self, imm: int = 42):
        """Expect all pages."""
        return self.cluster.engines[1].expect_imm_count(imm, 24)

    def arrived(self) -> bool:
        """Return True if all bytes are there."""
        return bool((self.src == self.dst).all())


def test_wait_turns_the_clock() -> None:
    """The blocking form of the first notebook cell."""
    for seed in range(10):
        with Cluster(seed=seed) as cluster:
            pages = Pages(cluster)
            got, sent = pages.expect(), pages.send()
            got.wait()
            assert pages.arrived()
            sent.wait()
            assert cluster.now_us > 0


def test_await_in_a_run_of_the_cluster_and_in_a_run_around_it() -> None:
    """The same program as on hardware, in simulated time."""

    async def main(cluster: Cluster) -> bool:
        pages = Pages(cluster)
        async with asyncio.timeout(1):
            await asyncio.gather(pages.expect(), pages.send())
        return pages.arrived()

    async def around() -> bool:
        with Cluster(seed=5) as cluster:
            return await main(cluster)

    with Cluster(seed=4) as cluster:
        assert cluster.run(main(cluster))
    assert run(around())


def test_a_wait_for_nothing_is_a_stall_at_once() -> None:
    """The report names the counter, how many came and how many are missing."""
    with Cluster(seed=1) as cluster:
        pages = Pages(cluster)
        pages.send().wait()
        hopeless = cluster.engines[1].expect_imm_count(42, 30)
        with pytest.raises(StallError, match=r"24 of 30"):
            hopeless.wait()

        async def main() -> None:
            await hopeless

        with pytest.raises(StallError, match=r"(?s)task main: waits in.*24 of 30"):
            cluster.run(main())


def test_a_deadline_counts_simulated_seconds() -> None:
    """A timeout in real seconds would never come, or come at another time in every run."""
    with Cluster(seed=1) as cluster:
        hopeless = cluster.engines[1].expect_imm_count(42, 1)
        cluster.at(50, lambda: None)
        with pytest.raises(WaitTimeout):
            hopeless.wait(timeout_s=0.00002)
        assert 20 == cluster.now_us


def test_waiting_while_the_clock_runs_is_refused() -> None:
    """It would turn the clock inside itself; the message says what to write instead."""
    with Cluster(seed=1) as cluster:
        pages = Pages(cluster)
        caught: list[Exception] = []

        def blocked() -> None:
            try:
                pages.expect().wait()
            except UsageError as error:
                caught.append(error)

        cluster.at(1, blocked)
        pages.send().wait()
        assert "use `await`" in str(caught[0])


def test_awaiting_in_real_time_is_refused() -> None:
    """A real event loop would sleep while nobody turns the simulation."""
    with Cluster(seed=1) as cluster:
        pages = Pages(cluster)

        async def main() -> None:
            await pages.expect()

        with pytest.raises(UsageError, match=r"cluster\.run\(main\(\)\)"):
            asyncio.run(main())
        with pytest.raises(UsageError, match="another simulation"):
            run(main())


def test_words_written_by_a_process_are_seen_and_keep_nothing_alive() -> None:
    """A watched word is how a GPU's progress reaches the engine."""
    with Cluster(seed=1) as cluster:
        seen: list[tuple[int, int]] = []
        watcher = cluster.engines[0].alloc_uvm_watcher(lambda old, new: seen.append((old, new)))

        def gpu():
            for value in (1, 5):
                yield cluster.env.timeout(3_000_000)
                watcher.word[0] = value

        cluster.env.process(gpu())
        cluster.env.run()
        assert [(0, 1), (1, 5)] == seen
        assert cluster.now_us < 10


def test_restart_brings_an_engine_with_a_later_epoch() -> None:
    """Old handles end, old descriptors are refused, new ones work: memory is never mixed up."""
    with Cluster(seed=3) as cluster:
        pages = Pages(cluster)
        old = cluster.engines[1]
        got = pages.expect()
        new = cluster.restart("b")
        assert cluster.engines[1] is new
        assert new.main_address.epoch == old.main_address.epoch + 1
        with pytest.raises(ClosedError):
            got.wait()
        with pytest.raises(FabricError, match="STALE_PEER"):
            pages.send().wait()
        fresh = np.zeros_like(pages.dst)
        _, pages.desc = new.reg_mr(fresh)
        got, sent = pages.expect(), pages.send()
        got.wait()
        sent.wait()
        assert (fresh == pages.src).all()
        assert not pages.dst.any()


def test_faults_at_a_time() -> None:
    """A scripted scenario: a NIC dies, then the node restarts, and the clock goes on."""
    with Cluster(nics=2, chaos=Chaos(dead_after_ps=300_000), row_log=True) as cluster:
        pages = Pages(cluster)
        cluster.at(0.3, KillNic("a", 0))
        cluster.at(90, Restart("a"))
        sent = pages.send()
        sent.wait()
        assert sent.stats().rows_again, "the other NIC made good what this one took along"
        assert pages.arrived()
        cluster.env.run()
        assert 2 == cluster.engines[0].main_address.epoch
        assert ["kill", "crash"] == [
            r.peer for r in cluster.row_log.records() if r.what == "fault" and r.nic == 0
        ][:2]
        with pytest.raises(UsageError, match="stands at"):
            cluster.at(1, KillNic("a", 1))


def test_revoked_memory_fails_the_transfer() -> None:
    """The application hears of the lost registration, with the row and the reason."""
    with Cluster(seed=2) as cluster:
        pages = Pages(cluster)
        cluster.revoke("b")
        with pytest.raises(FabricError, match="REMOTE_KEY"):
            pages.send().wait()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nodes": 0}, "nodes=0 is outside 1"),
        ({"nodes": 3, "names": ["x"]}, "1 names for 3 nodes"),
        ({"nodes": 3, "nics": [1, 2]}, "counts of 2 nodes, but nodes=3"),
        ({"names": ["x", "x"]}, "is there already"),
        ({"nics": 65}, "nics=65 is outside 1 .. 64"),
        ({"profile": "efa_2x200", "nics": 2}, "a profile has its own NICs"),
        ({"profile": "efa_2x200", "chaos": Chaos()}, "no chaos"),
        ({"profile": "efa_3x17"}, "efa_3x17"),
        ({"move_bytes": False}, "always moves bytes"),
    ],
)
def test_contradictions_are_refused(options: dict, message: str) -> None:
    """A cluster of another shape than asked for would give a figure for something else."""
    with pytest.raises(UsageError, match=message):
        Cluster(**options)


def test_shapes_and_names() -> None:
    """Unequal NIC counts on the two sides are what the planner is there for."""
    with Cluster(nodes=3, nics=[1, 2, 4], names=["x", "y", "z"], seed=9) as cluster:
        assert ["x", "y", "z"] == [engine.name for engine in cluster.engines]
        addresses = [engine.main_address for engine in cluster.engines]
        assert [1, 2, 4] == [len(address.domains) for address in addresses]
        with pytest.raises(UsageError, match="no node 'w'"):
            cluster.kill_nic("w", 0)
        with pytest.raises(UsageError, match="no rates; open the Cluster with a profile"):
            cluster.slow_down("x", 0, 2.0)
        assert "seed=9" in repr(cluster)


def test_a_profile_makes_the_same_program_run_on_a_model_of_a_machine() -> None:
    """The first cell of the first notebook; only the constructor differs from chaos."""
    with Cluster(nodes=2, profile="efa_2x200", seed=7, row_log=True) as cluster:
        pages = Pages(cluster)
        got, sent = pages.expect(), pages.send()
        got.wait()
        sent.wait()
        assert pages.arrived()
        assert 2 == len(cluster.engines[0].main_address.domains)
        assert 24 == len(cluster.row_log.columns("imm", "b"))
        with pytest.raises(UsageError, match="open the Cluster with mortal=True"):
            cluster.kill_nic("a", 0)
        with pytest.raises(UsageError, match="faults are the chaos fabric's"):
            cluster.at(1e6, Restart("a"))
        for node, nic, times in (("w", 0, 2.0), ("a", 2, 2.0), ("a", 0, 0.0)):
            with pytest.raises(UsageError):
                cluster.slow_down(node, nic, times)


def test_a_failure_inside_the_cluster_names_its_seed() -> None:
    """The one line that runs it again."""
    with pytest.raises(AssertionError) as caught, Cluster(seed=77):
        raise AssertionError("own")
    assert any("seed=77" in note for note in caught.value.__notes__)
