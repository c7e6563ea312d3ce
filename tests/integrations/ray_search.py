"""`tep sim --ray` on a Ray of several nodes, one of them killed: the same findings as here.

Run by scripts/integrations.py in an environment that has Ray.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys

import ray_nodes

from tep.cli import main as tep
from tep.integrations.ray import cluster as on_ray
from tep.testing.spreading import ProtocolJudge, search

RUNS, MOST, NODES = 5000, 120, 3


def printed(*argv: str) -> str:
    """Run `tep`; return its stdout."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = tep(argv)
    assert out.getvalue(), (argv, status)
    return out.getvalue()


def main() -> int:
    """Search with and without Ray."""
    judge = ProtocolJudge(ray_nodes.here("ray_protocol.py:believes_in_its_nics"), faults="nics")
    seeds = range(RUNS)
    alone, _ = search(judge, seeds, most=MOST)
    assert len(alone) == MOST, "the protocol is not wrong often enough"
    last = alone[-1].seed
    with ray_nodes.nodes(NODES) as (cluster, live):
        moved: list[int] = []

        def judged(count: int) -> None:
            moved.append(count)
            if sum(moved) > (last // 5) * (NODES - len(live) + 1) and len(live) > 1:
                ray_nodes.kill(live.pop())

        calls = on_ray.calls(cluster.address, folder=judge.folder, timeout_s=120)
        found, _ = search(judge, seeds, most=MOST, calls=calls, judged=judged)
        assert [one.seed for one in alone] == [one.seed for one in found]
        killed = NODES - len(live)
        assert killed, "the search ended before a node was killed"

        place = ("--protocol", judge.place, "--findings", "3", "--json")
        clean = ("sim", "--runs", "300", *place, "--faults", "order")
        hunt = ("sim", "--runs", str(last), *place, "--faults", "nics")
        for command in (clean, hunt):
            assert printed(*command) == printed(*command, "--ray", cluster.address)
    result = {
        "ok": True,
        "nodes": f"{NODES}, {killed} killed",
        "findings": f"{MOST} of {last + 1} seeds, as in one process",
    }
    sys.stdout.write(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
