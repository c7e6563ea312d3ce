"""The program of scripts/bench_two_nodes: starts both sides if asked to, measures, prints, writes.

The measurements, and the format of the JSON, are in tep.bench.two_nodes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tep import TepError, TransferEngine, rendezvous, sim
from tep.base.distribution import need
from tep.bench.reproduce.tables import load_table
from tep.bench.two_nodes import Plan, Result, document, measure
from tep.cli.show import print_table
from tep.rendezvous.launch import METHODS, launch, own_address, place_here

__all__ = ["main"]

_MEET_S = 120.0


def main(argv: Sequence[str]) -> int:
    """Measure, or start the processes that measure; return 0 if all bytes were right."""
    given = _parser().parse_args(argv)
    try:
        place = place_here()
        if place is None and (given.hosts or given.launch == "local"):
            hosts = given.hosts.split(",") if given.hosts else ["127.0.0.1", "127.0.0.1"]
            method = given.launch or "ssh"
            script = [sys.executable, str(Path(__file__).resolve())]
            launch(method, hosts, [*script, *argv], timeout_s=given.timeout)
            return 0
        results = _simulated(given) if given.sim else _measured(given, place)
        if place is None or place.rank == 0:
            backend = "sim" if given.sim else given.backend
            options = {"profile": given.sim} if given.sim else _options(given)
            _report(document(results, backend, options, given.memory), given)
    except TepError as error:
        sys.stderr.write(f"bench_two_nodes: {type(error).__name__}: {error}\n")
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/bench_two_nodes",
        description="Throughput and latency between two nodes, beside the published figures.",
    )
    add = parser.add_argument
    add("--hosts", default="", help="two names, comma between; started by --launch (default ssh)")
    add("--launch", choices=METHODS, help="how the two sides are started; local: on this host")
    add("--backend", default="auto", help="a name of `tep info` (default auto)")
    add("--option", action="append", default=[], metavar="NAME=VALUE", help="the backend's; JSON")
    add(
        "--nics",
        default="",
        help="numbers of NICs to measure with, e.g. 1,2,4 (default: as opened)",
    )
    add("--memory", default="cpu", help='of the buffers: "cpu" or "cuda:N" (then its NICs as well)')
    add("--sim", default="", help="measure a simulated machine: a profile's name or path")
    add("--short", action="store_true", help="try everything in seconds; the figures mean nothing")
    add("--json", type=Path, help="write the results here, for `tep sim fit`")
    add("--plot", type=Path, help="draw them beside the published ones (needs matplotlib)")
    add("--timeout", type=float, default=900.0, help="seconds for all of it, where it is started")
    return parser


def _options(given: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, object] = {}
    for text in given.option:
        name, _, value = text.partition("=")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def _plan(given: argparse.Namespace) -> Plan:
    return Plan.short() if given.short else Plan()


def _tell(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _measured(given: argparse.Namespace, place: rendezvous.Place | None) -> list[Result]:
    """Measure over real NICs, or all in this process if it was started alone."""
    device = None if given.memory == "cpu" else given.memory
    results = []
    for count in [int(text) for text in given.nics.split(",") if text] or [0]:
        options = _nics(given, place, count)
        if place is None:
            with (
                TransferEngine.open(given.backend, device=device, **options) as a,
                TransferEngine.open(given.backend, device=device, **options) as b,
            ):
                results.append(measure([a, b], _plan(given), memory=given.memory, progress=_tell))
            continue
        with (
            rendezvous.join(place, timeout_s=_MEET_S) as group,
            TransferEngine.open(given.backend, device=device, **options) as engine,
        ):
            results.append(
                measure(
                    [engine],
                    _plan(given),
                    meeting=group,
                    memory=given.memory,
                    progress=_tell if place.rank == 0 else lambda _: None,
                )
            )
            group.barrier()
    return results


def _nics(given: argparse.Namespace, place: rendezvous.Place | None, count: int) -> dict[str, Any]:
    """Return the backend's options, with the NICs of this rank.

    tcp takes 127.0.0.1 unless an address is given, and each host needs its own: the one on the
    route to the other host.
    """
    options = _options(given)
    is_tcp = str(options.get("provider", "tcp")).startswith("tcp")
    if place and given.backend == "libfabric" and is_tcp and "nics" not in options:
        return options | {"nics": [own_address(place)] * (count or 1)}
    return options | ({"nics": count} if count else {})


def _simulated(given: argparse.Namespace) -> list[Result]:
    with sim.Cluster(nodes=2, profile=given.sim) as cluster:
        return [measure(cluster.engines, _plan(given), progress=_tell)]


def _published() -> dict[tuple[str, int], dict[str, float]]:
    """Return Gb/s by (kind, bytes) and NIC."""
    found: dict[tuple[str, int], dict[str, float]] = {}
    for point in load_table("p2p").points:
        key = point.keys["kind"], int(point.keys["bytes"])
        found.setdefault(key, {})[point.keys["nic"]] = point.published
    return found


def _report(results: dict[str, object], given: argparse.Namespace) -> None:
    published = _published()
    points, others = results["points"], results["others"]
    assert isinstance(points, list)
    assert isinstance(others, list)
    rows = [
        {
            "what": f"{one['kind']} {one['bytes']}",
            "NICs": one["nics"],
            "measured": f"{one.get('gbps', one.get('value')):.4g} {one.get('unit', 'Gb/s')}",
            "CX7": published.get((one["kind"], one["bytes"]), {}).get("CX7"),
            "EFA": published.get((one["kind"], one["bytes"]), {}).get("EFA"),
        }
        for one in (*points, *others)
    ]
    print_table("bench_two_nodes (published: Gb/s, one GPU)", tuple(rows[0]), rows)
    if given.json:
        given.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if given.plot:
        _draw(points, published, given.plot)


def _draw(
    points: list[dict[str, object]], published: dict[tuple[str, int], dict[str, float]], path: Path
) -> None:
    need("matplotlib", "plot", "--plot").use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4))
    for axis, kind in zip(axes, ("single", "paged"), strict=True):
        mine = [(one["bytes"], one["gbps"]) for one in points if one["kind"] == kind]
        axis.plot(*zip(*sorted(mine), strict=True), "o-", label="measured")
        for nic in ("CX7", "EFA"):
            theirs = [
                (nbytes, by_nic[nic])
                for (what, nbytes), by_nic in published.items()
                if what == kind and nic in by_nic
            ]
            axis.plot(*zip(*sorted(theirs), strict=True), "x--", label=f"published, {nic}")
        axis.set(xscale="log", xlabel="bytes", ylabel="Gb/s", title=f"{kind} writes")
        axis.legend()
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
